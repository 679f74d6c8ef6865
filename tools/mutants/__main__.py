"""Mutants: small faults in the code, made on purpose. How many of them do the tests catch?

    python -m tools.mutants draw [--replace]        write the list; --replace draws anew only for those that are gone
    python -m tools.mutants run [--room R] [--only ID]    run the tests on them, print the score, write score.json
    python -m tools.mutants holds TEST              the mutants that a test file or a test catches, and who else does

`run` ends with 1 if a mutant survives that score.json says was caught. `holds` ends with 1 if only TEST catches one: a
test is deleted only if `holds` says 0. The list is tools/mutants/list.json; what makes a mutant equivalent is written
there by hand. Mutants live in copies of the tree in a temporary folder.
"""

import argparse
import sys
from collections.abc import Sequence

from tools.mutants.draw import draw
from tools.mutants.places import LIST, Mutant, find, load, save
from tools.mutants.rooms import ROOMS, ROOT
from tools.mutants.run import Result, Workers, chosen, files_of, held, measure, run
from tools.mutants.score import lost, read, report, write
from tools.mutants.scratch import Tree, trees


def _draw(replace: bool) -> int:
    listed = load() if LIST.exists() else []
    if listed and not replace:
        raise SystemExit(f"{LIST.name} is there: mutants are drawn once (--replace: anew for those that are gone)")
    files = files_of(ROOT)
    gone = [mutant.id for mutant in listed if find(mutant, ROOT, files) is None]
    mutants = draw(ROOT, listed=listed, gone=gone)
    save(mutants)
    print(f"{len(mutants)} mutants; gone: {' '.join(gone) or 'none'}")
    return 0


def _run(listed: Sequence[Mutant], mutants: Sequence[Mutant], processes: int) -> int:
    files = files_of(ROOT)
    with trees(ROOT, processes) as copies:
        workers = Workers(copies)
        told = measure(ROOT, workers, [mutant for mutant in mutants if not mutant.equivalent], files)
        before = read()

        def try_(tree: Tree, mutant: Mutant) -> Result:
            known = before[mutant.id].by if mutant.id in before else ""
            found = run(tree, mutant, [] if mutant.equivalent else chosen(mutant, told, known=known), files)
            print(f"{mutant.id}: {found.state} {found.by}", flush=True)
            return found

        results = workers.map(try_, mutants)
    print(report(mutants, results))
    write(results, listed)
    worse = lost(before, results)
    for name in worse:
        print(f"{name} was caught, and survives now")
    return 1 if worse else 0


def _holds(mutants: Sequence[Mutant], test: str, processes: int) -> int:
    """Print the mutants that a test catches, with another test that catches them too."""
    files = files_of(ROOT)
    mutants = [mutant for mutant in mutants if not mutant.equivalent]
    with trees(ROOT, processes) as copies:
        workers = Workers(copies)
        results = held(workers, mutants, measure(ROOT, workers, mutants, files), test, files)
    for found in results:
        print(f"{found.id}: " + (f"also {found.by}" if found.state == "caught" else "NO OTHER TEST"))
    only = sum(found.state != "caught" for found in results)
    print(f"{test} catches {len(results)} mutants, {only} of them alone")
    return 1 if only else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the status of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw").add_argument("--replace", action="store_true")
    for command in (running := commands.add_parser("run"), holding := commands.add_parser("holds")):
        command.add_argument("--processes", type=int, default=2)
    running.add_argument("--room", choices=tuple(ROOMS), action="append")
    running.add_argument("--only", metavar="ID", action="append")
    holding.add_argument("test")
    options = parser.parse_args(argv)
    if options.command == "draw":
        return _draw(options.replace)
    listed = load()
    if options.command == "holds":
        return _holds(listed, options.test, options.processes)
    mutants = [one for one in listed if one.room in (options.room or ROOMS) and one.id in (options.only or [one.id])]
    return _run(listed, mutants, options.processes)


if __name__ == "__main__":
    sys.exit(main())

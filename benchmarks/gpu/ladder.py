"""The ladder: kernels from the simplest to a whole model, each in a process of its own with a limit.

    python -m benchmarks.gpu.ladder [--json FILE] [--only NAME ...] [--seconds 200] [--rung-seconds 40]
                                    [--processes 1] [--together]

A rung that hangs, dies or is wrong is named, and the kernels that it stands for are listed as `broken`: the stages that
need them are left out (`benchmarks.gpu.run`). The exit status is 1 if there is one. --together runs all rungs in one
process, for a CPU; --processes is how many run at a time.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import result_file
from benchmarks.gpu.supervise import BAD, Cases, Verdict, as_rows, run_cases
from tools.cases.kernels.ladder import KERNELS, RUNGS, Kernel, Rung

_TESTS = "tests/unit/pallas_kernels/test_ladder.py::test_rung"
_ENVIRON = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def climb(
    rungs: Sequence[Rung],
    log: Path,
    *,
    until: float,
    seconds: float,
    start_seconds: float,
    processes: int = 1,
    together: bool = False,
) -> list[tuple[Rung, Verdict]]:
    """Run rungs in their order; return a verdict for each. Logs are `log` and, per rung, files beside it."""
    names = [f"{_TESTS}[{rung.name}]" for rung in rungs]
    if together:
        cases = Cases(tuple(names), seconds, start_seconds=start_seconds)
        verdicts = run_cases(cases, log, until=until, environ=_ENVIRON)
        by_name = {verdict.case: verdict for verdict in verdicts}
        return [(rung, by_name.get(name, verdicts[0])) for rung, name in zip(rungs, names, strict=True)]

    def climb_one(number: int) -> tuple[Rung, Verdict]:
        rung, name = rungs[number], names[number]
        if time.monotonic() >= until:
            return rung, Verdict(name, "not run")
        own = log.with_name(f"{log.stem}-{number:02}.log")
        cases = Cases((name,), seconds, start_seconds=start_seconds)
        (verdict,) = run_cases(cases, own, until=until, environ=_ENVIRON)
        print(f"{rung.name:40} {verdict.outcome:8} {verdict.seconds:6.1f} s  {verdict.why}", flush=True)
        return rung, verdict

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(climb_one, range(len(rungs))))


def broken(climbed: Sequence[tuple[Rung, Verdict]]) -> list[Kernel]:
    """Return the kernels of rungs that are not right, in the order of `KERNELS`."""
    found = {kernel for rung, verdict in climbed if verdict.outcome in BAD for kernel in rung.kernels}
    return [kernel for kernel in KERNELS if kernel in found]


def main(words: Sequence[str] | None = None) -> int:
    """Climb and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="rungs whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=200, help="after which nothing begins")
    parser.add_argument("--rung-seconds", type=float, default=40, help="after which a rung is hung")
    parser.add_argument("--start-seconds", type=float, default=60, help="in which a process must begin its rung")
    parser.add_argument("--processes", type=int, default=1, help="rungs that run at a time")
    parser.add_argument("--together", action="store_true", help="all rungs in one process")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    rungs = [rung for rung in RUNGS if any(word in rung.name for word in args.only)]
    log = (args.json or Path("ladder.json")).with_suffix(".rungs.log")
    until = time.monotonic() + args.seconds
    limits = {"until": until, "seconds": args.rung_seconds, "start_seconds": args.start_seconds}
    climbed = climb(rungs, log, **limits, processes=args.processes, together=args.together)
    lost = broken(climbed)
    for rung, verdict in climbed:
        if verdict.outcome in BAD:
            print(f"BROKEN {', '.join(rung.kernels)}: {rung.name}: {verdict.outcome} {verdict.why}")
    print(f"{len(climbed)} rungs; broken kernels: {', '.join(lost) or 'none'}")
    if args.json:
        rows = [row for rung, verdict in climbed for row in as_rows([verdict], rung=rung.name, kernels=rung.kernels)]
        result_file.write(args.json, {"broken": lost, "rungs": rows})
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())

"""The score of the tests: how many of the mutants that can be caught they catch, by room."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.mutants.places import Mutant
from tools.mutants.run import Result

SCORE = Path(__file__).with_name("score.json")


def read(path: Path = SCORE) -> dict[str, Result]:
    """Return the results of earlier runs by mutant."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Result(name, **entry) for name, entry in entries.items()}


def write(results: Iterable[Result], mutants: Iterable[Mutant], path: Path = SCORE) -> None:
    """Write results over those of earlier runs; those of mutants that are no longer in the list go."""
    found = read(path) | {result.id: result for result in results}
    lines = [
        f" {json.dumps(name)}: {json.dumps({'state': found[name].state, 'by': found[name].by})}"
        for name in (mutant.id for mutant in mutants)
        if name in found
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def lost(before: Mapping[str, Result], results: Iterable[Result]) -> list[str]:
    """Return the ids of mutants that were caught before, and survive now."""
    return [
        one.id for one in results if one.state == "survived" and one.id in before and before[one.id].state == "caught"
    ]


def report(mutants: Sequence[Mutant], results: Sequence[Result]) -> str:
    """Return the survivors with their changes, then the score of each room and of all."""
    by_id = {mutant.id: mutant for mutant in mutants}
    lines = []
    for result in results:
        one = by_id[result.id]
        if result.state in ("survived", "gone"):
            lines += [
                f"{result.state} {one.id} {one.file} {one.function} {result.by}",
                f"  - {one.before}",
                f"  + {one.after}",
            ]
    rooms = dict.fromkeys(mutant.room for mutant in mutants)
    for room in [*rooms, "all"]:
        states = [result.state for result in results if room in (by_id[result.id].room, "all")]
        caught, survived = states.count("caught"), states.count("survived")
        share = f"{caught / (caught + survived):.1%}" if caught + survived else "none"
        lines.append(
            f"{room}: {caught} of {caught + survived} caught ({share}); "
            f"{states.count('equivalent')} equivalent, {states.count('gone')} gone"
        )
    return "\n".join(lines)

"""Draw mutants: the same ones from the same sources and seed, evenly over operators, files and functions."""

import ast
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from tools.mutants.changes import changes
from tools.mutants.places import Function, Mutant, applied, code, find, functions
from tools.mutants.rooms import PER_ROOM, ROOMS, sources

SEED = 1


def draw(
    root: Path,
    rooms: Iterable[str] = tuple(ROOMS),
    listed: Sequence[Mutant] = (),
    gone: Collection[str] = (),
    seed: int = SEED,
) -> list[Mutant]:
    """Return what is listed and not gone, and as many new mutants as each room then lacks, sorted by room.

    No id is given twice, and no place is drawn twice.
    """
    out = []
    for room in rooms:
        mine = [mutant for mutant in listed if mutant.room == room]
        kept = [mutant for mutant in mine if mutant.id not in gone]
        new = _choose(list(_all(room, root)), kept, PER_ROOM - len(kept), random.Random(f"{seed}:{room}"), root)
        number = max((int(mutant.id.rsplit("-", 1)[1]) for mutant in mine), default=0)
        out += kept + [mutant._replace(id=f"{room}-{number + index:02}") for index, mutant in enumerate(new, 1)]
    return out


def _all(room: str, root: Path) -> Iterator[Mutant]:
    """Yield every mutant of a room."""
    for file in sources(room, root):
        found = list(functions(ast.parse((root / file).read_text(encoding="utf-8"))))
        named = Counter(name for name, _ in found)
        for name, function in found:
            if named[name] == 1:  # a property and its setter have one name
                yield from (mutant._replace(id=f"{room}-0", file=file) for mutant in of_function(name, function))


def of_function(name: str, function: Function) -> Iterator[Mutant]:
    """Yield every mutant of a function, without id and file; a few may not compile."""
    texts = {node: ast.unparse(node) for node in code(function)}
    places: dict[str, dict[tuple[int, int], None]] = {}
    for node, text in texts.items():
        places.setdefault(text, {})[node.lineno, node.col_offset] = None
    for node, operator, after in changes(function):
        before = texts[node]
        if before != after:
            nth = list(places[before]).index((node.lineno, node.col_offset))
            yield Mutant("", "", name, operator, before, after, nth)


def _choose(found: list[Mutant], kept: Sequence[Mutant], count: int, rng: random.Random, root: Path) -> list[Mutant]:
    """Return `count` of the mutants found that compile: operators take turns, each where least was taken.

    A file's part is in proportion to the mutants that it offers.
    """
    rng.shuffle(found)
    offers = Counter(mutant.file for mutant in found)
    functions_taken = Counter((mutant.file, mutant.function) for mutant in kept)
    files_taken = Counter(mutant.file for mutant in kept)
    closed = {_place(mutant) for mutant in kept}
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in found:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    operators = sorted(by_operator)
    rng.shuffle(operators)

    def crowd(mutant: Mutant) -> tuple[bool, int, float]:
        near = functions_taken[mutant.file, mutant.function]
        return _place(mutant) in closed, near, files_taken[mutant.file] / offers[mutant.file]

    taken: list[Mutant] = []
    while len(taken) < count and (operators := [operator for operator in operators if by_operator[operator]]):
        for operator in operators[: count - len(taken)]:
            best = min(by_operator[operator], key=crowd, default=None)
            if best is None or _place(best) in closed:
                by_operator[operator] = []
                continue
            by_operator[operator].remove(best)
            if _compiles(best, root):
                taken.append(best)
                closed.add(_place(best))
                functions_taken[best.file, best.function] += 1
                files_taken[best.file] += 1
    return taken


def _place(mutant: Mutant) -> tuple[str, str, str, int]:
    return mutant.file, mutant.function, mutant.before, mutant.nth


def _compiles(mutant: Mutant, root: Path) -> bool:
    place = find(mutant, root, [])
    assert place is not None
    try:
        compile(applied((root / mutant.file).read_text(encoding="utf-8"), place.node, mutant.after), "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True

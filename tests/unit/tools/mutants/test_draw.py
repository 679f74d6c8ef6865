"""Mutants are drawn once: the same from the same sources, and never where only a reader or a check is served."""

import ast
from pathlib import Path

import pytest

from tools.mutants.changes import changes
from tools.mutants.draw import draw
from tools.mutants.places import find, functions
from tools.mutants.rooms import ROOT
from tools.mutants.run import files_of

SILENT = '''
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    def shown(a: int) -> int:
        return a + 1


def seen(a: "int | 3") -> None:
    """Return 1 + 1."""
    assert a < 3, a + 1
    logger.info("text %d", a + 1)
    if a:
        raise ValueError(f"{a + 1} of {max(a, 2)}")


class Lease:
    def check(self) -> None:
        print(self.a + 1)

    def __repr__(self) -> str:
        return "a" + self.b[1:]
'''


def changed(body: str, returns: str = "None") -> set[str]:
    """The changes of a function, as texts."""
    tree = ast.parse(f"def f(a, b) -> {returns}:\n    {body}")
    return {f"{one.operator}: {one.after}" for _, function in functions(tree) for one in changes(function)}


@pytest.mark.parametrize(
    ("body", "returns", "expected"),
    [
        ("a.b(a < b)", "None", {"compare: a <= b", "remove: pass"}),
        ("c = a[b:]", "None", {"off by one: (b) + 1"}),
        ("c = a - b", "None", {"arithmetic: a + b"}),
        ("c = 'text' + b", "None", set()),
        ("a.c = not b", "None", {"boolean: b", "remove: pass"}),
        ("c = a and b", "None", {"boolean: a or b", "boolean: a", "boolean: b"}),
        ("c = a if b else 0", "None",
         {"swap: 0 if b else a", "condition: True", "condition: False", "off by one: 1", "off by one: -1"}),
        ("c = jnp.where(a, b, c)", "None", {"swap: jnp.where(a, c, b)"}),
        ("c = min(a, b, key=d)", "None", {"opposite: max(a, b, key=d)", "keyword: min(a, b)"}),
        ("c = zip(a, b, strict=True)", "None", set()),
        ("for c in a: break", "None", {"jump: pass", "jump: continue"}),
        ("return a", "bool", {"return: return not (a)"}),
        ("return a", "Match | None", {"return: return None"}),
        ("return a", "tuple[int, int]", set()),
    ],
)  # fmt: skip
def test_a_function_has_exactly_these_changes(body: str, returns: str, expected: set[str]) -> None:
    assert changed(body, returns) == expected


def test_no_change_where_code_only_checks_shows_or_declares() -> None:
    found = [one for _, function in functions(ast.parse(SILENT)) for one in changes(function)]
    assert {one.operator for one in found} == {"condition"}, "of the branch that raises; nothing in what it raises"


def test_the_draw_is_repeated_and_replaces_only_what_is_gone() -> None:
    first = draw(ROOT, ["cache"])
    assert draw(ROOT, ["cache"]) == first
    assert draw(ROOT, ["cache"], seed=2) != first
    again = draw(ROOT, ["cache"], first, gone=[mutant.id for mutant in first[30:]])
    assert again[:30] == first[:30]
    new = again[30:]
    assert [mutant.id for mutant in new] == [f"cache-{number}" for number in range(41, 51)], "no id is given twice"
    assert not {(one.file, one.function, one.before, one.nth) for one in new} & {
        (one.file, one.function, one.before, one.nth) for one in first[:30]
    }


def test_operators_and_files_have_equal_parts() -> None:
    found = draw(ROOT, ["sched"])
    operators = [mutant.operator for mutant in found]
    assert all(2 <= operators.count(operator) <= 5 for operator in set(operators))
    assert len(set(operators)) == 11
    assert max([one.file for one in found].count(one.file) for one in found) <= 6
    assert all(find(mutant, ROOT, files_of(ROOT)) for mutant in found)


def test_a_room_without_places_ends(tmp_path: Path) -> None:
    assert draw(tmp_path, ["cache"]) == []

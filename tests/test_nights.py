"""Nightly tests that take turns: a week has all of their cases."""

from pathlib import Path

import pytest

from tests.support import nights
from tests.support.nights import NIGHTS, turns

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("key", NIGHTS)
def test_the_table_names_tests_that_are_there_and_no_case_waits_longer_than_a_week(key: str) -> None:
    file, _, test = key.partition("::")
    text = (ROOT / file).read_text()
    assert f"def {test or 'test_'}" in text
    assert "nightly" in text or "by_turns" in text or "sample" in text
    assert 2 <= NIGHTS[key] <= 7


def test_each_case_has_its_turn_once_in_so_many_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of a file with equal parameters have the same night; other files have all of theirs each night."""
    monkeypatch.setattr(nights, "NIGHTS", {"a.py": 3, "b.py::one": 2})
    cases = [(f"a.py::{test}", f"{number}]") for test in ("one", "two") for number in range(7)]
    cases += [(f"b.py::{test}", f"{number}]") for test in ("one", "two") for number in range(4)]
    table = {
        case: [night for night in range(6) if turns(cases, 100 + night)[index]] for index, case in enumerate(cases)
    }
    for (test, parameters), found in table.items():
        every = {"a.py": 3, "b.py::one": 2}.get(test if test == "b.py::one" else test[:4], 1)
        assert len(found) == 6 // every
        assert len({night % every for night in found}) == 1
        assert found == table[test.replace("two", "one"), parameters] or test == "b.py::two"

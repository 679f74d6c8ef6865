"""The fixtures of every run (tests/parity/selection.py) show all that any fixture shows."""

import pytest

from jswa.model.hf.config import parse_config
from tests.parity.load import names, read_config
from tests.parity.selection import CHOSEN, shown
from tests.support.turns import by_turns, in_turn


def test_the_chosen_fixtures_show_every_family_and_every_feature() -> None:
    """And nearly all pairs of both."""
    pairs = {name: shown(parse_config(read_config(name))) for name in names()}
    assert set(pairs) >= CHOSEN
    every = {pair for found in pairs.values() for pair in found}
    chosen = {pair for name in CHOSEN for pair in pairs[name]}
    for part, kind in enumerate(("family", "feature")):
        missing = {pair[part] for pair in every} - {pair[part] for pair in chosen}
        helpful = sorted(name for name, found in pairs.items() if {pair[part] for pair in found} & missing)
        assert not missing, f"no chosen fixture has the {kind} {missing}; add one of {helpful} to CHOSEN"
    assert len(chosen) > 0.9 * len(every)


@pytest.mark.parametrize("every", [1, 3, 12])
def test_each_case_has_its_turn(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in as many turns as there are, and nightly."""
    ran: list[str] = []
    for turn in range(7, 7 + every):
        monkeypatch.setenv("TEST_TURN", str(turn))
        ran += [param.values[0] for param in by_turns("abcdefghijklm", every) if not param.marks]
    assert sorted(ran) == list("abcdefghijklm")


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_whole_test_has_its_turn(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above."""
    marked: list[bool] = []
    for turn in range(7, 7 + every):
        monkeypatch.setenv("TEST_TURN", str(turn))

        @in_turn(0, every)
        def some_test() -> None: ...

        marked.append(hasattr(some_test, "pytestmark"))
    assert marked.count(False) == 1

"""The fixtures of every run (tests/parity/selection.py) show all that any fixture shows."""

from jswa.model.hf.config import parse_config
from tests.parity.load import names, read_config
from tests.parity.selection import CHOSEN, shown


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

"""Drafters with weights in the engine: what they draft on its pages, also behind hits, and that no token changes."""

import numpy as np
import pytest

from tests.support.drafts.engines import DRAFTS, Pair, pair_of
from tests.support.nights import sample

KINDS = (
    "eagle3",
    "eagle31_window",
    "peagle",
    "mtp",
    "assistant_of_base",
    "assistant_of_dense",
    "dflash_mimo",
    "dspark",
    "dspark_gemma4",
    "dflash_beam",
)


@pytest.fixture(scope="module", params=sample(KINDS, 10))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target with and without its drafter."""
    return pair_of(request.param, tmp_path_factory.mktemp("pair"), alone=request.param == "eagle3")


def _prompt(pair: Pair, count: int, seed: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(seed).integers(3, pair.model.vocab_size, count).tolist()
    return prompt


def _check_drafts(pair: Pair, text: list[int], least: int) -> None:
    """Check what has been drafted against the drafter behind the whole text."""
    behind, drafted = pair.behind(text, pair.seen.breaks), {one.position: one for one in pair.seen.drafts}
    # What DFlash drafts depends on how many drafts there are.
    wanted = {count: behind.drafts(count) for count in {len(one.drafts) for one in drafted.values()}}
    assert len(drafted) >= least
    for position, one in drafted.items():
        assert one.token == text[position]
        assert one.drafts == tuple(wanted[len(one.drafts)][position]), f"behind position {position}"
    assert max(len(one.drafts) for one in drafted.values()) == DRAFTS


def test_drafts_are_those_behind_the_whole_text_and_change_no_token(pair: Pair) -> None:
    """A prompt in chunks, then decode steps; then the text goes on behind its cached beginning, and behind a part."""
    prompt = _prompt(pair, 45, 1)
    said = pair.said(prompt, 60, drafts=True)
    text = prompt + said
    assert not pair.seen.begins
    _check_drafts(pair, text, 20)
    for length in (len(text), 60):
        pair.seen.drafts.clear()
        pair.seen.begins.clear()
        pair.seen.breaks.clear()
        beginning = text[:length] + _prompt(pair, 3, length)
        more = pair.said(beginning, 40, drafts=True)
        assert pair.seen.begins or not pair.drafter.layers, "the text did not begin behind a cached prefix"
        _check_drafts(pair, beginning + more, 12)
        assert more == pair.said(beginning, 40, drafts=False)
    pair.drafting.flush_cache()
    assert said == pair.said(prompt, 60, drafts=False)

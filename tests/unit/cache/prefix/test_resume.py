"""The start rule against its definition (jswa/cache/prefix/resume.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.architecture import Reach
from jswa.cache.prefix.resume import last_live_boundary, replay_start, resume
from tests.support.builders import make_layout
from tests.support.text.model import first_seen

SHAPES = [
    *((1, Reach(1)), (1, Reach(5)), (4, Reach(3)), (4, Reach(9))),
    *((4, Reach(4, chunked=True)), (2, Reach(6, chunked=True))),
    *((1, Reach(3, chunked=True, lookback=1)), (4, Reach(4, chunked=True, lookback=1)), (2, Reach(4, True, 2))),
]


def seen(reach: Reach, boundary: int) -> range:
    """Return the positions before `boundary` that a query there sees."""
    return range(first_seen(reach, boundary), boundary)


@given(st.sampled_from(SHAPES), st.lists(st.booleans(), min_size=1, max_size=30), st.data())
def test_the_last_live_boundary_is_the_largest_whose_window_is_there(
    shape: tuple[int, Reach], live: list[bool], data: st.DataObject
) -> None:
    """Each position that a query there sees lies on a cached page; this holds for no later boundary."""
    page, reach = shape
    length = data.draw(st.integers(0, page * len(live)))
    found = last_live_boundary(reach, page, length, np.array(live))
    alive = [b for b in range(length + 1) if all(live[position // page] for position in seen(reach, b))]
    assert found == max(alive)


@given(st.sampled_from(SHAPES), st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_a_row_starts_at_the_largest_of_three(
    shape: tuple[int, Reach], layers: int, live: list[bool], data: st.DataObject
) -> None:
    """The last live boundary, or the start of a replay through J layers; and from where its KV is exact."""
    page, reach = shape
    layout = make_layout(page, reach, num_full=1, num_local=layers)
    length = data.draw(st.integers(0, page * len(live)))
    at = resume(layout, length, np.array(live))
    boundary = last_live_boundary(reach, page, length, np.array(live))
    revived = length
    for _ in range(layers):
        revived = first_seen(reach, revived)
    assert at.start == max(boundary, revived)
    assert at.full_to == length
    if at.start == boundary:
        assert list(range(at.local_visible_from, at.boundary)) == list(seen(reach, boundary))
        assert at.local_visible_from - page < at.exact_from <= at.local_visible_from
    else:
        assert at.local_visible_from == at.boundary == at.start
        assert at.exact_from == first_seen(reach, length), "exactly what a query at the end sees is exact"


@pytest.mark.parametrize(
    ("layers", "window", "tokens"), [(12, 128, 1_524), (39, 128, 4_953), (52, 1_024, 53_196), (50, 1_024, 51_150)]
)
def test_the_length_of_a_replay_depends_on_windows_and_layers_only(layers: int, window: int, tokens: int) -> None:
    """J·(W - 1) for gpt-oss-20b, MiMo-V2-Flash, gemma-3-27b and gemma-4-31B, for prefixes of any length."""
    layout = make_layout(64, Reach(window), num_full=1, num_local=layers)
    assert 100_000 - replay_start(layout, 100_000) == tokens
    assert resume(layout, 100_000, np.zeros(2_000, bool)).start == 100_000 - tokens


def test_without_local_layers_a_row_starts_where_full_kv_ends() -> None:
    """There is no window that could be missing."""
    layout = make_layout(16, None, num_full=2, num_local=0)
    assert resume(layout, 37, np.zeros(3, bool)).start == 37

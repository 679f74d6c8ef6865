"""Sampling masks: which steps list tokens, which events carry the lists, and what is listed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.model.collectives import AXIS
from jswa.plan import PLAIN, Request, StepResults, TokenEvent
from jswa.ribs.rib import Landed
from jswa.ribs.sampling_mask.host import SamplingMaskRows
from jswa.ribs.sampling_mask.traced import drawn, listed
from jswa.types import SamplingParams
from tests.support.builders import make_plan


def request(**asked: Any) -> Request:
    return Request("r", np.arange(5, dtype=np.int32), SamplingParams(**asked), frozenset(), (0, 0), 100)


def test_a_step_lists_tokens_while_a_row_wants_them() -> None:
    rows, launched = SamplingMaskRows(4), np.zeros(4, int)
    assert rows.variant(launched) == PLAIN
    rows.begins(2, request(return_sampling_mask=True, top_k=3))
    assert rows.variant(launched) == rows.variant(launched, np.array([0, 2])) == "sampling_mask"
    assert rows.variant(launched, np.array([0, 1])) == PLAIN
    rows.check(np.array([2]))
    with pytest.raises(AssertionError, match="unused row"):
        rows.check(np.array([1]))
    rows.leaves(2)
    rows.check(np.zeros(0, int))


def test_a_token_has_the_mask_of_its_place_and_an_error_has_none() -> None:
    """The row's two tokens are the second and third that the step draws. The third has more than a list holds."""
    ids, size = np.array([[9, 9], [4, 7], [1, 2]]), np.array([2, 1, 3])
    results = StepResults({"sampling_mask": (ids, size)})
    events = [TokenEvent("r", 4), TokenEvent("r", 2)]
    rows, plan = SamplingMaskRows(4), make_plan([0, 1], [0, 5], [2, 1])
    landed = Landed(request(return_sampling_mask=True, top_k=3), {}, plan, 1, 1, 2)
    first, second = rows.applied(landed, results, events)
    assert first.sampling_mask is not None
    assert second.sampling_mask is not None
    assert (first.sampling_mask.tolist(), second.sampling_mask.tolist()) == ([4], [])
    assert rows.applied(landed, results, [TokenEvent("r", None, "error")])[0].sampling_mask is None
    assert rows.applied(landed._replace(request=request()), results, events) == events


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.integers(1, 12))
def test_the_tokens_that_are_kept_are_listed_in_their_order(seed: int, devices: int, most: int) -> None:
    """Over the columns of all devices; the list ends where it is full, and the number goes on."""
    rng = np.random.default_rng(seed)
    kept = rng.random((3, 16)) < rng.choice([0.0, 0.1, 0.6, 1.0], (3, 1))
    if devices == 1:
        ids, size = listed(jnp.asarray(kept), most, 1)
    else:
        parts = jnp.asarray(np.stack(np.split(kept, devices, axis=1)))
        of_all = jax.vmap(lambda part: listed(part, most, devices), axis_name=AXIS)(parts)
        ids, size = (array[0] for array in of_all)
    for row, found, count in zip(kept, np.asarray(ids), np.asarray(size), strict=True):
        wanted = np.flatnonzero(row)
        assert count == len(wanted)
        assert found.tolist() == [*wanted[:most], *[0] * (most - len(wanted))]


def test_a_greedy_row_has_its_token_alone() -> None:
    logits = jnp.zeros((2, 8))
    limited = jnp.where(jnp.arange(8) % 2 == 0, logits, -jnp.inf)
    found = drawn(logits, jnp.array([5, 2]), jnp.array([False, True]), lambda: limited)
    assert found.size.tolist() == [1, 4]
    assert found.ids[:, :4].tolist() == [[5, 0, 0, 0], [0, 2, 4, 6]]

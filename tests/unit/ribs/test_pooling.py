"""The host side of pooling: which steps compute hidden states, and what becomes of them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import GenerationError, InvalidSampling
from jswa.plan import PLAIN, Request, StepResults, TokenEvent
from jswa.ribs.hooks import TokenRows
from jswa.ribs.pooling.host import PoolingRows
from jswa.ribs.pooling.traced import forwarded
from jswa.ribs.rib import Landed
from jswa.sched.rows import Rows
from jswa.types import SamplingParams
from tests.support.builders import make_plan

ROWS = 4


def request(pooling: Any, length: int = 5) -> Request:
    params = SamplingParams(pooling=pooling, max_tokens=1)
    return Request("r", np.arange(length, dtype=np.int32), params, frozenset(), (0, 0), 100)


def results(last: list[float], total: list[float]) -> StepResults:
    """What a step of two rows gives, of which the second is ours."""
    rows = (np.array([[9.0] * len(last), last], np.float32), np.array([[9.0] * len(total), total], np.float32))
    return StepResults({}, {"pooling": rows})


def landed(asked: Request, notes: dict[str, Any], start: int, count: int) -> Landed:
    plan = make_plan([0, 1], [0, start], [2, count])
    return Landed(asked, notes, plan, 1, 1, 0)


def test_a_step_is_pooled_while_a_row_runs_its_prompt() -> None:
    rows, launched = PoolingRows(ROWS), np.zeros(ROWS, int)
    assert rows.variant(launched) == PLAIN
    rows.begins(2, request("last"))
    assert rows.variant(launched) == rows.variant(launched, np.array([1, 2])) == "pooling"
    assert rows.variant(launched, np.array([0, 1])) == PLAIN
    launched[2] = 4
    assert rows.variant(launched, np.array([2])) == "pooling"
    launched[2] = 5
    assert rows.variant(launched) == PLAIN
    rows.check(np.array([2]))
    with pytest.raises(AssertionError, match="unused row"):
        rows.check(np.array([1]))
    rows.leaves(2)
    rows.check(np.zeros(0, int))


def test_rows_of_two_ribs_run_in_a_variant_of_both() -> None:
    """And a row of one rib alone in a variant of that."""
    rows = Rows(ROWS)
    scored = SamplingParams(prompt_logprobs=0)
    logprobs, pooling, *_ = rows.ribs
    pooling.begins(0, request("last"))
    logprobs.begins(1, Request("s", np.arange(5, dtype=np.int32), scored, frozenset(), (0, 0), 100))
    rows.asking = 2
    assert rows.variant(np.array([0])) == "pooling"
    assert rows.variant(np.array([1])) == "prompt_logprobs"
    assert rows.variant(np.array([0, 1])) == rows.variant() == "prompt_logprobs+pooling"


def test_the_last_token_is_taken_of_the_last_chunk() -> None:
    rows, notes, asked = PoolingRows(ROWS), dict[str, Any](), request("last")
    assert rows.applied(landed(asked, notes, 0, 3), results([1, 2], [5, 5]), []) == []
    (event,) = rows.applied(landed(asked, notes, 3, 2), results([3, 4], [5, 5]), [TokenEvent("r", 9, "length")])
    assert event.pooled is not None
    assert event.pooled.tolist() == [3, 4]


def test_a_mean_is_added_up_over_chunks_and_begins_anew_with_its_row() -> None:
    """The prompt of 5 runs in chunks of 3 and 2, and its first chunk twice, as after a preemption."""
    rows, notes, asked = PoolingRows(ROWS), dict[str, Any](), request("mean")
    for total in ([100.0, 100.0], [6.0, 3.0]):
        assert rows.applied(landed(asked, notes, 0, 3), results([0, 0], total), []) == []
    (event,) = rows.applied(landed(asked, notes, 3, 2), results([0, 0], [4.0, 2.0]), [TokenEvent("r", 9, "length")])
    assert event.pooled is not None
    assert event.pooled.tolist() == [2.0, 1.0]
    with pytest.raises(AssertionError, match="has not been added up"):
        rows.applied(landed(asked, {}, 3, 2), results([0, 0], [4.0, 2.0]), [])


def test_a_failed_row_has_no_hidden_state() -> None:
    rows, error = PoolingRows(ROWS), GenerationError("not finite")
    (event,) = rows.applied(
        landed(request("last"), {}, 0, 5), results([1, 2], [5, 5]), [TokenEvent("r", None, "error", error=error)]
    )
    assert event.pooled is None


def test_rows_are_added_up_apart_from_padding_and_from_what_is_not_finite() -> None:
    """Three rows of 2, 1 and 3 tokens and a padded one; the second row's token is NaN."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((8, 16)).astype(np.float32)
    hidden[2] = np.nan
    owners, last = np.array([0, 0, 1, 2, 2, 2, 4, 4], np.int32), np.array([1, 2, 5, 7], np.int32)
    rows = TokenRows(jnp.asarray(owners), jnp.asarray(last))
    found = forwarded(_no_logits, jnp.asarray(hidden), jnp.zeros(8, jnp.int32), lambda: rows, 128, 1)
    np.testing.assert_array_equal(found.last, hidden[last])
    wide = hidden.astype(np.float64)
    np.testing.assert_allclose(found.total[0], wide[:2].sum(0), atol=1e-5)
    np.testing.assert_allclose(found.total[2], wide[3:6].sum(0), atol=1e-5)
    assert not found.total[3].any()


def _no_logits(vectors: Any) -> Any:
    raise AssertionError("pooling needs no logits")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pooling": "cls", "max_tokens": 1}, "pooling = 'cls': must be None, 'last' or 'mean'"),
        ({"pooling": "last"}, "max_tokens = None: must be 1 with pooling"),
        ({"pooling": "mean", "max_tokens": 2}, "max_tokens = 2: must be 1 with pooling"),
    ],
)
def test_wrong_parameters_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSampling, match=message):
        SamplingParams(**given)

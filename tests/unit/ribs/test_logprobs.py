"""The host side of log probabilities: which steps compute them, and which events carry them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import GenerationError
from jswa.model.collectives import AXIS
from jswa.plan import PLAIN, LogprobTable, PromptLogprobs, Request, StepPlan, StepResults, TokenEvent
from jswa.ribs.logprobs.host import LogprobRows
from jswa.ribs.logprobs.traced import log_softmax
from jswa.ribs.rib import Known, Landed
from jswa.types import SamplingParams
from tests.support.builders import make_plan

ROWS = 4


def request(length: int = 5, **params: Any) -> Request:
    return Request("r", np.arange(length, dtype=np.int32), SamplingParams(**params), frozenset(), (0, 0), 100)


def table(count: int) -> tuple[Any, ...]:
    """Log probabilities of so many choices: the chosen one's is minus its place."""
    ids = np.arange(2 * count).reshape(count, 2)
    chosen = -np.arange(count, dtype=np.float32)
    return LogprobTable(chosen, np.ones(count, int), ids, ids.astype(np.float32), np.zeros(count, np.float32))[:5]


def test_a_step_runs_in_the_narrowest_variant_that_its_rows_need() -> None:
    rows, launched = LogprobRows(ROWS), np.zeros(ROWS, int)
    assert rows.variant(launched) == rows.variant(launched, np.arange(ROWS)) == PLAIN
    rows.begins(1, request(logprobs=0))
    rows.begins(2, request(prompt_logprobs=0))
    assert rows.variant(launched, np.array([0])) == PLAIN
    assert rows.variant(launched, np.array([0, 1])) == "logprobs"
    assert rows.variant(launched, np.array([0, 1, 2])) == rows.variant(launched) == "prompt_logprobs"
    launched[2] = 4  # the last token of the prompt is followed by none of it
    assert rows.variant(launched, np.array([2])) == PLAIN
    assert rows.variant(launched) == "logprobs"
    rows.check(np.array([1, 2]))
    with pytest.raises(AssertionError, match="unused row"):
        rows.check(np.array([2, 3]))
    rows.leaves(1)
    rows.leaves(2)
    rows.check(np.zeros(0, int))
    assert rows.variant(launched) == PLAIN


def test_the_section_has_the_token_that_follows_each_of_the_steps() -> None:
    asked = request(prompt_logprobs=0)
    known = [Known(asked, np.array([5, 6, 7, 8]), 1, 2), Known(asked, np.array([1, 2]), 0, 2)]
    assert LogprobRows(ROWS).section(6, known).numbers.tolist() == [0, 0, 7, 8, 2, 0]


def test_entries_of_a_prompt_are_kept_once_and_come_with_the_first_token() -> None:
    """The prompt of 5 runs in chunks of 3 and 2, and its first chunk again, as after a preemption."""
    rows, notes, asked = LogprobRows(ROWS), dict[str, Any](), request(prompt_logprobs=0)
    for start, count in ((0, 3), (0, 3), (3, 2)):
        landed = Landed(asked, notes, _plan(start, count), 1, 1, 0)
        assert rows.applied(landed, StepResults({"logprobs": table(2)}, {"logprobs": table(2 + count)}), []) == []
    (event,) = rows.applied(landed._replace(generated=1), None, [TokenEvent("r", 9)])
    kept = event.prompt_logprobs
    assert isinstance(kept, PromptLogprobs)
    # The row's tokens come after two of another row in each step.
    assert [(one.token, one.logprob) for one in kept] == [(1, -2.0), (2, -3.0), (3, -4.0), (4, -2.0)]
    (later,) = rows.applied(landed._replace(generated=2), None, [TokenEvent("r", 9)])
    assert later.prompt_logprobs is None


def test_a_token_has_the_entry_of_its_place_and_an_error_has_none() -> None:
    rows, failed = LogprobRows(ROWS), GenerationError("no")
    landed = Landed(request(logprobs=1, prompt_logprobs=0), {}, _plan(5, 1), 1, 2, 1)
    events = [TokenEvent("r", 7), TokenEvent("r", 8), TokenEvent("r", None, "error", error=failed)]
    first, second, error = rows.applied(landed, StepResults({"logprobs": table(5)}), events)
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert [(one.token, one.logprob) for one in (first.logprobs, second.logprobs)] == [(7, -2.0), (8, -3.0)]
    assert (error.logprobs, error.prompt_logprobs) == (None, None)


def _plan(start: int, count: int) -> StepPlan:
    """A plan whose second row runs so many positions from `start` on, after a row of two tokens."""
    return make_plan([0, 1], [0, start], [2, count])


def test_devices_that_share_the_columns_agree_on_each_row_however_much_larger_another_is() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 40)) + np.array([[0.0], [2_000.0], [-2_000.0]])
    parts = jnp.asarray(np.split(logits, 4, axis=1), jnp.float32)
    found = jax.vmap(lambda part: log_softmax(part, 4), axis_name=AXIS)(parts)
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(np.concatenate(list(found), axis=1), expected, atol=1e-3)

"""Tests of sampling on Triton's kernels: the same tokens and log probabilities as on XLA.

Tests marked `triton` interpret the kernels: `make test-triton` runs them in .venv-gpu, because Triton takes 1 GB.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from jswa.exec.programs.logits_state import LogitsState, init_logits_state
from jswa.exec.programs.sampling import kernels, xla
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import NOT_FINITE, NOTHING_ALLOWED
from jswa.ribs.logprobs import traced as logprobs
from jswa.ribs.sampling_mask import traced as sampling_mask
from jswa.types import MAX_LOGPROBS
from pallas_kernels.errors import NoSamplingKernel
from pallas_kernels.sampling import api
from pallas_kernels.sampling.arguments import OPTIONS, Codes, Drawn, Logprobs, Tuning
from pallas_kernels.sampling.arguments import SamplingRows as Given
from tests.support.builders import sampling_columns
from tools.cases.kernels.small.sampling import ROWS, Row, make_logits

VOCAB = 490
LISTS = Tuning(sub=16, chunk=4, tile=8, listed=512)  # of VOCAB 31 blocks in 8 chunks, the last ones not full
AGAIN = LISTS._replace(listed=128, readers=1, drawers=1)  # lists that are often too short, one thread block a row
POSITION = 7
TABLE, DRAFTS = 3, 2


def make(
    rows: Sequence[Row], seed: int = 0, vocab: int = VOCAB, **columns: Any
) -> tuple[Float[np.ndarray, "R V"], Sampling]:
    """Return logits and parameters, with a key of its own for each row."""
    rng = np.random.default_rng(seed)
    logits = np.stack([make_logits(row.logits, vocab, rng) for row in rows])
    limits: dict[str, Any] = {
        name: [getattr(row, name) for row in rows] for name in ("temperature", "top_k", "top_p", "min_p", "top_n_sigma")
    }
    packed = sampling_columns(len(rows), key_low=np.arange(len(rows)) + 100 * seed, **limits, **columns)
    return logits, Sampling.of(jnp.asarray(packed))


def constraints(seed: int, vocab: int = VOCAB) -> LogitsState:
    """Return tables in which each row has counts, biases, masks, also behind drafts, and a banned token."""
    rng, logits_state = np.random.default_rng(seed), init_logits_state(TABLE, vocab, DRAFTS)
    words = logits_state["mask"].shape
    assert logits_state["ahead"] is not None
    bias_ids, bias = np.asarray(logits_state["bias_ids"]).copy(), np.asarray(logits_state["bias"]).copy()
    bias_ids[:2, :40] = rng.permutation(vocab)[:40]
    bias[:, :40] = rng.normal(0, 4, 40)
    bans = np.asarray(logits_state["bans"]).copy()
    bans[:, 0] = 2**30, *[-1] * (bans.shape[2] - 2), 5  # token 5, whatever stands before it
    return {
        **logits_state,
        "seen": jnp.asarray(rng.choice([0, 0, 0, 1, 3, 2**15, 2**15 + 2], (TABLE, vocab)).astype(np.uint16)),
        "bias_ids": jnp.asarray(bias_ids),
        "bias": jnp.asarray(bias),
        "mask": jnp.asarray(rng.integers(-(2**31), 2**31, words, np.int64).astype(np.int32)),
        "ahead": jnp.asarray(rng.integers(-(2**31), 2**31, logits_state["ahead"].shape, np.int64).astype(np.int32)),
        "bans": jnp.asarray(bans),
    }


def by_xla(
    logits: Float[np.ndarray, "R V"], rows: Sampling, logits_state: LogitsState, drafts: Array | None = None
) -> tuple[list[int], logprobs.LogprobRows]:
    """Return the tokens and log probabilities of the reference."""
    at = jnp.full(len(logits), POSITION, jnp.int32)
    scores = jnp.asarray(logits)
    tokens = xla.sample(scores, at, rows, logits_state, drafts=drafts)
    limits = xla.limits_of(scores, at, rows, logits_state, drafts=drafts)
    return tokens.tolist(), logprobs.drawn(scores, tokens, *limits)


def by_kernels(
    logits: Float[np.ndarray, "R V"],
    rows: Sampling,
    logits_state: LogitsState,
    drafts: Array | None = None,
    **options: Any,
) -> tuple[list[int], Logprobs | None]:
    """Return the tokens and log probabilities of the kernels."""
    at, finite = jnp.full(len(logits), POSITION, jnp.int32), jnp.ones(len(logits), bool)
    found = kernels.sample(jnp.asarray(logits), at, rows, logits_state, finite, drafts, **options)
    return found.tokens.tolist(), found.logprobs


def drawn(logits: Float[np.ndarray, "R V"], rows: Sampling, tuning: Tuning) -> Drawn:
    """Draw a token of each row without constraints."""
    count = len(logits)
    none = jnp.zeros((count, 0), jnp.int32)
    own = Given(
        **{name: getattr(rows, name) for name in OPTIONS},
        keys=rows.keys,
        positions=jnp.full(count, POSITION),
        table=-jnp.ones(count, jnp.int32),
        by_place=rows.by_place,
        finite=jnp.ones(count, bool),
        drafts=none,
        banned=none,
    )
    return api.sample(jnp.asarray(logits), own, None, Codes(NOT_FINITE, NOTHING_ALLOWED), tuning=tuning)


@pytest.fixture(params=[LISTS, AGAIN], ids=["lists", "again"])
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    """Have the kernels keep long lists, or read rows again since these are too short."""
    tuning: Tuning = request.param
    monkeypatch.setattr(api, "sample", partial(api.sample, tuning=tuning))
    return tuning


@pytest.mark.triton
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_tokens_and_log_probabilities_are_those_of_xla(interpreter: Any, tuned: Tuning, seed: int) -> None:
    """Of all cases, also of rows that are broken; by short lists those that may have more tokens within reach."""
    many = [row for row in ROWS if row.logits in ("wide", "flat", "ties", "broken") and row.temperature > 0]
    logits, rows = make(ROWS if tuned == LISTS else many, seed)
    logits_state = init_logits_state(1, VOCAB)
    tokens, found = by_kernels(logits, rows, logits_state, top=MAX_LOGPROBS)
    expected, reference = by_xla(logits, rows, logits_state)
    assert tokens == expected
    assert NOT_FINITE in tokens
    assert found is not None
    there = np.array(expected) >= 0
    assert found.rank[there].tolist() == reference.rank[there].tolist()
    # Equal log probabilities may follow from logits that differ, so the order of tokens is that of XLA but for these.
    for name in ("chosen", "values", "drawn"):
        own, wanted = (np.asarray(getattr(each, name))[there] for each in (found, reference))
        np.testing.assert_allclose(own, wanted, rtol=2e-6, atol=2e-6, err_msg=name)
    assert (found.ids == reference.ids)[there].mean() > 0.97


@pytest.mark.triton
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_constraints_are_those_of_xla(interpreter: Any, tuned: Tuning, seed: int) -> None:
    """Bias, penalties, masks of rows and of places behind drafts, bans; beside rows that have none."""
    cases = [Row(kind, temperature, top_p=share) for kind in ("wide", "ties", "broken", "forbidden")
             for temperature, share in ((0.0, 1.0), (1.0, 1.0), (0.8, 0.9))]  # fmt: skip
    count = len(cases)
    rng = np.random.default_rng(seed)
    penalties: dict[str, Any] = {
        name: rng.uniform(0.2, 1.5, count).astype(np.float32) for name in ("repetition", "presence", "frequency")
    }
    tables = np.arange(count) % (TABLE + 1)
    logits, rows = make(cases, seed, logits_state=tables, by_place=np.arange(count) // 2 % 2, **penalties)
    drafts = jnp.asarray(rng.integers(0, VOCAB, (count, DRAFTS)), jnp.int32)
    drafts = drafts.at[::2, 1].set(-3).at[::4].set(-3)
    logits_state = constraints(seed)
    tokens, found = by_kernels(logits, rows, logits_state, drafts, top=MAX_LOGPROBS)
    expected, reference = by_xla(logits, rows, logits_state, drafts)
    assert tokens == expected
    there = np.array(expected) >= 0
    assert found is not None
    assert reference.drawn is not None
    assert found.drawn is not None
    np.testing.assert_allclose(found.drawn[there], reference.drawn[there], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.chosen[there], reference.chosen[there], rtol=1e-5, atol=1e-5)
    assert by_xla(logits, rows, init_logits_state(TABLE, VOCAB, DRAFTS), drafts)[0] != expected


@pytest.mark.triton
def test_the_reach_and_the_mass_are_those_of_the_kept_tokens(interpreter: Any) -> None:
    """From lists, and from rows that are read again."""
    cases = [
        Row("wide", 0.7, 40, 0.95),
        Row("wide", top_p=0.9),
        Row("wide", 1.5, min_p=0.05),
        Row("wide"),
        Row("flat", top_p=0.5),
    ]
    logits, rows = make(cases)
    scaled = (logits - logits.max(axis=1, keepdims=True)) / np.asarray(rows.temperature)[:, None]
    kept = np.asarray(xla.within_limits(jnp.asarray(scaled), rows))
    for tuning in (LISTS, AGAIN):
        found = drawn(logits, rows, tuning)
        assert ((-scaled <= np.asarray(found.reach)[:, None]) == kept).all()
        np.testing.assert_allclose(found.mass, np.where(kept, np.exp(scaled), 0).sum(axis=1), rtol=1e-5)


@pytest.mark.triton
def test_the_tokens_that_may_be_drawn_are_listed_as_by_xla(interpreter: Any) -> None:
    """By how far the kernels say that the limits reach, beside penalties, bias and masks."""
    cases = [Row(kind, temperature, 40, 0.9) for kind in ("wide", "flat", "ties") for temperature in (0.0, 0.7, 1.5)]
    penalties: dict[str, Any] = {"repetition": np.full(len(cases), 1.2, np.float32)}
    logits, rows = make(cases, logits_state=np.arange(len(cases)) % (TABLE + 1), **penalties)
    logits_state, at = constraints(0), jnp.full(len(cases), POSITION, jnp.int32)
    drafts, finite, scores = jnp.full((len(cases), DRAFTS), -3), jnp.ones(len(cases), bool), jnp.asarray(logits)
    found = kernels.sample(scores, at, rows, logits_state, finite, drafts)
    limits = [
        xla.limits_of(scores, at, rows, logits_state, drafts=drafts, reach=reach) for reach in (found.reach, None)
    ]
    own, reference = (sampling_mask.drawn(scores, found.tokens, *one) for one in limits)
    random = np.asarray(rows.temperature) > 0
    assert (own.ids == reference.ids).all()
    assert own.size.tolist() == reference.size.tolist()
    assert own.size[~random].tolist() == [1] * (~random).sum()
    assert max(own.size.tolist()) > 1


@pytest.mark.triton
def test_the_second_reading_reads_only_blocks_with_tokens_that_can_be_drawn(interpreter: Any) -> None:
    """Of a row with one likely token one block; of a greedy row nothing."""
    drawn(*make([Row("peaked", top_p=0.9), Row("peaked", 0.0)]), LISTS)
    assert interpreter.READS["logits"] == 2 * VOCAB + LISTS.sub


@pytest.mark.triton
def test_noise_is_that_of_jax(interpreter: Any) -> None:
    """Without limits and with flat logits the token is the one with the most noise."""
    logits, rows = make([Row("flat")] * 4)
    keys = xla.row_keys(rows.keys, jnp.full(4, POSITION, jnp.int32))
    noise = [jax.random.gumbel(key, (VOCAB,)) for key in keys]
    assert drawn(logits, rows, LISTS).tokens.tolist() == [int(row.argmax()) for row in noise]


@pytest.mark.triton
def test_rows_that_are_broken_or_may_have_no_token_say_so(interpreter: Any) -> None:
    """What is not finite besides the logits comes first."""
    logits, rows = make([Row(), Row("wide", 0.0), Row(), Row(), Row()], logits_state=[9, 9, 9, 0, 0])
    at, logits_state = jnp.full(5, POSITION, jnp.int32), init_logits_state(1, VOCAB)
    logits_state = {**logits_state, "mask": jnp.zeros_like(logits_state["mask"])}
    finite = jnp.array([False, False, True, True, False])
    tokens = kernels.sample(jnp.asarray(logits), at, rows, logits_state, finite).tokens
    assert tokens.tolist() == [NOT_FINITE, NOT_FINITE, int(tokens[2]), NOTHING_ALLOWED, NOT_FINITE]
    assert tokens[2] >= 0


def test_what_the_kernels_cannot_serve_is_refused() -> None:
    """By its type and by its size."""
    rows = make([Row()])[1]
    with pytest.raises(NoSamplingKernel, match="bfloat16"):
        drawn(jnp.zeros((1, 64), jnp.bfloat16), rows, LISTS)  # type: ignore[arg-type]
    with pytest.raises(NoSamplingKernel, match="vocabulary of 600000"):
        drawn(np.zeros((1, 600_000), np.float32), rows, Tuning())

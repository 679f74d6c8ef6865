"""Tests of sampling on Triton's kernels: the same tokens as on XLA.

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

from jswa.exec.programs import sampling
from jswa.exec.programs.extras import init_extras
from jswa.exec.programs.sampling import Sampling
from jswa.plan import NOT_FINITE
from pallas_kernels.errors import NoSamplingKernel
from pallas_kernels.sampling import api
from pallas_kernels.sampling.plan import Limits, Tuning
from tests.support.builders import sampling_columns
from tools.cases.kernels.small.sampling import KINDS, ROWS, Row, make_logits

VOCAB = 490
SMALL = Tuning(sub=16, tile=8, cap=128)  # of VOCAB 31 blocks in 4 chunks, the last ones not full
POSITION = 7


def make(rows: Sequence[Row], seed: int = 0, vocab: int = VOCAB) -> tuple[Float[np.ndarray, "R V"], Sampling]:
    """Return logits and parameters, with a key of its own for each row."""
    rng = np.random.default_rng(seed)
    logits = np.stack([make_logits(row.logits, vocab, rng) for row in rows])
    limits: dict[str, Any] = {
        name: [getattr(row, name) for row in rows] for name in ("temperature", "top_k", "top_p", "min_p")
    }
    columns = sampling_columns(len(rows), key_low=np.arange(len(rows)) + 100 * seed, **limits)
    return logits, Sampling.of(jnp.asarray(columns))


def limits_of(rows: Sampling) -> Limits:
    """The limits among the parameters."""
    return Limits(rows.temperature, rows.top_k, rows.top_p, rows.min_p)


def keys_of(rows: Sampling) -> Array:
    """The keys of the draws."""
    folded = jax.vmap(lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), POSITION))(rows.keys)
    return jax.random.key_data(folded)


def sampled(logits: Float[np.ndarray, "R V"], rows: Sampling, **options: Any) -> list[int]:
    """Sample a token of each row. Rows with extras may have the tokens of half of the vocabulary."""
    at, extras = jnp.full(len(logits), POSITION, jnp.int32), init_extras(1, logits.shape[1])
    extras = {**extras, "mask": jnp.full_like(extras["mask"], 0x0F0F0F0F)}
    out: list[int] = sampling.sample(jnp.asarray(logits), at, rows, extras, **options).tolist()
    return out


def drawn(logits: Float[np.ndarray, "R V"], rows: Sampling, tuning: Tuning) -> tuple[list[int], list[bool]]:
    """Draw a token of each row by the kernels alone; return also which rows are undecided."""
    limits = limits_of(rows)
    summary = api.summarize(jnp.asarray(logits), limits, tuning=tuning)
    tokens, undecided = api.draw(jnp.asarray(logits), keys_of(rows), limits, summary, tuning=tuning)
    return tokens.tolist(), undecided.tolist()


@pytest.mark.triton
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_tokens_are_those_of_xla(interpreter: Any, seed: int) -> None:
    """Of all cases; alone a nucleus that float32 cannot tell from everything is left undecided."""
    logits, rows = make(ROWS, seed)
    tokens, undecided = drawn(logits, rows, SMALL)
    for row, token, found, expected in zip(ROWS, tokens, undecided, sampled(logits, rows), strict=True):
        if expected >= 0:  # the kernels say nothing of rows that are impossible or broken
            assert token == expected or found, row
            assert not found or row.top_p == 1 - 2**-24, row


@pytest.mark.triton
def test_rows_that_the_kernels_leave_undecided_are_drawn_on_xla(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here since more tokens can be drawn than a chunk holds. Impossible and broken rows say so."""
    few = SMALL._replace(cap=8)
    for name in ("summarize", "draw"):
        monkeypatch.setattr(api, name, partial(getattr(api, name), tuning=few))
    cases = [
        Row("flat", top_p=0.9),
        Row("wide", top_k=100),
        Row("wide", top_k=2),
        *map(Row, KINDS[-2:]),
        Row(),
        Row("wide", 0.0),
    ]
    logits, rows = make(cases)
    assert drawn(logits, rows, few)[1][:3] == [True, True, False]
    rows = rows._replace(extras=rows.extras.at[jnp.array([1, 4, 5])].set(0))  # the broken row too: it still is
    tokens = sampled(logits, rows, sampler="triton")
    assert tokens == sampled(logits, rows)
    assert tokens[4] == NOT_FINITE
    assert tokens[5] % 8 < 4


@pytest.mark.triton
def test_the_second_reading_reads_only_blocks_with_tokens_that_can_be_drawn(interpreter: Any) -> None:
    """Of a row with one likely token one block; of a greedy row nothing."""
    logits, rows = make([Row("peaked", top_p=0.9), Row("peaked", 0.0)])
    limits = limits_of(rows)
    summary = api.summarize(jnp.asarray(logits), limits, SMALL)
    assert interpreter.READS["logits"] == 2 * VOCAB + 2 * SMALL.sub
    interpreter.READS.clear()
    api.draw(jnp.asarray(logits), keys_of(rows), limits, summary, SMALL)
    assert interpreter.READS["logits"] == SMALL.sub


@pytest.mark.triton
def test_noise_is_that_of_jax(interpreter: Any) -> None:
    """Without limits and with flat logits the token is the one with the most noise."""
    logits, rows = make([Row("flat")] * 4)
    noise = [jax.random.gumbel(jax.random.wrap_key_data(key), (VOCAB,)) for key in keys_of(rows)]
    assert drawn(logits, rows, SMALL)[0] == [int(row.argmax()) for row in noise]


def test_what_the_kernels_cannot_serve_is_refused() -> None:
    """By its type and by its size."""
    limits = limits_of(make([Row()])[1])
    with pytest.raises(NoSamplingKernel, match="bfloat16"):
        api.summarize(jnp.zeros((1, 64), jnp.bfloat16), limits)
    with pytest.raises(NoSamplingKernel, match="vocabulary of 600000"):
        api.summarize(jnp.zeros((1, 600_000)), limits)

"""Sampling from vocabularies of real size: sums over 262,144 probabilities, edges of the limits, draws everywhere."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.sampling import xla as sampling
from jswa.exec.programs.sampling.rows import Sampling
from jswa.ribs.logprobs.traced import logprob_rows
from tests.support import oracles
from tests.support.builders import sampling_columns

VOCAB = 262_144
# Of the mass that float32 finds in a set of tokens: sums in two levels of 512 have at most 1,022 roundings in a row,
# and each probability has three. A sum one after the other may have 262,144, and loses a sixty-fourth.
SLACK = 1_025 * 2.0**-24
_keep = jax.jit(lambda scaled, columns: sampling.within_limits(scaled, Sampling.of(columns)))


def rows_of_logits() -> Float[np.ndarray, "R V"]:
    """Return logits whose largest is 0: nearly flat, of a usual width, by Zipf's law, and with ties of 4,096 tokens."""
    rng = np.random.default_rng(3)
    zipf = -1.1 * np.log1p(rng.permutation(VOCAB))
    logits = (0.01 * rng.standard_normal(VOCAB), 3 * rng.standard_normal(VOCAB), zipf, rng.integers(0, 64, VOCAB) / 4)
    return np.stack([row - row.max() for row in logits]).astype(np.float32)


def kept(scaled: Float[np.ndarray, " V"], top_k: int, top_p: float, min_p: float) -> Bool[np.ndarray, " V"]:
    """Return what min-p, then top-k, then top-p leave, in float64."""
    within = scaled >= np.log(np.float32(min_p)) if min_p else np.ones(VOCAB, bool)
    limited: Bool[np.ndarray, " V"] = oracles.kept_tokens(np.where(within, scaled, -np.inf), top_k, top_p) & within
    return limited


LIMITS = [  # row of logits, top_k, top_p, min_p
    (0, 0, 0.9, 0.0),
    (1, 0, 0.999, 0.0),
    (2, 0, 1 - 2.0**-24, 0.0),
    (0, 1, 1.0, 0.0),
    (1, VOCAB - 1, 1.0, 0.0),
    (3, 65_537, 0.5, 0.0),
    (1, 0, 1.0, 0.05),
    (0, 40_000, 0.95, 1e-4),
]


def test_limits_leave_the_nucleus_of_a_large_vocabulary() -> None:
    """Only tokens at the edge of top-p, within the error of float32's sum, may be kept or lost."""
    which, top_k, top_p, min_p = zip(*LIMITS, strict=True)
    scaled = rows_of_logits()[list(which)]
    found = np.asarray(_keep(scaled, sampling_columns(len(LIMITS), top_k=top_k, top_p=top_p, min_p=min_p)))
    for row, (_, k, p, least) in enumerate(LIMITS):
        low, high = (p - SLACK, min(p + SLACK, 1.0)) if p < 1 else (1.0, 1.0)
        assert (found[row] >= kept(scaled[row], k, low, least)).all(), f"row {row} lacks a token"
        assert (found[row] <= kept(scaled[row], k, high, least)).all(), f"row {row} keeps a token too many"


def test_log_probabilities_of_a_large_vocabulary_are_exact_to_float32() -> None:
    """The sum's error, and that of the subtraction: half a unit of a log probability below 32."""
    logits = rows_of_logits()
    chosen = logits.argmin(axis=-1).astype(np.int32)
    found = jax.jit(logprob_rows)(logits, chosen)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    rows, within = np.arange(len(logits)), SLACK + 32 * 2.0**-24
    np.testing.assert_allclose(found.chosen, expected[rows, chosen], rtol=0, atol=within)
    np.testing.assert_allclose(
        found.values, np.sort(expected)[:, : -found.values.shape[1] - 1 : -1], rtol=0, atol=within
    )
    assert (np.asarray(found.rank) == (wide > wide[rows, chosen][:, None]).sum(axis=-1) + 1).all()


@partial(jax.jit, static_argnames="count")
def draw(logits: Float[Array, " V"], columns: Int[Array, "1 C"], first: Int[Array, ""], *, count: int) -> Array:
    """Return draws for `count` positions, one after the other: the noise of all would be gigabytes."""
    logits_state = init_logits_state(1, VOCAB)
    one = partial(sampling.sample, logits[None], rows=Sampling.of(columns), state=logits_state)
    positions = first + jnp.arange(count, dtype=jnp.int32)
    tokens: Array = jax.lax.map(lambda position: one(position[None])[0], positions)
    return tokens


def most(freedom: int) -> float:
    """Return what chi-square exceeds with probability 10^-9 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 6 * spread**0.5) ** 3)


@pytest.mark.nightly
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("draws", "top_p"),
    [
        (64, 1.0),
        (16, 0.9),
        pytest.param(2_000, 1.0, marks=pytest.mark.nightly),
        pytest.param(400, 0.9, marks=pytest.mark.nightly),
    ],
)
def test_draws_from_a_large_vocabulary_are_as_frequent_as_their_probability(draws: int, top_p: float) -> None:
    """Chi-square of buckets of equal mass, eight draws each or more, by token id and by rank."""
    logits, buckets = rows_of_logits()[1] * np.float32(0.5), min(64, draws // 8)
    columns = sampling_columns(1, temperature=1.0, top_p=top_p, key_low=7)
    tokens = np.asarray(draw(jnp.asarray(logits), jnp.asarray(columns), jnp.int32(1_000_000), count=draws))
    left = oracles.kept_tokens(logits, 0, min(1.0, top_p + SLACK))
    assert left[tokens].all()
    weight = np.where(left, np.exp(logits.astype(np.float64)), 0.0)
    weight /= weight.sum()
    for order in (np.arange(VOCAB), np.argsort(-logits)):
        place = np.empty(VOCAB, np.int64)
        place[order] = np.minimum(np.cumsum(weight[order]) * buckets, buckets - 1).astype(np.int64)
        found, mass = np.bincount(place[tokens], minlength=buckets), np.bincount(place, weight)
        chi_square = float(((found - draws * mass) ** 2 / (draws * mass)).sum())
        assert chi_square < most(buckets - 1), f"{found} of {draws} draws in each bucket"


@pytest.mark.nightly
def test_shares_of_a_vocabulary_that_are_no_powers_of_two_give_the_draws_of_the_whole() -> None:
    """Gemma 3's 262,208 tokens on 1, 2 and 8 devices: 32,776 each. Sizes that do not divide are refused elsewhere."""
    command = [sys.executable, "-m", "tests.support.shared_vocab", "262208", "1", "2", "8"]
    environ = {**os.environ, "PJRT_NPROC": "16"}  # each device that waits for others blocks a thread
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    one, *shared = json.loads(done.stdout.splitlines()[-1])
    assert len(set(one["tokens"])) > 4
    for other in shared:
        assert other["tokens"] == one["tokens"]
        assert other["ids"] == one["ids"]
        assert other["rank"] == one["rank"]
        np.testing.assert_allclose(other["logprobs"], one["logprobs"], rtol=0, atol=SLACK)

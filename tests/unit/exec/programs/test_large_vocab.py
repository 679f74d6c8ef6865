"""Sampling from vocabularies of real size: sums over 262,144 probabilities, edges of the limits, draws everywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

from jswa.exec.programs import sampling
from jswa.exec.programs.extras import init_extras
from jswa.exec.programs.sampling import Sampling
from tests.support import oracles
from tests.support.builders import sampling_columns

VOCAB, ROWS = 262_144, 4
BUCKETS = 64
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


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1 - 2.0**-24, 0.0),
        (1, 1.0, 0.0),
        (VOCAB - 1, 1.0, 0.0),
        (65_537, 0.5, 0.0),
        (0, 1.0, 0.05),
        (40_000, 0.95, 1e-4),
    ],
)
def test_limits_leave_the_nucleus_of_a_large_vocabulary(top_k: int, top_p: float, min_p: float) -> None:
    """Only tokens at the edge of top-p, within the error of float32's sum, may be kept or lost."""
    scaled = rows_of_logits()
    columns = sampling_columns(ROWS, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.asarray(_keep(scaled, columns))
    for row in range(ROWS):
        low, high = (top_p - SLACK, min(top_p + SLACK, 1.0)) if top_p < 1 else (1.0, 1.0)
        assert (found[row] >= kept(scaled[row], top_k, low, min_p)).all(), f"row {row} lacks a token"
        assert (found[row] <= kept(scaled[row], top_k, high, min_p)).all(), f"row {row} keeps a token too many"


def test_log_probabilities_of_a_large_vocabulary_are_exact_to_float32() -> None:
    """The sum's error, and that of the subtraction: half a unit of a log probability below 32."""
    logits = rows_of_logits()
    chosen = logits.argmin(axis=-1).astype(np.int32)
    found = jax.jit(sampling.logprob_rows)(logits, chosen)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    rows, within = np.arange(ROWS), SLACK + 32 * 2.0**-24
    np.testing.assert_allclose(found.chosen, expected[rows, chosen], rtol=0, atol=within)
    np.testing.assert_allclose(
        found.values, np.sort(expected)[:, : -found.values.shape[1] - 1 : -1], rtol=0, atol=within
    )
    assert (np.asarray(found.rank) == (wide > wide[rows, chosen][:, None]).sum(axis=-1) + 1).all()


@partial(jax.jit, static_argnames="count")
def draw(logits: Float[Array, " V"], columns: Int[Array, "1 C"], first: Int[Array, ""], *, count: int) -> Array:
    """Return draws for `count` positions, one after the other: their noise at once would be gigabytes."""
    extras = init_extras(1, 32)  # no row has any
    one = partial(sampling.sample, logits[None], rows=Sampling.of(columns), extras=extras)
    return jax.lax.map(lambda position: one(position[None])[0], first + jnp.arange(count, dtype=jnp.int32))


@pytest.mark.parametrize("draws", [256, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_draws_from_a_large_vocabulary_are_as_frequent_as_their_probability(draws: int) -> None:
    """Chi-square of buckets of equal mass, by token id and by rank, also with top-p; bound: probability 10^-9."""
    logits = rows_of_logits()[1] * np.float32(0.5)
    for top_p in (1.0, 0.9):
        columns = sampling_columns(1, temperature=1.0, top_p=top_p, key_low=7)
        tokens = np.asarray(draw(jnp.asarray(logits), jnp.asarray(columns), jnp.int32(1_000_000), count=draws))
        left = oracles.kept_tokens(logits, 0, top_p)
        weight = np.where(left, np.exp(logits.astype(np.float64)), 0.0)
        assert left[tokens].mean() > 0.999  # but for a token at the edge
        for order in (np.arange(VOCAB), np.argsort(-logits)):
            place = np.empty(VOCAB, np.int64)
            place[order] = np.minimum(np.cumsum(weight[order]) / weight.sum() * BUCKETS, BUCKETS - 1).astype(np.int64)
            found = np.bincount(place[tokens], minlength=BUCKETS)
            mass = np.bincount(place, weight / weight.sum(), minlength=BUCKETS)
            chi_square = float(((found - draws * mass) ** 2 / (draws * mass)).sum())
            assert chi_square < 160, f"{found} of {draws} draws in each bucket"

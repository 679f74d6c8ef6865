"""Draws of random rows beside float64 (benchmarks/gpu/kernels/draws.py)."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.kernels import draws
from jswa.exec.programs.sampling import xla
from jswa.exec.programs.sampling.rows import Sampling


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_xla_draws_as_float64_does(count: int) -> None:
    """All kinds of rows, a vocabulary of 1,000."""
    rng = np.random.default_rng(count)
    tally: dict[str, Any] = {"equal": 0, "close": 0, "wrong": 0, "examples": []}
    for _ in range(count // 500):
        draws.compare(1_000, 500, "xla", rng, tally)
    assert not tally["wrong"], json.dumps(tally)
    assert tally["equal"] > 0.99 * count


def test_tokens_that_the_limits_forbid_are_wrong() -> None:
    """So is any other token than the greedy one; the check can fail."""
    rng = np.random.default_rng(0)
    logits, columns = draws.random_rows(1_000, 500, rng)
    rows, at = Sampling.of(jnp.asarray(columns)), jnp.arange(500, dtype=jnp.int32)
    own = Sampling(*(np.asarray(values) for values in rows))  # type: ignore[arg-type]
    uniform = np.asarray(draws.uniform_of(xla.row_keys(rows.keys, at), 1_000), np.float64)
    least = logits.argmin(axis=1)
    equal, close = draws.judged(logits.astype(np.float64), own, uniform, least)
    several = logits.max(axis=1) > logits.min(axis=1)
    limited = (own.top_k == 1) | (own.temperature == 0) | (own.top_p < 0.5) | (own.min_p > 0.5)
    assert (~equal & ~close)[several & limited & (np.ptp(logits, axis=1) > 3)].mean() > 0.95

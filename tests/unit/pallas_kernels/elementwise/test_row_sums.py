"""Sums along rows on Triton, interpreted: right, and the same bits whatever else is computed."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.elementwise import sums

pytestmark = pytest.mark.triton
WIDTHS = (1, 7, 100, 2_048, 5_000)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_those_of_float64(width: int, interpreter: Any) -> None:
    """Of all numbers of a row, and of those with large keys."""
    rng = np.random.default_rng(width)
    values, keys = rng.random((5, width), np.float32), rng.integers(0, 2**32, (5, width), np.uint32)
    thresholds = rng.integers(0, 2**32, (5, 3), np.uint32)
    thresholds[0] = 0, 1 << 31, 2**32 - 1
    wide, own = values.astype(np.float64), keys[:, None] >= thresholds[..., None]
    expected: list[np.ndarray] = [wide.sum(axis=1), wide.mean(axis=1), np.where(own, wide[:, None], 0).sum(axis=-1)]
    x, given = jnp.asarray(values), (jnp.asarray(values), jnp.asarray(keys), jnp.asarray(thresholds))
    by: sums.Implementation = "triton"
    found = sums.row_sums(x, by)[:, 0], sums.row_means(x, by)[:, 0], sums.sums_from(*given, by)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("function", [sums.softmax, sums.log_softmax])
def test_a_row_has_the_same_bits_alone(width: int, function: Any, interpreter: Any) -> None:
    """In batches of any size; numbers of -inf have no share."""
    logits = np.random.default_rng(width).standard_normal((6, width)).astype(np.float32) * 3
    logits[3, : width // 2] = -np.inf
    whole = np.asarray(function(jnp.asarray(logits), "triton"))
    np.testing.assert_allclose(whole, np.asarray(function(jnp.asarray(logits))), rtol=1e-5, atol=1e-6)
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(np.asarray(function(jnp.asarray(logits[:rows]), "triton")), whole[:rows])


def test_axes_in_front_are_kept(interpreter: Any) -> None:
    """A row is what lies along the last axis; 16 bits are added in float32."""
    values = jnp.asarray(np.random.default_rng(0).random((2, 3, 40), np.float32), jnp.bfloat16)
    found = sums.row_sums(values, "triton")
    assert (found.shape, found.dtype) == ((2, 3, 1), jnp.float32)
    np.testing.assert_allclose(
        np.asarray(found[..., 0]), np.asarray(values.astype(jnp.float32).sum(axis=-1)), rtol=1e-6
    )

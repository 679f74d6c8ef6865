"""Sums along rows in the library of CPU kernels: right, and the same bits whatever else is computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import library
from pallas_kernels.elementwise import sums

pytestmark = pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not built")

WIDTHS = (1, 7, 16, 100, 1_024, 33_000)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_those_of_float64(width: int) -> None:
    """Of all numbers of a row, and of those with large keys."""
    rng = np.random.default_rng(width)
    values, keys = rng.random((5, width), np.float32), rng.integers(0, 2**32, (5, width), np.uint32)
    thresholds = rng.integers(0, 2**32, (5, 3), np.uint32)
    thresholds[0] = 0, 1 << 31, 2**32 - 1
    wide, own = values.astype(np.float64), keys[:, None] >= thresholds[..., None]
    expected: list[np.ndarray] = [wide.sum(axis=1), wide.mean(axis=1), np.where(own, wide[:, None], 0).sum(axis=-1)]
    x, given = jnp.asarray(values), (jnp.asarray(values), jnp.asarray(keys), jnp.asarray(thresholds))
    tolerances: dict[sums.Implementation, float] = {"cpu": 2e-6, "xla": 2e-5}
    for by, tolerance in tolerances.items():
        found = sums.row_sums(x, by)[:, 0], sums.row_means(x, by)[:, 0], sums.sums_from(*given, by)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=tolerance, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("function", [sums.softmax, sums.log_softmax])
def test_a_row_has_the_same_bits_alone(width: int, function: object) -> None:
    """In batches of any size; XLA's own sums of 1,024 numbers have others, for one."""
    assert callable(function)
    run = jax.jit(partial(function, by="cpu"))
    logits = np.random.default_rng(width).standard_normal((16, width)).astype(np.float32) * 3
    logits[3, : width // 2] = -np.inf
    whole = np.asarray(run(logits))
    np.testing.assert_allclose(whole, np.asarray(function(jnp.asarray(logits))), rtol=1e-5, atol=1e-6)
    for rows in (1, 2, 3, 5, 8):
        parts = [np.asarray(run(logits[first : first + rows])) for first in range(0, 16 - rows + 1, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole[: len(parts) * rows])


def test_axes_in_front_are_kept() -> None:
    """A row is what lies along the last axis."""
    values = jnp.asarray(np.random.default_rng(0).random((2, 3, 40), np.float32))
    found = sums.row_sums(values, "cpu")
    assert found.shape == (2, 3, 1)
    np.testing.assert_allclose(np.asarray(found[..., 0]), np.asarray(values.sum(axis=-1)), rtol=1e-6)

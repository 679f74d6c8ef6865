"""Norms in 16 bits: float32 inside, so that a residual stream of real size neither overflows nor loses digits."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from jswa.architecture import Norm
from jswa.model.layers import Normalize

WIDTH = 64
# As llama, gemma, a norm of values and a LayerNorm have them.
NORMS = {
    "cast first": Norm(1e-6),
    "cast last": Norm(1e-6, offset=1.0, cast_first=False),
    "without a weight": Norm(1e-6, weighted=False),
    "centered": Norm(1e-5, centered=True, cast_first=False),
}


def expect(norm: Norm, x: Float[np.ndarray, "T M"], weight: Float[np.ndarray, " M"]) -> Float[np.ndarray, "T M"]:
    """Return the norm in float64."""
    wide = x - x.mean(axis=-1, keepdims=True) if norm.centered else x
    out = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + norm.eps)
    return out * (norm.offset + weight) if norm.weighted else out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_16_bits_rounds_its_result_alone(name: str, dtype: str) -> None:
    """Also of numbers whose squares float16 cannot hold: real models have residuals of several thousands.

    A weight that is applied to the rounded x rounds twice more: itself with its offset, and the product.
    """
    norm, rng = NORMS[name], np.random.default_rng(0)
    layer, kind = Normalize(norm, WIDTH, jnp.dtype(dtype)), jnp.dtype(dtype)
    weight = jnp.asarray(rng.uniform(0.5, 2, WIDTH), kind)
    if layer.weight is not None:
        layer.weight[...] = weight
    x = jnp.asarray(rng.standard_normal((4, WIDTH)) * np.array([[0.01], [1.0], [300.0], [8_000.0]]), kind)
    found = np.asarray(layer(x), np.float64)
    expected = expect(norm, np.asarray(x, np.float64), np.asarray(weight, np.float64))
    roundings = 3 if norm.weighted and norm.cast_first else 1
    unit = float(jnp.finfo(kind).eps) / 2  # type: ignore[no-untyped-call]
    smallest = float(jnp.finfo(kind).smallest_subnormal)  # type: ignore[no-untyped-call]
    assert (np.abs(found - expected) <= 1.01 * roundings * unit * np.abs(expected) + 3 * smallest + 1e-6).all()

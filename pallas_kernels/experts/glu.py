"""Activation functions between the two matrices of a feed-forward layer, gated or not."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Glu:
    """A gated linear unit: act(gate) · up (Shazeer 2020, arXiv 2002.05202).

    Attributes:
        clamp: act(gate) is cut to at most `clamp`, up to ±clamp; with `alpha`, gate instead of act(gate).
        alpha: the result is (up + 1) · gate · σ(alpha · gate), and `activation` is not used (gpt-oss).
    """

    activation: Activation
    clamp: float | None = None
    alpha: float | None = None


def activate(name: Activation, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the activation function of that name at x."""
    functions = {
        "silu": jax.nn.silu,
        "gelu": _gelu,
        "gelu_tanh": lambda y: jax.nn.gelu(y, approximate=True),
        "relu": lambda y: jnp.maximum(y, 0),
    }
    return functions[name](x)


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Φ(x), computed in float32. `jax.nn.gelu` and `jax.nn.relu` need what Mosaic does not lower."""
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + lax.erf(wide * 0.5**0.5))).astype(x.dtype)


def glu(config: Glu, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the unit's output for each gate and up, in their type."""
    if config.alpha is not None:
        gate, up = _clamped(config, gate, up)
        return (up + 1) * gate * jax.nn.sigmoid(gate * config.alpha)
    gate, up = _clamped(config, activate(config.activation, gate), up)
    return gate * up


def _clamped(
    config: Glu, gate: Float[Array, "..."], up: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    if config.clamp is None:
        return gate, up
    return jnp.minimum(gate, config.clamp), jnp.clip(up, -config.clamp, config.clamp)

"""Activation functions between the two matrices of a feed-forward layer, gated or not."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
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


def activate(name: Activation, x: Float[Array, "..."], *, in_kernel: bool = False) -> Float[Array, "..."]:
    """Return the activation function of that name at x.

    Args:
        in_kernel: use only what Mosaic lowers for Hopper, which has no rule for erf and erfc.
    """
    functions = {
        "silu": jax.nn.silu,
        "gelu": _gelu if in_kernel else partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": lambda y: jnp.maximum(y, 0),  # `jax.nn.relu` has a derivative of its own, which no kernel can have
    }
    return functions[name](x)


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Φ(x), where Φ differs by less than 1e-7 (Abramowitz and Stegun, 7.1.26)."""
    t = 1 / (1 + 0.3275911 * jnp.abs(x) * 0.5**0.5)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * series * jnp.exp(-0.5 * x * x)  # of the standard normal distribution, beyond |x|
    return x * jnp.where(x < 0, tail, 1 - tail)


def glu(
    config: Glu, gate: Float[Array, "..."], up: Float[Array, "..."], *, in_kernel: bool = False
) -> Float[Array, "..."]:
    """Return the unit's output for each gate and up, in their type. `in_kernel`: see `activate`."""
    if config.alpha is not None:
        gate, up = _clamped(config, gate, up)
        return (up + 1) * gate * jax.nn.sigmoid(gate * config.alpha)
    gate, up = _clamped(config, activate(config.activation, gate, in_kernel=in_kernel), up)
    return gate * up


def _clamped(
    config: Glu, gate: Float[Array, "..."], up: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    if config.clamp is None:
        return gate, up
    return jnp.minimum(gate, config.clamp), jnp.clip(up, -config.clamp, config.clamp)

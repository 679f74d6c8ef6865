"""Norms, rotary embedding and feed-forward. Linear weights are [in, out]."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import MlpConfig, Norm, Rope
from jswa.forms.matrix import Matrix, matrix_of
from jswa.model.lora import Adapted, AdapterIds, lora_product
from pallas_kernels.cpu.experts import gated
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.elementwise.sums import apart, row_means
from pallas_kernels.experts.glu import Glu, activate, glu

RopeTables = dict[Rope, tuple[Float[Array, "T n"], Float[Array, "T n"]]]


def zeros(*shape: int, dtype: jnp.dtype) -> nnx.Param[Array]:
    """Return a parameter that will be loaded.

    Models are built under `nnx.eval_shape` only, so nothing is allocated.
    """
    return nnx.Param(jnp.zeros(shape, dtype))


class Normalize(nnx.Module):
    """RMS norm (Zhang and Sennrich 2019) or LayerNorm over the last axis, in float32; see `Norm`.

    Attributes:
        sums: the implementation of sums along the axis.
    """

    sums: Sums = "xla"

    def __init__(self, config: Norm, size: int, dtype: jnp.dtype) -> None:
        self.config = config
        self.weight = zeros(size, dtype=dtype) if config.weighted else None
        self.bias = zeros(size, dtype=dtype) if config.bias else None
        rank = config.gate_rank
        self.low = zeros(size, rank, dtype=dtype) if rank else None
        self.high = zeros(rank, size, dtype=dtype) if rank else None

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        """Return the normed x, of the same shape and dtype."""
        wide, sums = x.astype(jnp.float32), self.sums
        if self.config.centered:
            wide = wide - row_means(wide, sums)
        squares = row_means(jnp.square(wide), sums) + self.config.eps
        # XLA rounds reciprocal roots otherwise for one row.
        wide = wide * jax.lax.rsqrt(squares) if sums == "xla" else wide / apart(jnp.sqrt(squares), sums)
        if self.weight is None:
            return wide.astype(x.dtype)
        ones = [1] * (x.ndim - 1)
        weight = self.weight[...].reshape(*ones, -1)
        if self.config.cast_first:
            out = wide.astype(x.dtype) * (self.config.offset + weight).astype(x.dtype)
        else:
            out = (wide * (self.config.offset + weight.astype(jnp.float32))).astype(x.dtype)
        if self.bias is not None:
            out = out + self.bias[...].reshape(*ones, -1)
        return out if self.low is None or self.high is None else out * _opening(out, self.low, self.high)


def _opening(x: Float[Array, "T n"], low: nnx.Param[Array], high: nnx.Param[Array]) -> Float[Array, "T n"]:
    """Return the gate of a norm's result; see `Norm.gate_rank`."""
    gate = linear(jax.nn.silu(linear(x, low, None)), high, None)
    return jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)


def normed(norm: Normalize | None, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
    """Return norm(x), or x if there is no norm."""
    return x if norm is None else norm(x)


def rope_tables(ropes: set[Rope], positions: Int[Array, " T"]) -> RopeTables:
    """Return cos and sin of every rotary embedding of a model, computed once per step."""
    tables: RopeTables = {}
    for rope in ropes:
        angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq, jnp.float32)[None]
        tables[rope] = jnp.cos(angle) * rope.scale, jnp.sin(angle) * rope.scale
    return tables


def rotate(x: Float[Array, "T N D"], rope: Rope, tables: RopeTables) -> Float[Array, "T N D"]:
    """Rotate pairs of the first 2n dimensions in float32; the others are unchanged (Su et al. 2021)."""
    cos, sin = (table[:, None] for table in tables[rope])
    size = 2 * cos.shape[-1]
    wide = x[..., :size].astype(jnp.float32)
    if rope.interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(wide.shape)
    else:
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def feed(
    config: MlpConfig, gate_up: Float[Array, "T n"], *, native: bool = False, sums: Sums = "xla"
) -> Float[Array, "T m"]:
    """Return the input of the down projection: act(gate) · up of the two halves; act(up) or its square without a gate.

    Args:
        native: by the CPU's library, if it has the unit.
        sums: the implementation of sums along rows, of which a sparse activation is made.
    """
    if not config.gated:
        hidden = activate(config.activation, gate_up)
        return hidden * hidden if config.squared else hidden
    unit = Glu(config.activation, config.clamp)
    if native and config.sparsity is None:
        return gated(unit, gate_up)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if config.sparsity is not None:
        wide = gate.astype(jnp.float32)
        mean = row_means(wide, sums)
        deviation = apart(jnp.sqrt(row_means(jnp.square(wide - mean), sums)), sums)
        cut = apart(mean + config.sparsity * deviation, sums)
        gate = jax.nn.relu(gate - cut.astype(gate.dtype))
    return glu(unit, gate, up)


def xielu(x: Float[Array, "T m"], learned: Float[Array, "4"], sums: Sums = "xla") -> Float[Array, "T m"]:
    """Return xIELU (Huang and Schlag 2024, arXiv 2411.13010), computed in float32.

    For x > 0 it is softplus(p) · x² + βx, else (β + softplus(n)) · (exp(min(x, ε)) - 1 - x) + βx.

    Args:
        learned: p, n, β and ε, as checkpoints have them.
        sums: the implementation of sums along rows; with all but "xla" a row depends on no other row.
    """
    wide, numbers = x.astype(jnp.float32), learned.astype(jnp.float32)
    beta, eps = numbers[2], numbers[3]
    factors = apart(jax.nn.softplus(numbers[:2]), sums)
    bent = apart(jnp.expm1(jnp.minimum(wide, eps)), sums) - wide
    out: Float[Array, "T m"] = jnp.where(wide > 0, factors[0] * wide * wide, (beta + factors[1]) * bent) + beta * wide
    return out.astype(x.dtype)


def unit_of(config: MlpConfig, *, bias: bool) -> Glu | None:
    """Return the activation of gates and ups that a kernel may apply to their product; None if it may apply none."""
    fits = config.gated and config.sparsity is None and not bias
    return Glu(config.activation, config.clamp) if fits else None


class Mlp(nnx.Module):
    """Feed-forward; gate and up are one matrix [M, 2F], or up alone [M, F] if the MLP is not gated.

    Attributes:
        sums: the implementation of sums along rows.
    """

    sums: Sums = "xla"

    def __init__(self, config: MlpConfig, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        width = config.hidden * (2 if config.gated else 1)
        self.gate_up = zeros(d_model, width, dtype=dtype)
        self.down = zeros(config.hidden, d_model, dtype=dtype)
        self.gate_up_bias = zeros(width, dtype=dtype) if config.bias else None
        self.down_bias = zeros(d_model, dtype=dtype) if config.bias else None
        self.xielu = zeros(4, dtype=dtype) if config.xielu else None

    def __call__(self, x: Float[Array, "T M"], adapters: AdapterIds | None = None) -> Float[Array, "T M"]:
        """Return the feed-forward output of each token."""
        return linear(self.hidden(x, adapters), self.down, self.down_bias, adapters)

    def hidden(self, x: Float[Array, "T M"], adapters: AdapterIds | None = None) -> Float[Array, "T F"]:
        """Return the input of the down projection. On Hopper's kernel it is one product, but with adapters."""
        held, unit = self.gate_up.get_value(), unit_of(self.config, bias=self.gate_up_bias is not None)
        matrix = base_of(held)
        if unit is not None and not isinstance(held, Adapted):
            hidden = matrix.gated(x, unit)
            if hidden is not None:
                return hidden
        gate_up = linear(x, self.gate_up, self.gate_up_bias, adapters)
        if self.xielu is not None:
            return xielu(gate_up, self.xielu[...], self.sums)
        return feed(self.config, gate_up, native=matrix.native, sums=self.sums)


def linear(
    x: Float[Array, "T n"], weight: nnx.Param[Array], bias: nnx.Param[Array] | None, adapters: AdapterIds | None = None
) -> Float[Array, "T m"]:
    """Return x · weight + bias.

    The weight may have 8 or 4 bits, lie in panels or be for Hopper's kernel, and have LoRA adapters; `adapters` is the
    adapter of each token. x is rounded to 8 bits for a weight in `Fp8Rows`, and not for its adapters.
    """
    held = weight.get_value()
    out = base_of(held).times(x)
    if isinstance(held, Adapted):
        assert adapters is not None, "a model with LoRA adapters needs the adapter of each token"
        out = out + lora_product(x, held, adapters)
    return out if bias is None else out + bias[...][None]


def base_of(held: Any) -> Matrix:
    """Return the matrix of a parameter without its LoRA adapters."""
    return matrix_of(held.base if isinstance(held, Adapted) else held)

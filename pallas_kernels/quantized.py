"""Weights of 8 bits with scales: int8, or float8 e4m3 as its bits. Activations are not quantized.

There is one scale per output, or one per block of inputs and outputs.

Embeddings [V, K] have a scale per row: a row is looked up, and is an output if the matrix is the head.

`cut` is for KV pages of 8 bits, and for what is computed with them.

Shape letters: T rows, K inputs, C outputs; E leading axes, such as experts.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int8, UInt8

from pallas_kernels.experts.glu import Glu

Kind = Literal["int8", "fp8"]
_BLOCK = 512


def cut(wide: Float32[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return numbers in a type of few bits, cut to its range: beyond it none becomes infinite, or NaN in e4m3."""
    most = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(wide, -most, most).astype(dtype)


class Quantized(NamedTuple):
    """Weights: values · scales.

    Attributes:
        values: int8; or uint8, the bits of float8 e4m3. (Before it loops over parts of an array, XLA on CPU copies a
            float8 array of any size, but not an array of bytes.)
        scales: one per output.
    """

    values: Int8[Array, "*E K C"] | UInt8[Array, "*E K C"]
    scales: Float32[Array, "*E C"]

    @property
    def native(self) -> bool:
        """XLA multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weights in x's type."""
        return matmul(x, self)

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """No kernel computes gates, ups and their unit."""

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · weights in float32."""
        return product(x, self)

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrix, and its arrays."""
        return "scaled", [self.values, self.scales]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "of 8 bits"

    @property
    def readers(self) -> tuple[str, ...]:
        """XLA; a CPU has it in panels, Hopper's kernels have it in tiles."""
        return ("xla",)

    @property
    def columns(self) -> int:
        """C."""
        return int(self.values.shape[-1])

    def product(
        self, x: Float[Array, "R K"], index: Int[Array, ""] | int, precision: lax.PrecisionLike
    ) -> Float[Array, "R C"]:
        """Return x · the matrix of an expert in x's type."""
        own = Quantized(self.values[index], self.scales[index])
        return jnp.matmul(x, dequantized(own, x.dtype), precision=precision)


class QuantizedRows(NamedTuple):
    """Weights: values · scales, of a matrix with a scale per row. Otherwise as `Quantized`."""

    values: Int8[Array, "V K"] | UInt8[Array, "V K"]
    scales: Float32[Array, " V"]

    def rows(self, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
        """Return rows by their indices."""
        return rows_of(self, ids, dtype)

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T V"]:
        """Return x · weightsᵀ in float32."""
        return matmul_rows(x, self)

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrix, and its arrays."""
        return "scaled", [self.values, self.scales]


class QuantizedBlocks(NamedTuple):
    """Weights: values · scales, with a scale for each block of K / G neighbouring inputs and C / S outputs.

    A weight is the product in float32, rounded once to the type that is asked for.

    Attributes:
        values: the bits of float8 e4m3.
    """

    values: UInt8[Array, "*E K C"]
    scales: Float32[Array, "*E G S"]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "of 8 bits in blocks"

    @property
    def readers(self) -> tuple[str, ...]:
        """XLA; Hopper's kernels have it in tiles."""
        return ("xla",)

    @property
    def columns(self) -> int:
        """C."""
        return int(self.values.shape[-1])

    def product(
        self, x: Float[Array, "R K"], index: Int[Array, ""] | int, precision: lax.PrecisionLike
    ) -> Float[Array, "R C"]:
        """Return x · the matrix of an expert in x's type."""
        own = QuantizedBlocks(self.values[index], self.scales[index])
        return jnp.matmul(x, dequantized_blocks(own, x.dtype), precision=precision)


def magnitudes(weights: Float[Array, "*E K C"]) -> Float32[Array, "*E C"]:
    """Return the largest absolute value of each output's weights."""
    return jnp.abs(weights).max(axis=-2).astype(jnp.float32)  # cast last: XLA would store the widened weights


def quantize(weights: Float[Array, "*E K C"], kind: Kind, largest: Float32[Array, "*E C"] | None = None) -> Quantized:
    """Round weights to 8 bits. Each output is scaled so that its largest weight becomes the largest number.

    Args:
        weights: some or all inputs of each output.
        kind: type of the numbers.
        largest: `magnitudes` over all inputs. None: `weights` has all of them.
    """
    largest = magnitudes(weights) if largest is None else largest
    scales = jnp.where(largest == 0, 1.0, largest / (127 if kind == "int8" else 448))
    scaled = weights.astype(jnp.float32) / scales[..., None, :]
    if kind == "int8":
        return Quantized(jnp.round(scaled).astype(jnp.int8), scales)
    return Quantized(lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8), scales)


def quantize_rows(weights: Float[Array, "V K"], kind: Kind) -> QuantizedRows:
    """Round weights to 8 bits, with a scale per row."""
    found = quantize(weights.T, kind)
    return QuantizedRows(found.values.T, found.scales)


def numbers(values: Int8[Array, "..."] | UInt8[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return the values without their scales, exactly."""
    if values.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    return values.astype(dtype)


def dequantized(weights: Quantized, dtype: jnp.dtype) -> Float[Array, "*E K C"]:
    """Return all of the weights as one array."""
    return (numbers(weights.values, jnp.dtype(jnp.float32)) * weights.scales[..., None, :]).astype(dtype)


def dequantized_blocks(weights: QuantizedBlocks, dtype: jnp.dtype) -> Float[Array, "*E K C"]:
    """Return all of the weights as one array."""
    values, scales = weights
    *lead, inputs, outputs = values.shape
    groups, shares = scales.shape[-2:]
    wide = numbers(values, jnp.dtype(jnp.float32)).reshape(*lead, groups, inputs // groups, shares, outputs // shares)
    out: Array = (wide * scales[..., :, None, :, None]).reshape(values.shape).astype(dtype)
    return out


def rows_of(weights: QuantizedRows, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
    """Return rows by their indices."""
    scales = weights.scales[ids][:, None]
    return (numbers(weights.values[ids], jnp.dtype(jnp.float32)) * scales).astype(dtype)


def matmul_rows(x: Float[Array, "T K"], weights: QuantizedRows) -> Float32[Array, "T V"]:
    """Return x · weightsᵀ in float32, without a copy of the weights; see `product`."""
    out: Array = lax.platform_dependent(x, weights.values, cpu=_blocked_rows, default=_product_rows)
    return out * weights.scales[None]


def matmul(x: Float[Array, "T K"], weights: Quantized) -> Float[Array, "T C"]:
    """Return x · weights in x's type; see `product`."""
    out: Array = product(x, weights).astype(x.dtype)
    return out


def product(x: Float[Array, "T K"], weights: Quantized) -> Float32[Array, "T C"]:
    """Return x · weights in float32, of factors in x's type. No copy of the weights is made.

    A GPU converts within the matrix product (a Triton kernel that XLA generates). XLA on CPU would convert all of the
    weights first, so it gets a block of columns at a time.
    """
    out: Array = lax.platform_dependent(x, weights.values, cpu=_blocked, default=_product)
    return out * weights.scales[None]


def _product(x: Float[Array, "T K"], values: Array) -> Float32[Array, "T C"]:
    return jnp.matmul(x, numbers(values, x.dtype), preferred_element_type=jnp.float32)


def _blocked(x: Float[Array, "T K"], values: Array) -> Float32[Array, "T C"]:
    columns = values.shape[1]
    size = min(_BLOCK, columns)

    def block(index: Array, out: Float32[Array, "T C"]) -> Float32[Array, "T C"]:
        # If the columns are no multiple, the last block overlaps the one before, and writes the same numbers again.
        start = jnp.minimum(index * size, columns - size)
        part = _product(x, lax.dynamic_slice_in_dim(values, start, size, axis=1))
        return lax.dynamic_update_slice_in_dim(out, part, start, axis=1)

    out: Array = lax.fori_loop(0, -(-columns // size), block, jnp.zeros((len(x), columns), jnp.float32))
    return out


def _product_rows(x: Float[Array, "T K"], values: Array) -> Float32[Array, "T V"]:
    contracted = ((1,), (1,)), ((), ())
    return lax.dot_general(x, numbers(values, x.dtype), contracted, preferred_element_type=jnp.float32)


def _blocked_rows(x: Float[Array, "T K"], values: Array) -> Float32[Array, "T V"]:
    rows = values.shape[0]
    size = min(_BLOCK, rows)

    def block(index: Array, out: Float32[Array, "T V"]) -> Float32[Array, "T V"]:
        start = jnp.minimum(index * size, rows - size)  # as in _blocked
        part = _product_rows(x, lax.dynamic_slice_in_dim(values, start, size, axis=0))
        return lax.dynamic_update_slice_in_dim(out, part, start, axis=1)

    out: Array = lax.fori_loop(0, -(-rows // size), block, jnp.zeros((len(x), rows), jnp.float32))
    return out

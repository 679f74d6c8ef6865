"""Make calls of `grouped_matmul` from cases: random rows and weights, the call, the expected result."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cpu.products import (
    PANEL,
    QUAD,
    Panels,
    fits_quads,
    panel_count,
    to_byte_quads,
    to_panels,
    to_quads,
)
from pallas_kernels.experts import eight_bits, int4_tiles, nvfp4, nvfp4_tiles
from pallas_kernels.experts.api import HOPPER, Implementation, grouped_matmul
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups
from pallas_kernels.experts.hopper import call as hopper_grouped
from pallas_kernels.experts.hopper.launch import Tuning
from pallas_kernels.experts.mxfp4 import BLOCK, Mxfp4, joined, tiles, unpack
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.int4 import Int4
from pallas_kernels.int4 import dequantized as dequantized_int4
from pallas_kernels.int8_groups import Int8Groups
from pallas_kernels.quantized import (
    Kind,
    Quantized,
    QuantizedBlocks,
    dequantized,
    dequantized_blocks,
    quantize,
)
from tests.support.kernels.calls import TINY, roundoff
from tests.support.kernels.device import hopper
from tools.cases.kernels.experts import Case

ROUNDED = 4  # by the activation: up + 1, the sigmoid, and two products


@dataclass(frozen=True)
class Call:
    """Arrays of one call. Rows that belong to no expert, and weights of experts without rows, hold NaN."""

    x: Float[Array, "R K"]
    weights: Float[Array, "E K C"] | Mxfp4 | Quantized | QuantizedBlocks | Int4 | Nvfp4
    bias: Float[Array, "E C"] | None
    starts: Int[np.ndarray, " E"]
    sizes: Int[np.ndarray, " E"]

    @property
    def groups(self) -> Groups:
        """The groups as the implementations take them."""
        return Groups(jnp.asarray(self.starts), jnp.asarray(self.sizes))

    @property
    def expert(self) -> Int[np.ndarray, " R"]:
        """The expert of each row; -1: none."""
        out = np.full(len(self.x), -1)
        for expert, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            out[start : start + size] = expert
        return out

    @property
    def owned(self) -> Bool[np.ndarray, " R"]:
        """Whether each row belongs to an expert."""
        return np.asarray(self.expert >= 0)


def make_call(case: Case, seed: int = 0) -> Call:
    """Return a call with random numbers, whose results are of about unit size."""
    rng = np.random.default_rng(seed)
    sizes = np.array(case.sizes, np.int32)
    aligned = -(-sizes // ALIGN) * ALIGN
    starts = (np.cumsum(aligned) - aligned).astype(np.int32)
    columns = case.outputs * (1 if case.gated is None else 2)
    makers: dict[str, Any] = {
        "plain": _plain,
        "mxfp4": _packed,
        "int4": _int4,
        "int4_wide": _int4,
        "fp8_blocks": _fp8_blocks,
        "nvfp4": _nvfp4,
    }
    weights = makers.get(case.form, _eight_bits)(rng, case, sizes, columns)
    bias = rng.standard_normal((len(sizes), columns)) if case.bias else None
    call = Call(jnp.zeros((int(aligned.sum()) + case.spare, 1)), jnp.zeros((1, 1, 1)), None, starts, sizes)
    x = np.where(call.owned[:, None], rng.standard_normal((len(call.x), case.inputs)), np.nan)
    cast = None if bias is None else jnp.asarray(bias, case.dtype)
    return Call(jnp.asarray(x, case.dtype), weights, cast, starts, sizes)


def _plain(rng: np.random.Generator, case: Case, sizes: Int[np.ndarray, " E"], columns: int) -> Float[Array, "E K C"]:
    weights = rng.standard_normal((len(sizes), case.inputs, columns)) * case.inputs**-0.5
    weights[sizes == 0] = np.nan
    return jnp.asarray(weights, case.dtype)


def _packed(rng: np.random.Generator, case: Case, sizes: Int[np.ndarray, " E"], columns: int) -> Mxfp4:
    """Return random weights. Scales are around inputs^-½ / 3, since numbers are around 3."""
    blocks = rng.integers(0, 256, (len(sizes), columns, case.inputs // 2), np.uint8)
    middle = 127 + round(math.log2(case.inputs**-0.5 / 3))
    scales = rng.integers(middle - 1, middle + 2, (len(sizes), columns, case.inputs // BLOCK)).astype(np.uint8)
    scales[sizes == 0] = 255
    return Mxfp4(jnp.asarray(blocks), jnp.asarray(scales))


def _eight_bits(rng: np.random.Generator, case: Case, sizes: Int[np.ndarray, " E"], columns: int) -> Quantized:
    """Return random weights that bfloat16 can represent: XLA's form rounds them to it, the Hopper kernel does not."""
    normal = rng.standard_normal((len(sizes), case.inputs, columns)).astype(np.float32)
    kind: Kind = "int8" if case.form == "int8" else "fp8"
    largest, bits = (127, 0) if kind == "int8" else (448, 3)  # bits of fraction that are left for a scale
    scales = np.ldexp(
        rng.integers(2**bits, 2 ** (bits + 1), (len(sizes), columns)), rng.integers(-1, 2, columns) - bits
    )
    scales *= 2.0 ** round(math.log2(4 * case.inputs**-0.5 / largest))
    scales[sizes == 0] = np.nan
    return Quantized(quantize(jnp.asarray(normal), kind).values, jnp.asarray(scales, jnp.float32))


def _fp8_blocks(rng: np.random.Generator, case: Case, sizes: Int[np.ndarray, " E"], columns: int) -> QuantizedBlocks:
    """Return random weights in blocks of 128 by 128 or the largest part that fits; bfloat16 can represent them."""
    normal = rng.standard_normal((len(sizes), case.inputs, columns)).astype(np.float32)
    blocks = len(sizes), case.inputs // math.gcd(128, case.inputs), columns // math.gcd(128, case.outputs)
    scales = np.ldexp(rng.integers(8, 16, blocks), rng.integers(-4, 0, blocks))
    scales *= 2.0 ** round(math.log2(4 * case.inputs**-0.5 / 448))
    scales[sizes == 0] = np.nan
    return QuantizedBlocks(quantize(jnp.asarray(normal), "fp8").values, jnp.asarray(scales, jnp.float32))


def _int4(rng: np.random.Generator, case: Case, sizes: Int[np.ndarray, " E"], columns: int) -> Int4:
    """Return random codes, zero points and scales in groups of 32 inputs, whose weights bfloat16 can represent."""
    codes = rng.integers(0, 256, (len(sizes), case.inputs // 2, columns), np.uint8)
    groups = len(sizes), case.inputs // 32, columns
    scales = rng.integers(8, 16, groups) * 2.0 ** round(math.log2(case.inputs**-0.5 / 60))
    scales[sizes == 0] = np.nan
    zeros = rng.integers(0, 17, groups).astype(np.uint8)
    dtype = jnp.bfloat16 if case.form == "int4" else jnp.float16
    return Int4(jnp.asarray(codes), jnp.asarray(scales, dtype), jnp.asarray(zeros))


def _nvfp4(rng: np.random.Generator, case: Case, sizes: Int[np.ndarray, " E"], columns: int) -> Nvfp4:
    """Return random codes, scales of both signs, and a factor of all fractions for each output."""
    codes = rng.integers(0, 256, (len(sizes), case.inputs // 2, columns), np.uint8)
    scales = rng.integers(0x30, 0x40, (len(sizes), case.inputs // nvfp4.GROUP, columns)).astype(np.uint8)  # ½ to 2
    scales |= rng.integers(0, 2, scales.shape, np.uint8) << 7
    factors = rng.uniform(1, 2, (len(sizes), columns)) * case.inputs**-0.5 / 5
    scales[sizes == 0] = 0x7F
    return Nvfp4(jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(factors, jnp.float32))


def run(
    call: Call, case: Case, implementation: Implementation, tuning: Tuning | None = None
) -> Float[np.ndarray, "R N"]:
    """Run a call with an implementation. Hopper kernels run as `device.hopper` says."""
    if implementation not in HOPPER:
        held: Any = call.weights
        held = held if implementation != "cpu" or isinstance(held, Mxfp4) else in_panels(held)
        out = grouped_matmul(call.x, held, call.groups, bias=call.bias, gated=case.gated, implementation=implementation)
        return np.asarray(out.astype(jnp.float32))
    weights: Any = call.weights
    if isinstance(weights, Mxfp4):
        weights = joined(tiles(weights)) if implementation == "mosaic_overlap" else tiles(weights)
    elif isinstance(weights, Quantized):
        weights = eight_bits.tiles(weights)
    elif isinstance(weights, QuantizedBlocks):
        weights = eight_bits.block_tiles(weights)
    elif isinstance(weights, Int4):
        weights = int4_tiles.tiles(weights)
    elif isinstance(weights, Nvfp4):
        weights = nvfp4_tiles.tiles(weights)
    with hopper():
        if tuning is None:
            out = grouped_matmul(
                call.x, weights, call.groups, bias=call.bias, gated=case.gated, implementation=implementation
            )
        else:
            out = hopper_grouped.grouped_matmul(call.x, weights, call.groups, call.bias, case.gated, tuning)
        return np.asarray(out.astype(jnp.float32))


def in_panels(weights: Float[Array, "*E K C"] | Quantized | Int4 | Nvfp4 | Int8Groups, *, quads: bool = True) -> Panels:
    """Return weights as the CPU's products take them.

    Args:
        quads: whether integers with group scales are laid out in quads where the processor has products of them.
    """
    if isinstance(weights, Int8Groups):
        values, scales = weights
        quads = quads and fits_quads(values.shape[-2], scales.shape[-2])
        return Panels(Int8Groups(_panels(values, quads), _panels(scales, False) if quads else scales), values.shape[-1])
    if isinstance(weights, Quantized):
        return Panels(weights._replace(values=_panels(weights.values, False)), weights.values.shape[-1])
    if isinstance(weights, Nvfp4):
        held = weights._replace(codes=_panels(weights.codes, False), scales=_panels(weights.scales, False))
        return Panels(held, weights.codes.shape[-1])
    if isinstance(weights, Int4):
        codes, scales, zeros, table = weights
        quads = quads and fits_quads(2 * codes.shape[-2], scales.shape[-2], table=table is not None)
        if quads:
            scales, zeros = _panels(scales, False), _panels(zeros, False)
        return Panels(Int4(_panels(codes, quads), scales, zeros, table), codes.shape[-1])
    return Panels(_panels(weights, False), weights.shape[-1])


def _panels(matrix: Array, quads: bool) -> Array:
    *lead, rows, outputs = matrix.shape
    shape = (rows // QUAD, QUAD * PANEL) if quads else (rows, PANEL)
    out = np.empty((*lead, panel_count(outputs), *shape), matrix.dtype)
    lay = to_panels if not quads else to_quads if matrix.dtype == np.uint8 else to_byte_quads
    lay(np.asarray(matrix), out)
    return jnp.asarray(out)


def check(out: Float[np.ndarray, "R N"], call: Call, case: Case) -> None:
    """Assert that the results of rows that belong to an expert are the oracle's but for rounding to the case's type."""
    expected, allowed = expect(call, case)
    found = out[call.owned], expected[call.owned]
    if case.dtype == "float32":
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
        return
    errors = np.abs(np.subtract(*found)) / allowed[call.owned]
    worst = float(np.nan_to_num(errors, nan=np.inf).max(initial=0))
    assert worst <= 1, f"{case.name}: {worst:.3g} times what rounding may do"


def expect(call: Call, case: Case) -> tuple[Float[np.ndarray, "R N"], Float[np.ndarray, "R N"]]:
    """Return the expected result, row by row in float64, and the most that rounding to the case's type may change.

    Rows that belong to no expert are zeros.
    """
    x = np.asarray(call.x.astype(jnp.float32), np.float64)
    dense = call.weights
    if isinstance(dense, Mxfp4):
        dense = unpack(dense, jnp.dtype(jnp.float32)).transpose(0, 2, 1)
    elif isinstance(dense, Quantized):
        dense = dequantized(dense, jnp.dtype(jnp.float32))
    elif isinstance(dense, QuantizedBlocks):
        dense = dequantized_blocks(dense, jnp.dtype(jnp.float32))
    elif isinstance(dense, Nvfp4):
        dense = nvfp4.dequantized(dense, jnp.dtype(jnp.float32))
    elif isinstance(dense, Int4):
        dense = jax.vmap(lambda *own: dequantized_int4(Int4(*own), jnp.dtype(jnp.float32)))(*dense[:3])
    weights = np.asarray(dense.astype(jnp.float32), np.float64)
    bias = None if call.bias is None else np.asarray(call.bias.astype(jnp.float32), np.float64)
    out, allowed = np.zeros((2, len(x), case.outputs))
    inputs = x.shape[1]
    for row, expert in enumerate(call.expert):
        if expert >= 0:
            product = x[row] @ weights[expert]
            sums = inputs * 2.0**-24 * (np.abs(x[row]) @ np.abs(weights[expert]))  # in float32
            out[row], allowed[row] = _finish(case, product, sums, None if bias is None else bias[expert])
    return out, allowed


def _finish(
    case: Case,
    product: Float[np.ndarray, " C"],
    error: Float[np.ndarray, " C"],
    bias: Float[np.ndarray, " C"] | None,
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Return the result of a row from its products and their error in float32, and what rounding may change.

    Rounded are the product, its sum with the bias, the argument of the activation, and what the activation multiplies.
    An error of its arguments counts as much as it changes the result there.
    """
    unit = roundoff(case.dtype)
    total = product if bias is None else product + bias
    error = error + unit * (np.abs(total) + (0 if bias is None else np.abs(product)))
    if case.gated is None:
        return total, error
    (gate, up), (gate_error, up_error) = np.split(total, 2), np.split(error, 2)
    gate_error += unit * np.abs(gate)
    out = _gated(case.gated, gate, up)
    moved = [
        np.max([np.abs(_gated(case.gated, gate + sign * one, up + sign * other) - out) for sign in (1, -1)], axis=0)
        for one, other in ((gate_error, 0), (0, up_error))
    ]
    cancelled = np.abs(gate * up) if case.gated.activation == "gelu_tanh" else 0  # in 1 + tanh
    return out, moved[0] + moved[1] + unit * (ROUNDED * np.abs(out) + cancelled) + TINY


def _gated(config: Glu, gate: Float[np.ndarray, " N"], up: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    def sigmoid(value: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        return np.asarray(1 / (1 + np.exp(-value)))

    if config.alpha is not None:
        assert config.clamp is not None
        gate, up = np.minimum(gate, config.clamp), np.clip(up, -config.clamp, config.clamp)
        return np.asarray((up + 1) * gate * sigmoid(config.alpha * gate))
    error = np.vectorize(math.erf)
    gate = {
        "silu": lambda: gate * sigmoid(gate),
        "gelu": lambda: gate * (1 + error(gate / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2,
        "relu": lambda: np.maximum(gate, 0),
    }[config.activation]()
    if config.clamp is not None:
        gate, up = np.minimum(gate, config.clamp), np.clip(up, -config.clamp, config.clamp)
    return np.asarray(gate * up)

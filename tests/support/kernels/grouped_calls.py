"""Make calls of `grouped_matmul` from cases: random rows and weights, the call, the expected result."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.experts.api import Implementation, grouped_matmul
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups
from pallas_kernels.experts.hopper import call as hopper_grouped
from pallas_kernels.experts.hopper.plan import Tuning
from pallas_kernels.experts.mxfp4 import BLOCK, Mxfp4, tiles, unpack
from tests.support.kernels.device import hopper
from tools.cases.kernels.experts import Case


@dataclass(frozen=True)
class Call:
    """Arrays of one call. Rows that belong to no expert, and weights of experts without rows, hold NaN."""

    x: Float[Array, "R K"]
    weights: Float[Array, "E K C"] | Mxfp4
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
    weights = _packed(rng, case, sizes, columns) if case.packed else _plain(rng, case, sizes, columns)
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


def run(
    call: Call, case: Case, implementation: Implementation, tuning: Tuning | None = None
) -> Float[np.ndarray, "R N"]:
    """Run a call with an implementation. Hopper kernels run as `device.hopper` says."""
    if implementation != "mosaic":
        out = grouped_matmul(
            call.x, call.weights, call.groups, bias=call.bias, gated=case.gated, implementation=implementation
        )
        return np.asarray(out.astype(jnp.float32))
    weights = tiles(call.weights) if isinstance(call.weights, Mxfp4) else call.weights
    with hopper():
        if tuning is None:
            out = grouped_matmul(
                call.x, weights, call.groups, bias=call.bias, gated=case.gated, implementation="mosaic"
            )
        else:
            out = hopper_grouped.grouped_matmul(call.x, weights, call.groups, call.bias, case.gated, tuning)
        return np.asarray(out.astype(jnp.float32))


def expect(call: Call, case: Case) -> Float[np.ndarray, "R N"]:
    """Return the expected result, row by row in float64. Rows that belong to no expert are zeros."""
    x = np.asarray(call.x.astype(jnp.float32), np.float64)
    dense = call.weights
    if isinstance(dense, Mxfp4):
        dense = unpack(dense, jnp.dtype(jnp.float32)).transpose(0, 2, 1)
    weights = np.asarray(dense.astype(jnp.float32), np.float64)
    bias = None if call.bias is None else np.asarray(call.bias.astype(jnp.float32), np.float64)
    out = np.zeros((len(x), case.outputs))
    for row, expert in enumerate(call.expert):
        if expert >= 0:
            result = x[row] @ weights[expert]
            result = result if bias is None else result + bias[expert]
            out[row] = result if case.gated is None else _gated(case.gated, *np.split(result, 2))
    return out


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

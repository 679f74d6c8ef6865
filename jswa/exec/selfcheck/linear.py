"""Checks of linear layers on Hopper's kernel, of weights in tiles and in 16 bits, in every tuning of the steps."""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jswa.architecture import MlpConfig, ModelConfig, MoeConfig
from jswa.exec.buckets import Bucket
from jswa.exec.selfcheck.cases import Case, CheckedEngine, normal
from jswa.forms.base.form import MatrixPlace
from jswa.forms.base.names import OUTPUTS_FIRST, linear_in_16_bits, runs_on_mosaic
from jswa.forms.table import linear_in_tiles, matrix_at
from jswa.model.layers import unit_of
from pallas_kernels import fp8
from pallas_kernels.experts import dense
from pallas_kernels.experts.dense import Dense, DensePlain
from pallas_kernels.experts.glu import Glu, glu
from pallas_kernels.fp8 import Fp8Rows
from pallas_kernels.quantized import numbers

_TOKENS = 300  # of the products of 8-bit factors
_OUTPUTS = 512  # that are compared: few, since their weights are widened
_GATES = re.compile(r"^layers\.(\d+)\.(.+)\.gate_up$")


def linear_cases(engine: CheckedEngine) -> Iterator[Case]:
    """Yield the checks of linear layers, and of head and routers where the same kernel multiplies by them."""
    model, params, kernels, dtype = engine.model, engine.params, engine.kernels, engine.dtype
    if kernels.linear == "fp8":
        yield from _fp8_cases(params, engine.chosen, dtype)
        return
    yield from _dense_cases(model, params, engine.buckets, dtype, kernels.sms)
    if kernels.sums != "xla":
        yield from _head_cases(model, params, engine.buckets, dtype, kernels.sms)


def _dense_cases(
    model: ModelConfig, params: Mapping[str, Array], buckets: Sequence[Bucket], dtype: np.dtype, sms: int | None
) -> Iterator[Case]:
    """Yield a check for each kernel that linear layers run: one for each size, form and tuning.

    Args:
        params: of one device.
    """
    seen: set[Hashable] = set()
    for name in (*linear_in_tiles(params), *linear_in_16_bits(params)):
        weights = _weights(name, params, sms)
        unit = None if f"{name}.lora_a" in params else _unit(model, name, params, weights)
        for bucket in buckets:
            key = dense.variant(bucket.tokens, weights, unit)
            if key not in seen:
                seen.add(key)
                run = partial(_results, weights, unit, bucket.tokens, dtype)
                yield Case(f"linear layers 'mosaic', {name}, {bucket.tokens} tokens", run)


def _head_cases(
    model: ModelConfig, params: Mapping[str, Array], buckets: Sequence[Bucket], dtype: np.dtype, sms: int | None
) -> Iterator[Case]:
    """Yield the checks of the products in float32 of an engine whose rows are computed alone: of head and routers.

    Args:
        params: of one device.
    """
    seen: set[Hashable] = set()
    routers = [name for name in params if name.endswith(".router")]
    for name in ["embed" if model.tie_embeddings else "lm_head", *routers]:
        first = name == "embed"
        if name not in params or not (first or runs_on_mosaic(name, params[name].shape, alone=True)):
            continue
        weights = DensePlain(params[name], sms, first) if first else DensePlain(params[name], sms).padded()
        for bucket in buckets:
            tokens = bucket.tokens if name in routers else bucket.rows
            key = dense.variant(tokens, weights, wide=True)
            if key not in seen and dense.fits(weights.inputs, weights.outputs):
                seen.add(key)
                run = partial(_results, weights, None, tokens, dtype, wide=True)
                yield Case(f"linear layers 'mosaic', {name}, {tokens} tokens", run)


def _weights(name: str, params: Mapping[str, Array], sms: int | None) -> Dense:
    shape = params[name].shape if name in params else (0, 0)  # tiles tell their own
    matrix: Dense = matrix_at(MatrixPlace(name, shape, sms, "mosaic"), params)
    return matrix


def _unit(model: ModelConfig, name: str, params: Mapping[str, Array], weights: Dense) -> Glu | None:
    """Return the activation that the kernel of a layer's gates and ups applies, if it does."""
    found = _GATES.match(name)
    if found is None:
        return None
    layer = model.layers[int(found[1])]
    config: Any = layer.side.moe if layer.side is not None and "side" in found[2] else layer.mlp
    config = config.shared if isinstance(config, MoeConfig) else config
    assert isinstance(config, MlpConfig)
    return unit_of(config, bias=f"{name}_bias" in params) if dense.gates_fit(weights) else None


def _results(
    weights: Dense, unit: Glu | None, tokens: int, dtype: np.dtype, *, wide: bool = False
) -> tuple[Float[Array, "T n"], Float[Array, "T n"]]:
    """Return a kernel's first outputs, and those of a product in float32 with the same numbers."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, weights.inputs), np.float32)).astype(dtype)

    @jax.jit
    def found(x: Array, weights: Dense) -> Float[Array, "T n"]:
        return dense.matmul(x, weights, unit, wide=wide)[:, :_OUTPUTS]

    @jax.jit
    def expected(x: Array, few: Any) -> Float[Array, "T n"]:
        out = jnp.matmul(x.astype(jnp.float32), few.numbers(), precision="highest")
        return out if unit is None else glu(unit, *jnp.split(out, 2, axis=1))

    return found(x, weights), expected(x, weights.first(_OUTPUTS, 1 if unit is None else 2))


def _fp8_cases(params: Mapping[str, Array], buckets: Sequence[Bucket], dtype: np.dtype) -> Iterator[Case]:
    """Yield the checks of the products of 8-bit factors, for each size of a matrix of one device's parameters.

    With the tokens of the smallest and the largest bucket, at most `_TOKENS`, so that results are small.
    """
    rows = {value.shape: name for name, value in params.items() if name.endswith(OUTPUTS_FIRST)}
    for (outputs, inputs), name in rows.items():
        weights = Fp8Rows(params[name], params[f"{name.removesuffix(OUTPUTS_FIRST)}.scales"])
        for tokens in sorted({min(bucket.tokens, _TOKENS) for bucket in (buckets[0], buckets[-1])}):
            run = partial(_fp8_results, weights, tokens, dtype)
            yield Case(f"linear layers 'fp8', {inputs} by {outputs}, {tokens} tokens", run)


def _fp8_results(weights: Fp8Rows, tokens: int, dtype: np.dtype) -> tuple[Float[Array, "T c"], Float[Array, "T c"]]:
    """Return the first outputs of the product, and of one in float32 of the same rounded numbers."""
    x = normal(np.random.default_rng(0), tokens, weights.values.shape[1]).astype(dtype)
    few = Fp8Rows(weights.values[:_OUTPUTS], weights.scales[:_OUTPUTS])

    @jax.jit
    def expected(x: Array, few: Fp8Rows) -> Float[Array, "T c"]:
        codes, scales = fp8.quantize_tokens(x)
        matrix = numbers(few.values, jnp.dtype(jnp.float32))
        sums = jnp.matmul(codes.astype(jnp.float32), matrix.T, precision="highest")
        return sums * scales[:, None] * few.scales[None]

    return jax.jit(fp8.matmul)(x, weights)[:, :_OUTPUTS], expected(x, few)

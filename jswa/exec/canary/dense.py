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
from jswa.exec.canary.small import Case
from jswa.forms.base.form import Place
from jswa.forms.base.names import in_tiles, linear_in_16_bits, runs_on_mosaic
from jswa.forms.table import matrix_at
from jswa.model.layers import unit_of
from pallas_kernels.experts import dense, eight_bits, int4_tiles
from pallas_kernels.experts.dense import Dense, DensePlain
from pallas_kernels.experts.eight_bits import TILE, BlockTiles8, Tiles8
from pallas_kernels.experts.glu import Glu, glu
from pallas_kernels.experts.int4_tiles import Int4Tiles

_OUTPUTS = 512  # that are compared: few, since their weights are widened
_GATES = re.compile(r"^layers\.(\d+)\.(.+)\.gate_up$")


def dense_cases(
    model: ModelConfig, params: Mapping[str, Array], buckets: Sequence[Bucket], dtype: np.dtype, sms: int | None
) -> Iterator[Case]:
    """Yield a check for each kernel that linear layers run: one for each size, form and tuning.

    Args:
        params: of one device.
    """
    seen: set[Hashable] = set()
    for name in (*in_tiles(params), *linear_in_16_bits(params)):
        weights = _weights(name, params, sms)
        unit = None if f"{name}.lora_a" in params else _unit(model, name, params, weights)
        for bucket in buckets:
            key = dense.variant(bucket.tokens, weights, unit)
            if key not in seen:
                seen.add(key)
                run = partial(_results, weights, unit, bucket.tokens, dtype)
                yield Case(f"linear layers 'mosaic', {name}, {bucket.tokens} tokens", run)


def head_cases(
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
    matrix: Dense = matrix_at(Place(name, shape, sms, "mosaic"), params)
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
    def expected(x: Array, few: Array | Tiles8 | BlockTiles8 | Int4Tiles) -> Float[Array, "T n"]:
        untiled: Any = int4_tiles.untiled if isinstance(few, Int4Tiles) else eight_bits.untiled
        rows = few.astype(jnp.float32) if isinstance(few, Array) else untiled(few)
        out = jnp.matmul(x.astype(jnp.float32), rows.T, precision="highest")
        return out if unit is None else glu(unit, *jnp.split(out, 2, axis=1))

    parts = 1 if unit is None else 2
    few = _first_rows(weights, parts) if isinstance(weights, DensePlain) else _first(weights.tiles, parts)
    return found(x, weights), expected(x, few)


def _first_rows(weights: DensePlain, parts: int) -> Float[Array, "n K"]:
    """Return the weights of the first outputs of each of so many equal parts of a matrix."""
    count = weights.outputs // parts
    kept = [slice(part * count, part * count + min(count, _OUTPUTS)) for part in range(parts)]
    matrix = weights.matrix
    return jnp.concatenate([matrix[own] if weights.outputs_first else matrix[:, own].T for own in kept])


def _first(tiles: Tiles8 | BlockTiles8 | Int4Tiles, parts: int) -> Tiles8 | BlockTiles8 | Int4Tiles:
    """Return the tiles of the first outputs of each of so many equal parts of a matrix."""
    count = tiles[0].shape[0] // parts
    chosen = [part * count + index for part in range(parts) for index in range(min(count, _OUTPUTS // TILE))]
    at = jnp.asarray(chosen)
    if isinstance(tiles, Int4Tiles):
        return Int4Tiles(tiles.tiles[at])
    if isinstance(tiles, BlockTiles8):
        return BlockTiles8(tiles.codes[at], tiles.scales[at])
    return Tiles8(tiles.codes[at], tiles.scales.reshape(-1, TILE)[at].reshape(-1))

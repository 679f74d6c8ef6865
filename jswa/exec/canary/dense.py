"""Checks of linear layers in tiles of 4 and 8 bits on Hopper, in every tuning that the steps lead to."""

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
from jswa.model.layers import tiles_of, unit_of
from jswa.model.weights.formats import LINEAR
from jswa.model.weights.packed.tiles import in_tiles
from pallas_kernels.experts import dense, eight_bits, int4_tiles
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import TILE, BlockTiles8, Tiles8
from pallas_kernels.experts.glu import Glu, glu
from pallas_kernels.experts.int4_tiles import Int4Tiles

_OUTPUTS = 512  # that are compared: few, since their weights are widened
_GATES = re.compile(r"^layers\.(\d+)\.(.+)\.gate_up$")


def dense_cases(
    model: ModelConfig, params: Mapping[str, Array], buckets: Sequence[Bucket], dtype: np.dtype, sms: int | None
) -> Iterator[Case]:
    """Yield a check for each kernel that linear layers in tiles run: one for each size, form and tuning.

    Args:
        params: of one device.
    """
    seen: set[Hashable] = set()
    for name in in_tiles(params, LINEAR):
        tiles = tiles_of(name, params)
        assert tiles is not None
        weights = DenseTiles(tiles, sms)
        unit = None if f"{name}.lora_a" in params else _unit(model, name, params, weights)
        for bucket in buckets:
            key = dense.variant(bucket.tokens, weights, unit)
            if key not in seen:
                seen.add(key)
                run = partial(_results, weights, unit, bucket.tokens, dtype)
                yield Case(f"linear layers 'mosaic', {name}, {bucket.tokens} tokens", run)


def _unit(model: ModelConfig, name: str, params: Mapping[str, Array], weights: DenseTiles) -> Glu | None:
    """Return the activation that the kernel of a layer's gates and ups applies, if it does."""
    found = _GATES.match(name)
    if found is None:
        return None
    layer = model.layers[int(found[1])]
    config: Any = layer.side.moe if layer.side is not None and "side" in found[2] else layer.mlp
    config = config.shared if isinstance(config, MoeConfig) else config
    assert isinstance(config, MlpConfig)
    return unit_of(config, weights, bias=f"{name}_bias" in params)


def _results(
    weights: DenseTiles, unit: Glu | None, tokens: int, dtype: np.dtype
) -> tuple[Float[Array, "T n"], Float[Array, "T n"]]:
    """Return a kernel's first outputs, and those of a product in float32 with the same numbers."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, weights.inputs), np.float32)).astype(dtype)

    @jax.jit
    def found(x: Array, weights: DenseTiles) -> Float[Array, "T n"]:
        return dense.matmul(x, weights, unit)[:, :_OUTPUTS]

    @jax.jit
    def expected(x: Array, tiles: Tiles8 | BlockTiles8 | Int4Tiles) -> Float[Array, "T n"]:
        untiled: Any = int4_tiles.untiled if isinstance(tiles, Int4Tiles) else eight_bits.untiled
        out = jnp.matmul(x.astype(jnp.float32), untiled(tiles).T, precision="highest")
        return out if unit is None else glu(unit, *jnp.split(out, 2, axis=1))

    return found(x, weights), expected(x, _first(weights.tiles, 1 if unit is None else 2))


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

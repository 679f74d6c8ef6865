"""Matrices of experts in MXFP4: N.blocks and N.scales, outputs first; or for Hopper's kernels in tiles.

Those that read tiles have N.words and N.scales, and the one that unpacks meanwhile N.joined.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jswa.errors import CheckpointError
from jswa.forms.base.form import Form, ScaleCounts, Spec
from jswa.forms.base.tiles import Shards, expert_by_expert
from jswa.kernels import refused
from pallas_kernels.experts import mxfp4
from pallas_kernels.experts.api import HOPPER
from pallas_kernels.experts.mxfp4 import BLOCK, TILE, WORD_LINES, Mxfp4, Mxfp4Joined, Mxfp4Tiles


def _specs(_: str, shape: tuple[int, ...], __: ScaleCounts) -> dict[str, Spec]:
    *lead, inputs, outputs = shape
    blocks, scales = (*lead, outputs, inputs // 2), (*lead, outputs, inputs // BLOCK)
    return {"blocks": Spec(blocks, ("uint8",)), "scales": Spec(scales, ("uint8",))}


def _specs_of_tiles(_: str, shape: tuple[int, ...], __: ScaleCounts) -> dict[str, Spec]:
    tiles = _tiles(shape)
    return {"scales": Spec((*tiles, TILE), ("int16",)), "words": Spec((*tiles, 4, 128), ("int32",))}


def _specs_of_joined(_: str, shape: tuple[int, ...], __: ScaleCounts) -> dict[str, Spec]:
    return {"joined": Spec((*_tiles(shape), WORD_LINES + 1, TILE), ("int16",))}


def _tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, inputs, outputs = shape
    return *lead, outputs // TILE, inputs // TILE


def _stacked(name: str, arrays: Mapping[str, Array], experts: str, place: Shards) -> dict[str, Array]:
    """Lay a stack out. Raises CheckpointError if the Hopper kernel cannot read it, ConfigError for Triton's kernel."""
    blocks, scales = arrays["blocks"], arrays["scales"]
    if experts == "triton":
        limit = f"{name} is in MXFP4, which it does not read: choose quantization = none or kernels: experts=xla"
        raise refused("experts", experts, limit)
    if experts not in HOPPER:
        return {f"{name}.blocks": blocks, f"{name}.scales": scales}
    shards = map(Mxfp4, place.shards(blocks), place.shards(scales))
    tiled: list[Mxfp4Tiles] | list[Mxfp4Joined] = [_tiled(name, shard) for shard in shards]
    names: tuple[str, ...] = f"{name}.words", f"{name}.scales"
    if experts == "mosaic_overlap":
        tiled, names = [expert_by_expert(mxfp4.joined, shard) for shard in tiled], (f"{name}.joined",)
    return place.from_each(names, tiled)


def _tiled(name: str, shard: Mxfp4) -> Mxfp4Tiles:
    """Return the tiles of one device's shard."""
    _, outputs, half = shard.blocks.shape
    shard = _without_zero_block_scales(shard)
    if 2 * half % TILE or outputs % TILE or not bool(_tiles_hold(shard.scales)):
        raise CheckpointError(
            f"{name} [{outputs}, {2 * half}] in MXFP4 does not fit the Hopper kernel, which needs multiples of {TILE} "
            "and scales from 2^-93 to 2^33: choose quantization = none or kernels: experts=xla"
        )
    tiled: Mxfp4Tiles = expert_by_expert(mxfp4.tiles, shard)
    return tiled


@jax.jit
def _without_zero_block_scales(matrices: Mxfp4) -> Mxfp4:
    """Return the same numbers with scale 1 for blocks of zeros; tiles may be unable to represent their own scales."""
    codes = matrices.blocks.reshape(*matrices.scales.shape, BLOCK // 2) & 0x77
    return matrices._replace(scales=jnp.where((codes == 0).all(axis=-1), jnp.uint8(127), matrices.scales))


_tiles_hold = jax.jit(mxfp4.tiles_hold)
MXFP4 = Form(
    ("blocks", "scales"),
    lambda _, arrays: Mxfp4(arrays["blocks"], arrays["scales"]),
    specs=_specs,
    scheme="mxfp4",
    experts=("reference", "xla", "cpu", "mosaic", "mosaic_overlap", "triton"),
    unpacked=lambda *_: True,
    modes=lambda _: ("mxfp4", "int8", "fp8"),
    stacked=_stacked,
)
MXFP4_TILES = Form(
    ("words", "scales"),
    lambda _, arrays: Mxfp4Tiles(arrays["words"], arrays["scales"]),
    specs=_specs_of_tiles,
)
MXFP4_JOINED = Form(("joined",), lambda _, arrays: Mxfp4Joined(arrays["joined"]), specs=_specs_of_joined)

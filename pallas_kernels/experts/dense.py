"""Products of linear layers with weights of 4 or 8 bits on Hopper: the experts' kernel with one group.

The weights are read as they are held, and unpacked in registers while the product before runs. An output is one sum
over its inputs in their order, whatever the number of tokens: a row has the same bits in every batch.

Shape letters: T tokens, K inputs, C outputs; N outputs: C, or C / 2 behind gates and ups with a `Glu`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.errors import NoLinearKernel
from pallas_kernels.experts import api
from pallas_kernels.experts.api import Implementation, grouped_matmul, tiling_of
from pallas_kernels.experts.eight_bits import TILE, BlockTiles8, Tiles8
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups, list_one_group
from pallas_kernels.experts.int4_tiles import Int4Tiles

_KERNEL: Implementation = "mosaic_overlap"


@partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["sms"])
@dataclass(frozen=True)
class DenseTiles:
    """One matrix in the tiles that the Hopper kernel reads.

    Attributes:
        tiles: without an axis of experts; of 8 bits with a scale per output or per block.
        sms: multiprocessors of the device. None: as many as an H200 has.
    """

    tiles: Tiles8 | BlockTiles8 | Int4Tiles
    sms: int | None = None

    @property
    def inputs(self) -> int:
        """K."""
        return TILE * int(self.tiles[0].shape[1])

    @property
    def outputs(self) -> int:
        """C."""
        return TILE * int(self.tiles[0].shape[0])


def gates_fit(weights: DenseTiles) -> bool:
    """Return whether gates end where a tile does, so that `matmul` can apply an activation."""
    return weights.outputs % (2 * TILE) == 0


def variant(tokens: int, weights: DenseTiles, gated: Glu | None = None) -> Hashable:
    """Return what tells the kernels of calls apart, but for the number of tokens; see `api.variant`."""
    rows = -(-tokens // ALIGN) * ALIGN
    x = jax.ShapeDtypeStruct((rows, weights.inputs), jnp.bfloat16)  # type: ignore[no-untyped-call]
    return gated, api.variant(x, _stack(weights), None, gated, _KERNEL, weights.sms)


def matmul(x: Float[Array, "T K"], weights: DenseTiles, gated: Glu | None = None) -> Float[Array, "T N"]:
    """Return x · weights, after the activation if there is one. No copy of the weights is made.

    Raises NoLinearKernel if x is not bfloat16.
    """
    if x.dtype != jnp.bfloat16:
        raise NoLinearKernel(f"linear layers with weights of 4 and 8 bits in tiles need bfloat16, not {x.dtype}")
    tokens = len(x)
    rows = jnp.pad(x, ((0, -tokens % ALIGN), (0, 0)))
    held = _stack(weights)
    tiling = tiling_of(rows, held, None, gated, _KERNEL, weights.sms)
    assert tiling is not None
    group = Groups(jnp.zeros(1, jnp.int32), jnp.full(1, len(rows), jnp.int32))
    tiles = jnp.asarray(list_one_group(tiling, len(rows)))
    out = grouped_matmul(rows, held, group, gated=gated, implementation=_KERNEL, sms=weights.sms, tiles=tiles)
    return out[:tokens]


def _stack(weights: DenseTiles) -> Tiles8 | BlockTiles8 | Int4Tiles:
    """Return the tiles of one expert."""
    out: Tiles8 | BlockTiles8 | Int4Tiles = jax.tree.map(lambda array: array[None], weights.tiles)
    return out

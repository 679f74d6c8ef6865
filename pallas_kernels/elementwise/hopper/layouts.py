"""How the numbers of a token lie in the registers of a warpgroup."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu
from jaxtyping import Array, Num

from pallas_kernels.errors import NoElementwiseKernel
from pallas_kernels.mosaic import Ref, Scalar, plgpu

THREADS, LANES = 128, 32
_VECTOR = 4  # numbers of 32 bits that a thread loads at once


class Chunk(NamedTuple):
    """Neighbouring columns of a row, and how they are spread over the threads."""

    first: int
    size: int
    layout: Any

    def load(self, ref: Ref) -> Num[Array, " size"]:
        """Load the columns of a row in global memory."""
        out: Array = plgpu.load(ref.at[self.of], layout=self.layout, optimized=False)
        return out

    @property
    def of(self) -> Any:
        """The columns, as an index."""
        return pl.ds(self.first, self.size)


def chunks(columns: int) -> Iterator[Chunk]:
    """Cut a row of a multiple of 64 columns into pieces whose loads are as wide as the number of columns allows.

    Raises NoElementwiseKernel for other numbers of columns.
    """
    if columns % 64:
        raise NoElementwiseKernel(f"{columns} columns: must be a multiple of 64 for elementwise=mosaic")
    first = 0
    for vector in (_VECTOR, 2, 1):
        size = (columns - first) // (THREADS * vector) * THREADS * vector
        if size:
            yield Chunk(first, size, plgpu.Layout.WG_STRIDED((size,), vector))
            first += size
    if first < columns:  # half a number for each thread: every warp has them all
        tiling, everywhere = plgpu.Tiling(((64,), (2,))), (plgpu.Replicated(THREADS // LANES),)
        yield Chunk(first, 64, plgpu.Layout.TILED(tiling, warp_dims=everywhere, lane_dims=(-2,), vector_dim=-1))


def head_rows(heads: int, lanes: int) -> int:
    """Return how many heads `head_layout` takes at a time: a power of two that divides the number of heads."""
    return min(THREADS // lanes, heads & -heads)


def head_layout(rows: int, columns: int, lanes: int, *, paired: bool = False) -> Any:
    """Return the layout of the same columns of several heads, [rows, columns]: those of a head lie in one warp.

    Warps, and lanes of a warp, that no head is left for have the same as others.

    Args:
        lanes: that share a head, at most `lanes_of(columns)`. With equal lanes, sums along rows of different numbers of
            columns lie in the same registers.
        paired: the columns are one of each pair of neighbours in memory, so that a load takes one number.
    """
    vector = 1 if paired else min(_VECTOR, _power_of_two(columns // lanes))
    warps = min(rows, THREADS // LANES)
    per_warp = rows // warps
    width = lanes * vector
    tiling = plgpu.Tiling(((rows, width), (per_warp, width), (1, vector)))
    same_warps, same_lanes = THREADS // LANES // warps, LANES // lanes // per_warp
    warp_dims = (-6, *((plgpu.Replicated(same_warps),) if same_warps > 1 else ()))
    lane_dims = (-4, -3, *((plgpu.Replicated(same_lanes),) if same_lanes > 1 else ()))
    plain = gpu.TiledLayout(tiling, warp_dims, lane_dims, vector_dim=-1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(plain.tiling, plain.warp_dims, plain.lane_dims, plain.vector_dim)


def by_column(values: Num[Array, " columns"], rows: int) -> Num[Array, "rows columns"]:
    """Repeat a number per column for each row."""
    return lax.broadcast_in_dim(values, (rows, values.shape[0]), [1])


def by_row(values: Num[Array, " rows"] | Scalar, shape: tuple[int, int]) -> Num[Array, "rows columns"]:
    """Repeat a number per row along the row."""
    return lax.broadcast_in_dim(values, shape, [0])


def lanes_of(columns: int) -> int:
    """Return how many lanes of a warp can share so many columns."""
    return min(LANES, _power_of_two(columns))


def _power_of_two(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number

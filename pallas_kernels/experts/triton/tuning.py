"""The static part of a launch of the Triton grouped product: shapes and tuning. Imports no Triton."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Tiling

LEAST = 16  # rows, inputs and columns of the smallest matrix product
FEW_ROWS = 32  # of a tile whose time is that of reading the weights
_MOST_ROWS = 128
_MOST_BLOCKS = 2**31 - 1  # of a grid's first axis


class Tuning(NamedTuple):
    """Parameters that may be chosen freely: results differ by rounding only.

    Attributes:
        rows: of a tile; a power of two ≥ 16.
        columns: outputs of a thread block, with a `Glu` as many gates and as many ups; a power of two ≥ 16.
        depth: inputs per turn of the main loop; a power of two ≥ 16.
        warps: of a thread block.
        stages: of the software pipeline that loads rows and weights.
        band: thread blocks along the outputs that follow each other before the next tile's.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    band: int


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: R rows, E experts, K inputs, N outputs."""

    rows: int
    experts: int
    inputs: int
    outputs: int
    gated: Glu | None
    bias: bool
    dtype: jnp.dtype

    @classmethod
    def of(cls, x: Any, weights: Float[Array, "E K C"], bias: Float[Array, "E C"] | None, gated: Glu | None) -> "Shape":
        """Return the sizes of a call. Only shapes and types are read.

        Raises NoExpertKernel if the kernel cannot serve them.
        """
        experts, inputs, columns = weights.shape
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise NoExpertKernel(f"implementation = 'triton' needs bfloat16, float16 or float32, not {x.dtype}")
        if weights.dtype != x.dtype:
            raise NoExpertKernel(
                f"rows are {x.dtype} and weights {weights.dtype}: implementation = 'triton' needs one type"
            )
        outputs = columns if gated is None else columns // 2
        return cls(x.shape[0], experts, inputs, outputs, gated, bias is not None, x.dtype)

    def tiling(self, tuning: Tuning) -> Tiling:
        """Return how rows are cut into tiles: each busy expert has at most one that is not full."""
        return Tiling(tuning.rows, self.rows // tuning.rows + min(self.experts, -(-self.rows // ALIGN)))

    def grid(self, tuning: Tuning) -> int:
        """Return the number of thread blocks. Those of tiles that there are not, and beyond the outputs, return."""
        parts = -(-self.outputs // tuning.columns)
        return -(-parts // tuning.band) * tuning.band * self.tiling(tuning).most


def check_tuning(shape: Shape, tuning: Tuning) -> None:
    """Raise ValueError if Triton cannot compile the tuning."""
    sizes = tuning.rows, tuning.columns, tuning.depth
    if any(size < LEAST or size & (size - 1) for size in sizes) or shape.grid(tuning) > _MOST_BLOCKS:
        raise ValueError(
            f"{tuning}: rows, columns and depth must be powers of two from {LEAST} on, and a grid has at most "
            f"{_MOST_BLOCKS} thread blocks"
        )


def default_tuning(shape: Shape) -> Tuning:
    """Choose a tuning by the compiler's reports (`python -m tools.aot.small.grouped`), not by measurements.

    * Rows per tile: twice the mean of a group, so that few experts need two tiles, which read the weights twice; 16 in
      float32, which has no matrix units.
    * Few rows: 64 columns, and all columns of an expert one after the other, as they lie in memory. Stages have 8 KB of
      weights, of which two are on their way while one is multiplied: three thread blocks fit on a multiprocessor of an
      L4, whose shared memory is the smallest.
    * Many rows: 128 columns of weights, and bands of eight thread blocks that share their weights in the L2 cache.
      Eight warps: with four, 64 rows spill registers on Blackwell.
    """
    if shape.dtype.itemsize == 4:
        return Tuning(LEAST, LEAST * 2, LEAST * 2, 4, 3, _parts(shape, LEAST * 2))
    mean = -(-(shape.rows - (ALIGN - 1) * min(shape.experts, shape.rows // ALIGN)) // shape.experts)
    rows = min(_MOST_ROWS, max(LEAST, 1 << (2 * mean - 1).bit_length()))
    if rows <= FEW_ROWS:
        return Tuning(rows, 64, 64 if shape.gated is None else 32, 4, 4, _parts(shape, 64))
    columns = 64 if shape.gated is not None else 128
    return Tuning(rows, columns, 32, 8, 4, min(8, _parts(shape, columns)))


def _parts(shape: Shape, columns: int) -> int:
    return -(-shape.outputs // columns)

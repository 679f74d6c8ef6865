"""`grouped_matmul` for Hopper in Pallas Mosaic GPU: shapes, tuning, the list of tiles, the call.

The kernel (`mosaic_kernel`) multiplies transposed: weights are the left operand, whose 64 rows per WGMMA are
columns of the weights, and rows of x are the right operand, 8 to 128 at a time. So a few tokens per expert leave no
part of the tensor cores' work empty, and one kernel serves decode and prefill.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper.plan import SM_SMEM_BYTES, SMEM_ALIGN, SMEM_BYTES, SMS
from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups
from pallas_kernels.experts.hopper import kernel as kernel
from pallas_kernels.experts.mxfp4 import Mxfp4Tiles

DEPTH = 64  # inputs per turn of the loop: 128 bytes, a swizzled row
UNIT = 64  # columns of the weights per WGMMA
_MOST_ROWS = 128
_MOST_STAGES = 12
_BAND = 8
_FEW_ROWS = 16  # up to here two thread blocks share a multiprocessor
_DEPTHS = (3, 2, 1)


class Tuning(NamedTuple):
    """What may be chosen freely. Every output is one sum over the inputs, in order, whatever is chosen.

    Attributes:
        rows: of x per tile.
        consumers: computing warpgroups of a thread block, each with its own columns.
        parts: times 64 columns per warpgroup; with a `Glu` 2, gates and ups.
        stages: blocks of inputs in shared memory at once, two or more.
        depth: times 64 inputs per turn of the loop; more than 1 for weights of 4 bits only.
        band: blocks of columns that pass by all tiles before the next: the L2 cache holds their weights meanwhile.
        sms: multiprocessors, each of which runs one or two thread blocks to the end.
    """

    rows: int
    consumers: int
    parts: int
    stages: int
    depth: int = 1
    band: int = _BAND
    sms: int = SMS


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        rows: of x.
        outputs: columns of the result.
        packed: weights of 4 bits.
    """

    rows: int
    experts: int
    inputs: int
    outputs: int
    dtype: jnp.dtype
    gated: Glu | None
    bias: bool
    packed: bool

    @classmethod
    def of(
        cls,
        x: Float[Array, "R K"],
        weights: Float[Array, "E K C"] | Mxfp4Tiles,
        bias: Float[Array, "E C"] | None,
        gated: Glu | None,
    ) -> "Shape":
        """Of the arguments of `grouped_matmul`; arrays without values will do.

        Raises ValueError where the kernel cannot serve them.
        """
        rows, inputs = x.shape
        packed = isinstance(weights, Mxfp4Tiles)
        _check(x, weights, bias)
        experts, _, columns = weights.shape if not isinstance(weights, Mxfp4Tiles) else _tile_shape(weights)
        outputs = columns if gated is None else columns // 2
        for name, size in (("inputs", inputs), ("outputs", outputs)):
            if size % UNIT:
                raise NoExpertKernel(f"{size} {name}: implementation = 'mosaic' needs a multiple of {UNIT}")
        if rows % ALIGN:
            raise NoExpertKernel(f"{rows} rows: implementation = 'mosaic' needs a multiple of {ALIGN}")
        return cls(rows, experts, inputs, outputs, x.dtype, gated, bias is not None, packed)


def _tile_shape(weights: Mxfp4Tiles) -> tuple[int, int, int]:
    experts, across, along = weights.words.shape[:3]
    return experts, along * UNIT, across * UNIT


@dataclass(frozen=True)
class Launch(Shape):
    """A shape and its tuning."""

    tuning: Tuning

    @property
    def width(self) -> int:
        """Columns of one copy of weights: 64 for each computing warpgroup."""
        return UNIT * self.tuning.consumers

    @property
    def step(self) -> int:
        """Outputs of a thread block at a time."""
        return self.width if self.gated is not None else self.width * self.tuning.parts

    @property
    def columns(self) -> int:
        """Blocks of outputs. The last one ends with the row, and overlaps its neighbour where they do not fit."""
        return -(-self.outputs // self.step)

    @property
    def out_parts(self) -> int:
        """Times 64 outputs per warpgroup."""
        return 1 if self.gated is not None else self.tuning.parts

    @property
    def most_tiles(self) -> int:
        """Tiles that the rows make at most, however they are shared out."""
        return self.rows // self.tuning.rows + min(self.experts, self.rows // ALIGN)

    @property
    def turns(self) -> int:
        """Blocks of inputs."""
        return self.inputs // (DEPTH * self.tuning.depth)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        rows, consumers, parts, stages, depth, *_ = self.tuning
        tiles = stages * parts * consumers * depth  # of 64 columns and inputs
        weights = (tiles * UNIT * DEPTH // 2, tiles * UNIT * 2) if self.packed else (tiles * UNIT * DEPTH * 2,)
        arrays = stages * rows * DEPTH * depth * 2, *weights, consumers * self.out_parts * rows * UNIT * 2
        barriers = 2 * 8 * stages
        return sum(-(-int(size) // SMEM_ALIGN) * SMEM_ALIGN for size in arrays) + barriers

    @property
    def moves_registers(self) -> bool:
        """Whether the loader gives registers to the computing warpgroups: many rows take many sums."""
        return self.tuning.consumers > 1 and self.tuning.rows > _FEW_ROWS

    @property
    def blocks(self) -> int:
        """Thread blocks, each of which takes tiles until none is left: as many as there is room for at once."""
        two = not self.moves_registers and 2 * (self.smem_bytes + SMEM_ALIGN) <= SM_SMEM_BYTES
        return (2 if two else 1) * self.tuning.sms


def default_tuning(shape: Shape) -> Tuning:
    """Chosen from arithmetic and from what the compiler reports, not from measurements.

    * Rows per tile: twice the mean of a group, so that few experts need two tiles, which read the weights twice.
    * Up to 16 rows, one computing warpgroup and two thread blocks per multiprocessor: many small pieces of weights
      keep all of them busy with few experts. Beyond, two warpgroups share the rows of x, whose share of what comes
      from the L2 cache grows.
    * Weights of 4 bits: two warpgroups in any case, since unpacking is work, and up to 6 KB per copy.
    * As many stages as fit.
    * Where groups have several tiles, bands of columns; else whole rows of the weights, as memory holds them.
    """
    mean = -(-(shape.rows - (ALIGN - 1) * min(shape.experts, shape.rows // ALIGN)) // shape.experts)
    rows = min(_MOST_ROWS, max(ALIGN, 1 << (2 * mean - 1).bit_length()))
    while rows > shape.rows:
        rows //= 2
    wide = rows > _FEW_ROWS or shape.packed
    consumers = 2 if wide and shape.outputs >= 2 * UNIT else 1
    parts = 2 if shape.gated is not None or (rows > _FEW_ROWS and shape.outputs >= 2 * consumers * UNIT) else 1
    depths = _DEPTHS if shape.packed and rows <= _FEW_ROWS else (1,)
    depth = next(depth for depth in depths if shape.inputs // DEPTH % depth == 0)
    budget = SMEM_BYTES if rows > _FEW_ROWS and consumers == 2 else SM_SMEM_BYTES // 2 - SMEM_ALIGN
    stages = max(2, min(_MOST_STAGES, shape.inputs // (DEPTH * depth)))
    while stages > 2 and _fit(shape, Tuning(rows, consumers, parts, stages, depth)).smem_bytes > budget:
        stages -= 1
    return Tuning(rows, consumers, parts, stages, depth, band=_BAND if rows > _FEW_ROWS else shape.outputs // UNIT)


def _fit(shape: Shape, tuning: Tuning) -> Launch:
    return Launch(**vars(shape), tuning=tuning)


def launch(shape: Shape, tuning: Tuning) -> Launch:
    """The shape with its tuning.

    Raises ValueError where they do not go together.
    """
    out = _fit(shape, tuning)
    if tuning.depth > 1 and not shape.packed:
        raise ValueError(f"depth {tuning.depth}: more than 1 is for weights of 4 bits")
    if shape.inputs // DEPTH % tuning.depth:
        raise ValueError(f"depth {tuning.depth} does not divide {shape.inputs} inputs")
    if tuning.rows % ALIGN or tuning.rows > shape.rows:
        raise ValueError(f"tiles of {tuning.rows} rows do not fit {shape.rows} rows")
    if tuning.stages < 2:
        raise ValueError(f"{tuning.stages} stages: one is freed once the next is in use")
    if shape.gated is not None and tuning.parts != 2:
        raise ValueError(f"{tuning.parts} parts: gates and ups are two")
    if out.step > shape.outputs:
        raise ValueError(f"{tuning} takes {out.step} outputs at a time, of {shape.outputs}")
    if out.smem_bytes > SMEM_BYTES:
        raise ValueError(f"{tuning} needs {out.smem_bytes} bytes of shared memory, of {SMEM_BYTES}")
    return out


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E K C"] | Mxfp4Tiles,
    groups: Groups,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
    tuning: Tuning | None = None,
) -> Float[Array, "R N"]:
    """See `grouped.grouped_matmul`. All static: the grid, the list of tiles, which ends where `tiles` says.

    Raises ValueError where the kernel cannot serve the shapes.
    """
    shape = Shape.of(x, weights, bias, gated)
    plan = launch(shape, tuning or default_tuning(shape))
    out: Array = _run(plan, x, weights, _tiles(plan, groups), bias)
    return out


def _tiles(plan: Launch, groups: Groups) -> Int[Array, "B 4"]:
    """Of each tile its expert, first row, and rows of its own: where they begin within the tile, and how many.

    The first entry holds the number of tiles. A tile never reaches past the last row of x: it begins earlier instead.
    Own rows are whole eights; those behind the group's last row are nobody's.
    """
    starts, sizes = groups
    rows = plan.tuning.rows
    per_expert = -(-sizes // rows)
    ends = jnp.cumsum(per_expert)
    index = jnp.arange(plan.most_tiles)
    expert = jnp.minimum((ends[None] <= index[:, None]).sum(axis=1, dtype=jnp.int32), plan.experts - 1)
    done = (index - (ends - per_expert)[expert]) * rows
    own_start = starts[expert] + done
    start = jnp.minimum(own_start, plan.rows - rows)
    own = jnp.minimum(rows, -(-(sizes[expert] - done) // ALIGN) * ALIGN)
    tiles = jnp.stack([expert, start, own_start - start, own], axis=1)
    count = jnp.zeros((1, 4), jnp.int32).at[0, 0].set(ends[-1])
    return jnp.concatenate([count, tiles]).astype(jnp.int32)


@partial(jax.jit, static_argnames="plan", inline=False)
def _run(
    plan: Launch,
    x: Float[Array, "R K"],
    weights: Float[Array, "E K C"] | Mxfp4Tiles,
    tiles: Int[Array, "B 4"],
    bias: Float[Array, "E C"] | None,
) -> Float[Array, "R N"]:
    """Jitted by itself, so that layers of one shape share one trace, hence one kernel."""
    run = mosaic.kernel(
        partial(kernel.body, plan),
        name="grouped_matmul",
        outputs=[((plan.rows, plan.outputs), plan.dtype)],
        grid={"block": min(plan.blocks, plan.most_tiles * plan.columns)},
        num_threads=plan.tuning.consumers + 1,
        scratch=kernel.scratch(plan),
    )
    operands = weights if isinstance(weights, Mxfp4Tiles) else (weights,)
    (out,) = run(x, tiles, *(() if bias is None else (bias,)), *operands)
    return out


def _check(
    x: Float[Array, "R K"], weights: Float[Array, "E K C"] | Mxfp4Tiles, bias: Float[Array, "E C"] | None
) -> None:
    if isinstance(weights, Mxfp4Tiles):
        if x.dtype != jnp.bfloat16:
            raise NoExpertKernel(f"implementation = 'mosaic' with weights of 4 bits needs bfloat16, not {x.dtype}")
        dtypes = {array.dtype for array in (x, bias) if array is not None}
    else:
        dtypes = {array.dtype for array in (x, weights, bias) if array is not None}
    if len(dtypes) > 1:
        raise NoExpertKernel(
            f"rows, weights and bias are {sorted(map(str, dtypes))}: implementation = 'mosaic' needs one"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NoExpertKernel(f"implementation = 'mosaic' needs bfloat16 or float16, not {x.dtype}")

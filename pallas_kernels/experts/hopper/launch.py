"""The static part of a launch of the Hopper grouped matmul: shapes, tuning, and the resources that they take.

The kernel multiplies transposed: weights are the left operand, of which a WGMMA takes 64 columns of the weights as its
rows, and rows of x are the right operand, 8 to 128 at a time. So with a few tokens per expert no part of the tensor
cores' work is empty, and one kernel serves decode and prefill.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts import eight_bits, int4_tiles, nvfp4_tiles
from pallas_kernels.experts.eight_bits import DEEP
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Tiling
from pallas_kernels.experts.mxfp4 import WORD_LINES
from pallas_kernels.experts.stacks import stack_of
from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_SMEM_BYTES, SMEM_ALIGN, SMEM_BYTES, SMS, WARPGROUP_ROWS

UNIT = WARPGROUP_ROWS  # columns of the weights per WGMMA, and inputs per turn of the main loop (a swizzled row)
FEW_ROWS = 16  # tiles of so many rows, or fewer, leave room for two thread blocks on a multiprocessor
BAND = 8
CLUSTER = "cluster"  # the axis of a cluster's thread blocks
_SHARED_ROWS = 48  # times parts, of weights with scales of blocks: sums that leave two thread blocks their registers
Held = Literal["plain", "rows", "mxfp4", "mxfp4_joined", "int8", "fp8", "fp8_blocks", "int4", "int4_wide", "nvfp4"]
_OF_8_BITS = ("int8", "fp8", "fp8_blocks")


@runtime_checkable
class OnHopper(Protocol):
    """What the kernel is told of weights, whose arrays have the experts on their first axis."""

    @property
    def held(self) -> str:
        """The form: one of `Held`."""
        ...

    @property
    def columns(self) -> int:
        """C."""
        ...


class OutputsFirst(NamedTuple):
    """Weights in the type of x, each output's inputs side by side: as an embedding lies that is the head too."""

    values: Float[Array | jax.ShapeDtypeStruct, "E C K"]

    @property
    def held(self) -> str:
        """Outputs are rows."""
        return "rows"

    @property
    def columns(self) -> int:
        """C."""
        return int(self.values.shape[1])


# Of shapes alone where no call is made.
HopperWeights = Float[Array | jax.ShapeDtypeStruct, "E K C"] | OnHopper


class Tuning(NamedTuple):
    """Parameters that may be chosen freely: every output is one sum over the inputs in order, whatever is chosen.

    Attributes:
        rows: rows of x per tile.
        consumers: warpgroups that compute, each with its own columns.
        parts: units of 64 columns per consumer. With a `Glu` it must be 2: gates and ups.
        stages: blocks of inputs in shared memory at once, two or more.
        depth: units of 64 inputs per turn of the main loop. More than 1 for weights of 8 or 4 bits only.
        band: blocks of columns that are multiplied with all tiles before the next band begins. The L2 cache holds
            their weights meanwhile.
        sms: multiprocessors. Each runs one or two thread blocks, which take tiles until none is left.
        cluster: thread blocks that multiply one tile of rows with neighbouring columns, and copy a part of its rows for
            each other: 1 or 2. More than 1 for weights of 8 or 4 bits only, but those of "mosaic" in MXFP4.
        shared: two thread blocks share a multiprocessor, so that twice as many warpgroups unpack. For the same weights
            in tiles of few rows, whose consumers need no registers of the producer.
    """

    rows: int
    consumers: int
    parts: int
    stages: int
    depth: int = 1
    band: int = BAND
    sms: int = SMS
    cluster: int = 1
    shared: bool = False


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        rows: rows of x.
        inputs: columns of x.
        outputs: columns of the result.
        gated: activation, if any.
        bias: whether there are biases.
        held: the form of the weights: in the type of x, inputs first or outputs first ("rows"), or in tiles of 4 or 8
            bits.
        wide: whether the result has float32 in place of the type of x.
    """

    rows: int
    experts: int
    inputs: int
    outputs: int
    dtype: jnp.dtype
    gated: Glu | None
    bias: bool
    held: Held
    wide: bool = field(default=False, kw_only=True)

    @classmethod
    def of(
        cls,
        x: Float[Array | jax.ShapeDtypeStruct, "R K"],
        weights: HopperWeights,
        bias: Float[Array, "E C"] | None,
        gated: Glu | None,
        *,
        wide: bool = False,
    ) -> "Shape":
        """Return the sizes of a call of `grouped_matmul`. Only shapes and types of the arrays are read.

        Raises NoExpertKernel if the kernel cannot serve them.
        """
        rows, inputs = x.shape
        stack = stack_of(weights)
        held: Held = stack.held
        first, *_ = jax.tree.leaves(stack)
        _check(x, held, first.dtype, bias)
        experts, outputs = first.shape[0], stack.columns if gated is None else stack.columns // 2
        for name, size in (("inputs", inputs), ("outputs", outputs)):
            if size % UNIT:
                raise NoExpertKernel(f"{size} {name}: implementation = 'mosaic' needs a multiple of {UNIT}")
        if held == "fp8_blocks" and inputs % DEEP:
            limit = f"implementation = 'mosaic' with scales of blocks needs a multiple of {DEEP}"
            raise NoExpertKernel(f"{inputs} inputs: {limit}")
        if rows % ALIGN:
            raise NoExpertKernel(f"{rows} rows: implementation = 'mosaic' needs a multiple of {ALIGN}")
        return cls(rows, experts, inputs, outputs, x.dtype, gated, bias is not None, held, wide=wide)

    @property
    def out_dtype(self) -> jnp.dtype:
        """Type of the result."""
        return jnp.dtype("float32") if self.wide else self.dtype

    @property
    def overlaps(self) -> bool:
        """Whether weights are widened while the product before them runs, from tiles that one copy brings whole."""
        return self.held in TILES


# Lines, numbers of a line, and their type, of tiles that one copy brings whole.
TILES: dict[Held, tuple[int, int, jnp.dtype]] = {
    "mxfp4_joined": (WORD_LINES + 1, UNIT, jnp.dtype("int16")),
    "int4": (int4_tiles.LINES, UNIT, jnp.dtype("int16")),
    "int4_wide": (int4_tiles.WIDE_LINES, UNIT, jnp.dtype("int16")),
    "nvfp4": (nvfp4_tiles.LINES, UNIT, jnp.dtype("int16")),
    "int8": (eight_bits.LINES, eight_bits.LINE, jnp.dtype("int8")),
    "fp8": (eight_bits.LINES, eight_bits.LINE, jnp.dtype("uint8")),
    "fp8_blocks": (eight_bits.LINES, eight_bits.LINE, jnp.dtype("uint8")),
}


@dataclass(frozen=True)
class Launch(Shape):
    """A shape and its tuning."""

    tuning: Tuning

    @classmethod
    def of_shape(cls, shape: Shape, tuning: Tuning) -> "Launch":
        """Return the shape with its tuning, whether they fit together or not; see `launch`."""
        return cls(**vars(shape), tuning=tuning)

    @property
    def width(self) -> int:
        """Columns of one copy of weights: 64 for each consumer."""
        return UNIT * self.tuning.consumers

    @property
    def step(self) -> int:
        """Outputs of a thread block at a time."""
        return self.width if self.gated is not None else self.width * self.tuning.parts

    @property
    def columns(self) -> int:
        """Blocks of outputs. The last one ends with the row, and overlaps its neighbour if the row is no multiple."""
        return -(-self.outputs // self.step)

    @property
    def column_groups(self) -> int:
        """Groups of neighbouring blocks of outputs, one block for each thread block of a cluster.

        If blocks are no multiple, the last one of the last group is computed twice, and written once.
        """
        return -(-self.columns // self.tuning.cluster)

    @property
    def out_parts(self) -> int:
        """Units of 64 outputs per consumer."""
        return 1 if self.gated is not None else self.tuning.parts

    @property
    def most_tiles(self) -> int:
        """The largest number of tiles that the rows can make, however they are shared out among experts."""
        return self.rows // self.tuning.rows + min(self.experts, self.rows // ALIGN)

    @property
    def tiling(self) -> Tiling:
        """How the list of tiles is made."""
        return Tiling(self.tuning.rows, self.most_tiles)

    @property
    def cluster_axis(self) -> str | None:
        """The axis of a cluster's thread blocks; None: a thread block is alone."""
        return CLUSTER if self.tuning.cluster > 1 else None

    @property
    def turns(self) -> int:
        """Turns of the main loop per tile."""
        return self.inputs // (UNIT * self.tuning.depth)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        rows, consumers, parts, stages, depth, *_ = self.tuning
        tiles = stages * parts * consumers * depth  # of 64 columns by 64 inputs
        weights: tuple[int, ...] = (tiles * UNIT * UNIT * 2,)
        if self.overlaps:
            lines, line, kind = TILES[self.held]
            weights = (tiles * lines * line * kind.itemsize,)
        elif self.held == "mxfp4":
            weights = tiles * UNIT * UNIT // 2, tiles * UNIT * 2
        staged = consumers * self.out_parts * rows * UNIT * self.out_dtype.itemsize
        arrays = stages * rows * UNIT * depth * 2, *weights, staged
        barriers = 2 * 8 * stages
        return sum(-(-int(size) // SMEM_ALIGN) * SMEM_ALIGN for size in arrays) + barriers

    @property
    def moves_registers(self) -> bool:
        """Whether the producer gives registers to the consumers: many rows take many sums, overlap two operands."""
        many = self.tuning.rows > FEW_ROWS or (self.overlaps and not self.tuning.shared)
        return self.tuning.consumers > 1 and many

    @property
    def blocks(self) -> int:
        """Thread blocks, each of which takes tiles until none is left: as many as the GPU runs at once."""
        two = not self.moves_registers and 2 * (self.smem_bytes + BLOCK_SMEM_BYTES) <= SM_SMEM_BYTES
        if self.held == "fp8_blocks":
            two = two and self.tuning.rows * self.tuning.parts <= _SHARED_ROWS
        return (2 if two else 1) * self.tuning.sms


def launch(shape: Shape, tuning: Tuning) -> Launch:
    """Return the shape with its tuning.

    Raises ValueError if they do not fit together, or need more shared memory than a thread block may use.
    """
    out = Launch.of_shape(shape, tuning)
    if tuning.depth > 1 and shape.held in ("plain", "rows"):
        raise ValueError(f"depth = {tuning.depth} must be 1, except for weights of 8 and 4 bits")
    if shape.held == "fp8_blocks" and tuning.depth != DEEP // UNIT:
        raise ValueError(f"depth = {tuning.depth} must be {DEEP // UNIT} for weights with scales of blocks")
    if shape.inputs // UNIT % tuning.depth:
        raise ValueError(f"depth = {tuning.depth} does not divide {shape.inputs} inputs into units of {UNIT}")
    if tuning.rows % ALIGN or tuning.rows > shape.rows:
        raise ValueError(f"tiles of {tuning.rows} rows do not fit {shape.rows} rows")
    if shape.wide and shape.rows % tuning.rows:
        raise ValueError(f"tiles of {tuning.rows} rows do not divide {shape.rows} rows, whose results have float32")
    # The law of progress in `ring`: a consumer waits for the next stage before it releases this one.
    if tuning.stages < 2:
        raise ValueError(f"stages = {tuning.stages} must be at least 2")
    _check_cluster(out)
    _check_shared(out)
    if shape.gated is not None and tuning.parts != 2:
        raise ValueError(f"parts = {tuning.parts} must be 2 for gates and ups")
    if out.step > shape.outputs:
        raise ValueError(f"{tuning} takes {out.step} outputs at a time, of {shape.outputs}")
    if out.smem_bytes > SMEM_BYTES:
        raise ValueError(f"{tuning} needs {out.smem_bytes} bytes of shared memory, of {SMEM_BYTES}")
    return out


def _check_shared(plan: Launch) -> None:
    """Raise ValueError if thread blocks should share a multiprocessor and cannot."""
    if plan.tuning.shared and not (plan.overlaps and plan.tuning.rows <= FEW_ROWS):
        limit = f"unpacked meanwhile, in tiles of at most {FEW_ROWS} rows"
        raise ValueError(f"shared = True must be False, except for weights that are {limit}")
    if plan.tuning.shared and plan.blocks == plan.tuning.sms:
        raise ValueError(f"shared = True: {plan.smem_bytes} bytes of shared memory do not fit twice")


def _check_cluster(plan: Launch) -> None:
    """Raise ValueError if thread blocks cannot share the copies of rows."""
    cluster = plan.tuning.cluster
    if cluster not in (1, 2):
        raise ValueError(f"cluster = {cluster} must be 1 or 2")
    if cluster == 1:
        return
    if not plan.overlaps:
        raise ValueError(f"cluster = {cluster} must be 1, except for weights that are unpacked meanwhile")
    # Each thread block copies its part of the rows in whole tiles of shared memory, which have eight.
    if plan.tuning.rows % (ALIGN * cluster):
        raise ValueError(f"cluster = {cluster} needs tiles of a multiple of {ALIGN * cluster} rows")
    if plan.columns < cluster:
        raise ValueError(f"cluster = {cluster} needs as many blocks of outputs, of which there are {plan.columns}")


def _check(
    x: Float[Array | jax.ShapeDtypeStruct, "R K"], held: Held, dtype: jnp.dtype, bias: Float[Array, "E C"] | None
) -> None:
    """Raise NoExpertKernel for types that the kernel does not take; `dtype` is that of the weights' first array."""
    dtypes = {array.dtype for array in (x, bias) if array is not None}
    if held in ("plain", "rows"):
        dtypes.add(dtype)
    elif x.dtype != jnp.bfloat16:
        bits = 8 if held in _OF_8_BITS else 4
        raise NoExpertKernel(f"implementation = 'mosaic' with weights of {bits} bits needs bfloat16, not {x.dtype}")
    if len(dtypes) > 1:
        raise NoExpertKernel(
            f"rows, weights and bias are {sorted(map(str, dtypes))}: implementation = 'mosaic' needs one"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NoExpertKernel(f"implementation = 'mosaic' needs bfloat16 or float16, not {x.dtype}")

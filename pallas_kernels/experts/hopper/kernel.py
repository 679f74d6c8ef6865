"""The Hopper grouped matmul, as one thread block runs it.

    tiles       A work tile is a tile of rows and a block of columns. Thread block b takes work tiles b, b + grid, ...;
                how many there are is read from memory, so the grid is the same however rows are shared out.
    producer    A warpgroup of its own copies TMA boxes of x and of each part's weights into a ring of stages. It runs
                ahead into the next work tile while the consumers finish this one.
    consumers   Each computes weightsᵀ * xᵀ for its own columns by WGMMA, both from shared memory, with sums in float32
                registers. A column of the weights is a row there, so biases are one number per row.
    epilogue    Bias and activation in registers; the result goes transposed into shared memory, and from there by TMA,
                eight rows at a time, and no rows of another tile. In float32 it stays as it is, and the array of
                results has columns first.

The ring follows the protocol of `pallas_kernels.ring`. Its turns go on from tile to tile; here of two turns per tile:

    producer  tile 0: copy 0   copy 1 | tile 1: wait consumed 0, copy 2      wait consumed 1, copy 3 | tile 2: ...
    WG0       wait ready 0, WGMMA 0   wait ready 1, WGMMA 1, release 0   release 1, epilogue | wait ready 2, WGMMA 2 ...
    WG1       the same for its own columns; the two never wait for each other

A WGMMA runs on while the next one is issued: a stage is released once the products of the next stage are under way.
Weights of 4 bits are unpacked in registers tile by tile, and their stage is released in the same turn. Tiles that one
copy brings whole, of 8 bits or of 4 with scales behind the words, are unpacked while the product before runs
(`overlap`). Scales of outputs are numbers per row too, as biases are; those of blocks are applied in the main loop.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.experts.glu import glu
from pallas_kernels.experts.groups import ALIGN
from pallas_kernels.experts.hopper.launch import CLUSTER, TILES, UNIT, Launch
from pallas_kernels.experts.hopper.mxfp4 import tile_operand
from pallas_kernels.experts.hopper.overlap import Loop
from pallas_kernels.experts.mxfp4 import SHIFT
from pallas_kernels.mosaic import Ref, Scalar, plgpu
from pallas_kernels.ring import Ring

_SWIZZLE = 128
_SCALED = "int8", "fp8", "fp8_blocks", "nvfp4"  # weights with an array of scales of outputs or blocks
_SHIFTED = "mxfp4", "mxfp4_joined", "nvfp4"  # weights whose tiles have numbers times 2^-SHIFT

Part = Scalar | int  # number of a consumer
Sums = list[Float[Array, "64 rows"]]  # of each part, columns of the weights by rows of x


class Shared(NamedTuple):
    """Shared memory and barriers: their types in the kernel's scratch, and references to them in its body.

    Attributes:
        x: stages of rows [stage, row, input].
        weights: stages of weights [stage, part, input, column], or [..., column, input] of "rows"; or of tiles [stage,
            part, consumer, tile, ...], or of their words and scales in two.
        staged: the output [consumer, part, row, column], or in float32 [consumer, part, column, row].
        ring: of the stages of both.
    """

    x: Ref
    weights: tuple[Ref, ...]
    staged: Ref
    ring: Ring


def scratch(plan: Launch) -> Shared:
    """Return the types of a thread block's shared memory and barriers."""
    rows, consumers, parts, stages, depth, *_ = plan.tuning
    weights: tuple[Any, ...]
    tiles = (stages, parts, consumers, depth)
    copies = parts
    if plan.overlaps:
        lines, line, kind = TILES[plan.held]
        weights = (plgpu.SMEM((*tiles, lines, line), kind),)
    elif plan.held == "mxfp4":
        copies = parts * 2 * consumers
        weights = plgpu.SMEM((*tiles, 4, 128), jnp.int32), plgpu.SMEM((*tiles, UNIT), jnp.int16)
    else:
        sides = (plan.width, UNIT) if plan.held == "rows" else (UNIT, plan.width)
        weights = (mosaic.tiled((stages, parts, *sides), plan.dtype, _SWIZZLE),)
    staged = mosaic.tiled((consumers, plan.out_parts, rows, UNIT), plan.dtype, _SWIZZLE)
    return Shared(
        x=mosaic.tiled((stages, rows, UNIT * depth), plan.dtype, _SWIZZLE),
        weights=weights,
        staged=plgpu.SMEM((consumers, plan.out_parts, UNIT, rows), plan.out_dtype) if plan.wide else staged,
        ring=Ring.scratch(stages, 1 + copies, consumers=consumers, cluster=plan.cluster_axis),
    )


@dataclass(frozen=True)
class _Refs:
    """Global memory of the call, and the thread block's shared memory.

    Attributes:
        tiles: see `groups.list_tiles`.
        weights: one array, or words and scales in two.
        scales: of the outputs of weights of 8 bits or in NVFP4, or of blocks.
    """

    x: Ref
    tiles: Ref
    bias: Ref | None
    weights: tuple[Ref, ...]
    scales: Ref | None
    out: Ref
    shared: Shared

    @classmethod
    def of(cls, plan: Launch, arrays: tuple[Ref, ...], shared: Shared) -> "_Refs":
        """Name the kernel's operands and output."""
        x, tiles, *left, out = arrays
        bias = left.pop(0) if plan.bias else None
        scales = left.pop() if plan.held in _SCALED else None
        return cls(x=x, tiles=tiles, bias=bias, weights=tuple(left), scales=scales, out=out, shared=shared)


@dataclass(frozen=True)
class _WorkTile:
    """A tile of rows (see `groups.list_tiles`) and a block of columns.

    Attributes:
        first: first column of the result.
        own_first: first column to be written; those before it are another work tile's.
    """

    expert: Scalar
    start: Scalar
    own_start: Scalar
    own: Scalar
    first: Scalar
    own_first: Scalar


@dataclass(frozen=True)
class _Scheduler:
    """The work tiles of a thread block: their number, and how to find them.

    With clusters, "block" counts these: they take one tile of rows at a time, and each thread block its own columns.

    Attributes:
        tiles: tiles of rows in all.
        count: work tiles of this thread block.
    """

    plan: Launch
    refs: _Refs
    tiles: Scalar
    count: Scalar

    @classmethod
    def of(cls, plan: Launch, refs: _Refs) -> "_Scheduler":
        """Read the number of tiles, and take this thread block's share."""
        tiles = refs.tiles[0, 0]
        blocks = lax.axis_size("block")
        work_tiles = tiles * plan.column_groups - lax.axis_index("block")
        return cls(plan, refs, tiles, jnp.maximum(lax.div(work_tiles + (blocks - 1), blocks), 0))

    @property
    def turns(self) -> Scalar:
        """Turns of the ring, of all work tiles together."""
        return self.count * self.plan.turns

    def work_tile(self, index: Scalar) -> _WorkTile:
        """Return one of this thread block's work tiles.

        Within a band of columns come all columns of a tile of rows, then those of the next tile.
        """
        plan, cluster = self.plan, self.plan.tuning.cluster
        band = max(1, min(plan.tuning.band // cluster, plan.column_groups))
        number = lax.axis_index("block") + index * lax.axis_size("block")
        before = lax.div(number, self.tiles * band)
        number = number - before * self.tiles * band
        width = jnp.minimum(band, plan.column_groups - before * band)
        tile, column = lax.div(number, width), before * band + lax.rem(number, width)
        column = column if cluster == 1 else column * cluster + lax.axis_index(CLUSTER)
        expert, start, own_start, own = (self.refs.tiles[1 + tile, field] for field in range(4))
        own_first = column * plan.step
        first = pl.multiple_of(jnp.minimum(own_first, plan.outputs - plan.step), UNIT)
        return _WorkTile(expert, _eights(start), _eights(own_start), own, first, own_first)


def _eights(row: Scalar) -> Scalar:
    """Tell the compiler that a row is a multiple of 8."""
    out: Scalar = pl.multiple_of(row, ALIGN)
    return out


def body(plan: Launch, *arrays: Ref, shared: Shared) -> None:
    """Run a thread block: give each warpgroup its role, and its registers."""
    scheduler = _Scheduler.of(plan, _Refs.of(plan, arrays, shared))
    thread = lax.axis_index("thread")
    consumers = plan.tuning.consumers

    @pl.when(thread < consumers)
    def _consumer() -> None:
        if plan.moves_registers:  # three warpgroups have 168 registers per thread each to share
            plgpu.set_max_registers(232, action="increase")
        _consume(scheduler, thread if consumers > 1 else 0)

    @pl.when(thread == consumers)
    def _producer() -> None:
        if plan.moves_registers:
            plgpu.set_max_registers(40, action="decrease")
        lax.fori_loop(0, scheduler.count, lambda index, _: _produce(scheduler, index), None)


def _produce(scheduler: _Scheduler, index: Scalar) -> None:
    """Fill stages with the inputs of one work tile as they become free."""
    plan, refs = scheduler.plan, scheduler.refs
    ring, inputs = refs.shared.ring, UNIT * plan.tuning.depth
    tile = scheduler.work_tile(index)
    copy = _copy_tiles if plan.overlaps else _copy_packed if plan.held == "mxfp4" else _copy_weights

    def step(number: Scalar, _: None) -> None:
        turn = index * plan.turns + number
        ring.producer_acquire(turn)
        depth = pl.ds(pl.multiple_of(number * inputs, inputs), inputs)
        source = refs.x.at[pl.ds(tile.start, plan.tuning.rows), depth]
        target = refs.shared.x.at[ring.stage(turn)]
        plgpu.copy_gmem_to_smem(source, target, ring.producer_barrier(turn), collective_axes=plan.cluster_axis)
        for part in range(plan.tuning.parts):
            copy(plan, refs, tile, number, turn, part)

    lax.fori_loop(0, plan.turns, step, None)


def _copy_weights(plan: Launch, refs: _Refs, tile: _WorkTile, number: Scalar, turn: Scalar, part: int) -> None:
    """Start the copy of one part's weights of block `number` of the inputs."""
    depth = pl.ds(pl.multiple_of(number * UNIT, UNIT), UNIT)
    columns = pl.ds(pl.multiple_of(tile.first + part * _part_stride(plan), UNIT), plan.width)
    ring, (target,), (weights,) = refs.shared.ring, refs.shared.weights, refs.weights
    source = weights.at[(tile.expert, columns, depth) if plan.held == "rows" else (tile.expert, depth, columns)]
    plgpu.copy_gmem_to_smem(source, target.at[ring.stage(turn), part], ring.producer_barrier(turn))


def _copy_packed(plan: Launch, refs: _Refs, tile: _WorkTile, number: Scalar, turn: Scalar, part: int) -> None:
    """Start the copies of one part's words and scales. The tiles of a consumer are contiguous along the inputs."""
    ring, along = refs.shared.ring, pl.ds(number * plan.tuning.depth, plan.tuning.depth)
    for consumer in range(plan.tuning.consumers):
        across = lax.div(tile.first + part * _part_stride(plan), UNIT) + consumer
        for weights, stages in zip(refs.weights, refs.shared.weights, strict=True):
            source, target = weights.at[tile.expert, across, along], stages.at[ring.stage(turn), part, consumer]
            plgpu.copy_gmem_to_smem(source, target, ring.producer_barrier(turn))


def _copy_tiles(plan: Launch, refs: _Refs, tile: _WorkTile, number: Scalar, turn: Scalar, part: int) -> None:
    """Start the copy of one part's tiles, of all consumers and units of inputs at once."""
    ring, tuning, (target,), (weights,) = refs.shared.ring, plan.tuning, refs.shared.weights, refs.weights
    across = lax.div(tile.first + part * _part_stride(plan), UNIT)
    source = weights.at[tile.expert, pl.ds(across, tuning.consumers), pl.ds(number * tuning.depth, tuning.depth)]
    plgpu.copy_gmem_to_smem(source, target.at[ring.stage(turn), part], ring.producer_barrier(turn))


def _part_stride(plan: Launch) -> int:
    """Return the columns from one part to the next: gates and ups lie half a row apart, other parts side by side."""
    return plan.outputs if plan.gated is not None else plan.width


def _consume(scheduler: _Scheduler, part: Part) -> None:
    """Run one consumer: its columns of all work tiles."""
    plan = scheduler.plan

    def step(index: Scalar, _: None) -> None:
        tile = scheduler.work_tile(index)
        if plan.overlaps:
            sums = _overlapping(scheduler, index, part, tile).run()
        elif plan.held == "mxfp4":
            sums = _mainloop_packed(scheduler, index, part)
        else:
            accumulators = [plgpu.ACC((UNIT, plan.tuning.rows), jnp.float32)] * plan.tuning.parts
            sums = pl.run_scoped(lambda *totals: _mainloop(scheduler, index, part, totals), *accumulators)
        _epilogue(plan, scheduler.refs, tile, part, sums)

    lax.fori_loop(0, scheduler.count, step, None)
    plgpu.wait_smem_to_gmem(0)


def _overlapping(scheduler: _Scheduler, index: Scalar, part: Part, tile: _WorkTile) -> Loop:
    """Return the main loop of one work tile that unpacks weights while it multiplies."""
    plan, refs = scheduler.plan, scheduler.refs

    def scale(which: int, block: Scalar) -> Float[Array, ""]:
        assert refs.scales is not None
        across = lax.div(tile.first + which * _part_stride(plan), UNIT) + part
        out: Array = refs.scales[tile.expert, across, block]
        return out

    shared = refs.shared
    return Loop(plan, shared.ring, shared.x, shared.weights[0], part, index * plan.turns, scheduler.turns, scale)


def _mainloop(scheduler: _Scheduler, index: Scalar, part: Part, totals: tuple[Ref, ...]) -> Sums:
    """Return the products of one work tile. A stage is released once the products of the next are under way."""
    plan, shared = scheduler.plan, scheduler.refs.shared
    ring, (weights,) = shared.ring, shared.weights

    def step(number: Scalar, _: None) -> None:
        turn = index * plan.turns + number
        ring.consumer_wait(turn)
        stage = ring.stage(turn)
        for which, total in enumerate(totals):
            own = weights.at[stage, which]
            left = own.at[_columns(part)] if plan.held == "rows" else own.at[:, _columns(part)].T
            plgpu.wgmma(total, left, shared.x.at[stage].T)
        plgpu.wgmma_wait(len(totals))
        pl.when(number > 0)(lambda: ring.consumer_release(turn - 1, scheduler.turns))

    lax.fori_loop(0, plan.turns, step, None)
    sums = [total[...] for total in totals]
    ring.consumer_release((index + 1) * plan.turns - 1, scheduler.turns)
    return sums


def _mainloop_packed(scheduler: _Scheduler, index: Scalar, part: Part) -> Sums:
    """Return the products of one work tile with weights of 4 bits, unpacked into registers tile by tile."""
    plan, shared = scheduler.plan, scheduler.refs.shared
    ring, (words, scales) = shared.ring, shared.weights

    def step(number: Scalar, sums: Sums) -> Sums:
        turn = index * plan.turns + number
        ring.consumer_wait(turn)
        stage = ring.stage(turn)
        for deep in range(plan.tuning.depth):
            rows = shared.x.at[stage, :, pl.ds(deep * UNIT, UNIT)].T
            for which, total in enumerate(sums):
                at = stage, which, part, deep
                sums[which] = mosaic.accumulate(total, tile_operand(words.at[at], scales.at[at]), rows)
        ring.consumer_release(turn, scheduler.turns)
        return sums

    zeros = [mosaic.full((UNIT, plan.tuning.rows), 0.0) for _ in range(plan.tuning.parts)]
    sums: Sums = lax.fori_loop(0, plan.turns, step, zeros)
    return sums


def _columns(part: Part, first: Scalar | int = 0) -> Any:
    """Return the consumer's columns of those that begin at `first`."""
    start = first + part * UNIT
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, UNIT), UNIT)


def _epilogue(plan: Launch, refs: _Refs, tile: _WorkTile, part: Part, sums: Sums) -> None:
    """Apply scales, bias and activation, and write the tile's own rows once the last tile's have left shared memory."""
    results = _bias_and_activation(plan, refs, tile, part, _scaled(plan, refs, tile, part, sums))
    staged = refs.shared.staged
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for which, result in enumerate(results):
        own = staged.at[part, which] if plan.wide else staged.at[part, which].T
        own[...] = result.astype(plan.out_dtype)
    plgpu.commit_smem()
    if plan.wide:
        _write_wide(plan, refs, tile, part)
        return

    for which in range(len(results)):
        first = pl.multiple_of(tile.first + part * UNIT + which * plan.width, UNIT)

        @pl.loop(0, jnp.where(first >= tile.own_first, lax.div(tile.own, ALIGN), 0))
        def _eight(index: Scalar, which: int = which, first: Scalar = first) -> None:
            row = _eights(tile.own_start + index * ALIGN)
            source = staged.at[part, which, pl.ds(row, ALIGN)]
            out = refs.out.at[pl.ds(_eights(tile.start + row), ALIGN), pl.ds(first, UNIT)]
            plgpu.copy_smem_to_gmem(source, out)


def _write_wide(plan: Launch, refs: _Refs, tile: _WorkTile, part: Part) -> None:
    """Write a tile's results in float32, columns first. No row belongs to another tile."""
    for which in range(plan.out_parts):
        first = pl.multiple_of(tile.first + part * UNIT + which * plan.width, UNIT)

        @pl.when(first >= tile.own_first)
        def _part(which: int = which, first: Scalar = first) -> None:
            rows = pl.ds(_eights(tile.start), plan.tuning.rows)
            plgpu.copy_smem_to_gmem(refs.shared.staged.at[part, which], refs.out.at[pl.ds(first, UNIT), rows])


def _scaled(plan: Launch, refs: _Refs, tile: _WorkTile, part: Part, sums: Sums) -> Sums:
    """Return the sums of the weights themselves, if those of tiles are smaller or have scales."""
    if plan.held in _SHIFTED:
        sums = [total * 2.0**SHIFT for total in sums]
    if refs.scales is None or plan.held == "fp8_blocks":
        return sums
    return [total * _per_column(plan, refs.scales, tile, part, which) for which, total in enumerate(sums)]


def _per_column(plan: Launch, source: Ref, tile: _WorkTile, part: Part, which: int) -> Float[Array, "64 rows"]:
    """Load a number per column of the expert's weights, those of a part, and repeat it along the rows of x."""
    columns = _columns(part, tile.first + which * _part_stride(plan))
    held = plgpu.load(source.at[tile.expert, columns], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return mosaic.rows_to_columns(held.astype(jnp.float32), plan.tuning.rows)


def _bias_and_activation(plan: Launch, refs: _Refs, tile: _WorkTile, part: Part, sums: Sums) -> Sums:
    """Return the outputs of the sums: as many as parts, or one of gates and ups."""
    if refs.bias is not None:
        for which, total in enumerate(sums):
            sums[which] = total + _per_column(plan, refs.bias, tile, part, which)
    return sums if plan.gated is None else [glu(plan.gated, *sums, in_kernel=True)]

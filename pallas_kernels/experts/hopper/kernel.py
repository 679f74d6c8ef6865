"""The kernel of `mosaic`, as one thread block runs it.

items       (tile of rows, block of columns), taken by turns: block b has items b, b + grid, ...; their number is
            read from memory, so the grid is the same whatever the experts got
loader      a warpgroup of its own: TMA boxes of x and of each part's weights, ring of stages, running ahead into
            the next item while this one is being finished
computing   weightsᵀ · xᵀ by WGMMA, both from shared memory; sums in float32 registers, one column of the weights
            per row, so that biases are numbers per row
end         bias and activation in registers; stored transposed into shared memory, from there by TMA, eight rows
            at a time and none that belong to another tile
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.experts.glu import glu
from pallas_kernels.experts.groups import ALIGN
from pallas_kernels.experts.hopper.mxfp4 import tile_operand
from pallas_kernels.experts.mxfp4 import SHIFT
from pallas_kernels.mosaic import Ref, plgpu

if TYPE_CHECKING:
    from pallas_kernels.experts.hopper.plan import Launch

_UNIT = 64  # columns of the weights per WGMMA, and inputs per turn
_SWIZZLE = 128

Scalar = Int[Array, ""]


class _Refs(NamedTuple):
    """Global memory, shared memory and barriers of a thread block.

    Attributes:
        weights: one array, or words and scales.
        rows, parts: stages of x and of the weights.
        filled: a stage has arrived.
        free: a stage has been used.
    """

    x: Ref
    tiles: Ref
    bias: Ref | None
    weights: tuple[Ref, ...]
    out: Ref
    rows: Ref
    parts: tuple[Ref, ...]
    staged: Ref
    filled: Ref
    free: Ref


def _name(plan: "Launch", refs: tuple[Ref, ...]) -> _Refs:
    left = list(refs)
    arrays = 2 if plan.packed else 1

    def take(count: int) -> tuple[Ref, ...]:
        taken = tuple(left[:count])
        del left[:count]
        return taken

    x, tiles = take(2)
    (bias,) = take(1) if plan.bias else (None,)
    weights = take(arrays)
    out, rows = take(2)
    return _Refs._make((x, tiles, bias, weights, out, rows, take(arrays), *left))


def scratch(plan: "Launch") -> list[Any]:
    """Shared memory and barriers, in the order of `_Refs`."""
    rows, consumers, parts, stages, depth, *_ = plan.tuning
    if plan.packed:
        tiles = (stages, parts, consumers, depth)
        weights = [plgpu.SMEM((*tiles, 4, 128), jnp.int32), plgpu.SMEM((*tiles, _UNIT), jnp.int16)]
    else:
        weights = [mosaic.tiled((stages, parts, _UNIT, plan.width), plan.dtype, _SWIZZLE)]
    return [
        mosaic.tiled((stages, rows, _UNIT * depth), plan.dtype, _SWIZZLE),
        *weights,
        mosaic.tiled((consumers, plan.out_parts, rows, _UNIT), plan.dtype, _SWIZZLE),
        plgpu.Barrier(num_arrivals=1 + parts * (2 * consumers if plan.packed else 1), num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    ]


@dataclass(frozen=True)
class _Work:
    """The items of a thread block: their number, and how to find them."""

    plan: "Launch"
    refs: _Refs
    tiles: Scalar
    count: Scalar

    @property
    def turns(self) -> Scalar:
        """Turns of the loop over inputs, of all items together."""
        return self.count * self.plan.turns

    def item(self, index: Scalar) -> "_Item":
        """The thread block's item of that index: within a band of columns, all columns of a tile, then the next."""
        plan, band = self.plan, min(self.plan.tuning.band, self.plan.columns)
        place = lax.axis_index("block") + index * lax.axis_size("block")
        before = lax.div(place, self.tiles * band)
        place = place - before * self.tiles * band
        width = jnp.minimum(band, plan.columns - before * band)
        tile, column = lax.div(place, width), before * band + lax.rem(place, width)
        expert, start, own_start, own = (self.refs.tiles[1 + tile, field] for field in range(4))
        own_first = column * plan.step
        first = pl.multiple_of(jnp.minimum(own_first, plan.outputs - plan.step), _UNIT)
        return _Item(expert, _eights(start), _eights(own_start), own, first, own_first)


@dataclass(frozen=True)
class _Item:
    """See `mosaic._tiles`; `first` is the first column of the result, `own_first` the first to be written."""

    expert: Scalar
    start: Scalar
    own_start: Scalar
    own: Scalar
    first: Scalar
    own_first: Scalar


def _eights(row: Scalar) -> Scalar:
    out: Scalar = pl.multiple_of(row, ALIGN)
    return out


def body(plan: "Launch", *all_refs: Ref) -> None:
    refs = _name(plan, all_refs)
    tiles = refs.tiles[0, 0]
    blocks = lax.axis_size("block")
    items = tiles * plan.columns - lax.axis_index("block")
    work = _Work(plan, refs, tiles, jnp.maximum(lax.div(items + (blocks - 1), blocks), 0))
    thread = lax.axis_index("thread")
    consumers = plan.tuning.consumers

    @pl.when(thread < consumers)
    def _computer() -> None:
        if plan.moves_registers:  # three warpgroups share the registers: 168 each, unless one gives some away
            plgpu.set_max_registers(232, action="increase")
        _compute(work, thread if consumers > 1 else 0)

    @pl.when(thread == consumers)
    def _loader() -> None:
        if plan.moves_registers:
            plgpu.set_max_registers(40, action="decrease")
        lax.fori_loop(0, work.count, lambda index, _: _load(work, index), None)


def _load(work: _Work, index: Scalar) -> None:
    """Fill stages with one item's inputs as they become free."""
    plan, refs = work.plan, work.refs
    stages, inputs = plan.tuning.stages, _UNIT * plan.tuning.depth
    item = work.item(index)

    def turn(step: Scalar, _: None) -> None:
        done = index * plan.turns + step
        stage = lax.rem(done, stages)
        pl.when(done >= stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))
        depth = pl.ds(pl.multiple_of(step * inputs, inputs), inputs)
        source = refs.x.at[pl.ds(item.start, plan.tuning.rows), depth]
        plgpu.copy_gmem_to_smem(source, refs.rows.at[stage], refs.filled.at[stage])
        for part in range(plan.tuning.parts):
            (_load_tiles if plan.packed else _load_weights)(work, item, step, stage, part)

    lax.fori_loop(0, plan.turns, turn, None)


def _load_weights(work: _Work, item: _Item, step: Scalar, stage: Scalar, part: int) -> None:
    plan, refs = work.plan, work.refs
    depth = pl.ds(pl.multiple_of(step * _UNIT, _UNIT), _UNIT)
    columns = pl.ds(pl.multiple_of(item.first + part * _apart(plan), _UNIT), plan.width)
    source = refs.weights[0].at[item.expert, depth, columns]
    plgpu.copy_gmem_to_smem(source, refs.parts[0].at[stage, part], refs.filled.at[stage])


def _load_tiles(work: _Work, item: _Item, step: Scalar, stage: Scalar, part: int) -> None:
    """Each warpgroup's tiles lie together, one behind the other along the inputs."""
    plan, refs = work.plan, work.refs
    along = pl.ds(step * plan.tuning.depth, plan.tuning.depth)
    for consumer in range(plan.tuning.consumers):
        across = lax.div(item.first + part * _apart(plan), _UNIT) + consumer
        for source, target in zip(refs.weights, refs.parts, strict=True):
            tiles = source.at[item.expert, across, along]
            plgpu.copy_gmem_to_smem(tiles, target.at[stage, part, consumer], refs.filled.at[stage])


def _apart(plan: "Launch") -> int:
    """Columns from one part to the next: gates and ups lie half a row apart, other parts side by side."""
    return plan.outputs if plan.gated is not None else plan.width


def _compute(work: _Work, part: Scalar | int) -> None:
    """One computing warpgroup: its columns of all items."""
    plan = work.plan

    def one(index: Scalar, _: None) -> None:
        item = work.item(index)
        if plan.packed:
            sums = _sum_tiles(work, index, part)
        else:
            accumulators = [plgpu.ACC((_UNIT, plan.tuning.rows), jnp.float32)] * plan.tuning.parts
            sums = pl.run_scoped(lambda *totals: _sum(work, index, part, totals), *accumulators)
        _store(work, item, part, _finish(work, item, part, sums))

    lax.fori_loop(0, work.count, one, None)
    plgpu.wait_smem_to_gmem(0)


def _release(work: _Work, done: Scalar) -> None:
    """The stage of a turn may be filled again, if there is something left to fill it with."""
    stages = work.plan.tuning.stages
    plgpu.barrier_arrive(work.refs.free.at[lax.rem(done, stages)], predicate=done + stages < work.turns)


def _sum(work: _Work, index: Scalar, part: Scalar | int, totals: tuple[Ref, ...]) -> list[Float[Array, "64 rows"]]:
    """The products of one item. A stage is free once the next one's are under way."""
    plan, refs = work.plan, work.refs
    (parts,) = refs.parts

    def turn(step: Scalar, _: None) -> None:
        done = index * plan.turns + step
        stage = lax.rem(done, plan.tuning.stages)
        plgpu.barrier_wait(refs.filled.at[stage])
        for number, total in enumerate(totals):
            plgpu.wgmma(total, parts.at[stage, number, :, _own(part)].T, refs.rows.at[stage].T)
        plgpu.wgmma_wait(len(totals))
        pl.when(step > 0)(lambda: _release(work, done - 1))

    lax.fori_loop(0, plan.turns, turn, None)
    sums = [total[...] for total in totals]
    _release(work, (index + 1) * plan.turns - 1)
    return sums


def _sum_tiles(work: _Work, index: Scalar, part: Scalar | int) -> list[Float[Array, "64 rows"]]:
    """The same of weights of 4 bits, unpacked into registers tile by tile."""
    plan, refs = work.plan, work.refs
    words, scales = refs.parts

    def turn(step: Scalar, sums: list[Float[Array, "64 rows"]]) -> list[Float[Array, "64 rows"]]:
        done = index * plan.turns + step
        stage = lax.rem(done, plan.tuning.stages)
        plgpu.barrier_wait(refs.filled.at[stage])
        for deep in range(plan.tuning.depth):
            rows = refs.rows.at[stage, :, pl.ds(deep * _UNIT, _UNIT)].T
            for number, total in enumerate(sums):
                at = stage, number, part, deep
                sums[number] = mosaic.accumulate(total, tile_operand(words.at[at], scales.at[at]), rows)
        _release(work, done)
        return sums

    zeros = [mosaic.full((_UNIT, plan.tuning.rows), 0.0) for _ in range(plan.tuning.parts)]
    sums: list[Float[Array, "64 rows"]] = lax.fori_loop(0, plan.turns, turn, zeros)
    return [total * 2.0**SHIFT for total in sums]


def _own(part: Scalar | int, first: Scalar | int = 0) -> Any:
    """The warpgroup's columns of those that begin at `first`."""
    start = first + part * _UNIT
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, _UNIT), _UNIT)


def _finish(
    work: _Work, item: _Item, part: Scalar | int, sums: list[Float[Array, "64 rows"]]
) -> list[Float[Array, "64 rows"]]:
    """Bias and activation."""
    plan, refs = work.plan, work.refs
    apart = _apart(plan)
    if refs.bias is not None:
        for number, total in enumerate(sums):
            columns = _own(part, item.first + number * apart)
            bias = plgpu.load(refs.bias.at[item.expert, columns], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            sums[number] = total + mosaic.rows_to_columns(bias.astype(jnp.float32), plan.tuning.rows)
    return sums if plan.gated is None else [glu(plan.gated, *sums)]


def _store(work: _Work, item: _Item, part: Scalar | int, results: list[Float[Array, "64 rows"]]) -> None:
    """Write the tile's own rows, once the former item's have left shared memory."""
    plan, refs = work.plan, work.refs
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, result in enumerate(results):
        refs.staged.at[part, number].T[...] = result.astype(plan.dtype)
    plgpu.commit_smem()

    for number in range(len(results)):
        first = pl.multiple_of(item.first + part * _UNIT + number * plan.width, _UNIT)

        @pl.loop(0, jnp.where(first >= item.own_first, lax.div(item.own, ALIGN), 0))
        def _eight(index: Scalar, number: int = number, first: Scalar = first) -> None:
            row = _eights(item.own_start + index * ALIGN)
            source = refs.staged.at[part, number, pl.ds(row, ALIGN)]
            out = refs.out.at[pl.ds(_eights(item.start + row), ALIGN), pl.ds(first, _UNIT)]
            plgpu.copy_smem_to_gmem(source, out)

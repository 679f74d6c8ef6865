"""The main loop that unpacks weights of 8 or 4 bits while the tensor cores multiply those before them.

With two parts and a depth of one, for one consumer:

    registers      unpack 0,0 | unpack 0,1 | wait 0,0, wait ready 1, unpack 1,0 | wait 0,1, release 0 | unpack 1,1 | ...
    tensor cores              | 0,0        | 0,1                                |                     | 1,0        | ...

A product reads the registers of its left operand until it is waited for, and meanwhile the next operand is unpacked
into others. The one before is waited for first: its registers may be those. (With a single product a turn there are no
others, so that nothing overlaps.) No product runs from one turn into the next: ptxas would let every
product wait for the one before it if operands in registers were under way at the end of a loop's body (C7513). Only
the unpacked operand goes on to the next turn; ptxas loads its words before it waits for all, and puts most of the
arithmetic behind that wait, where the tensor cores have the other warpgroup's products.

Where weights have a scale per block, a turn is the inputs of a block. It has accumulators of its own, whose sums are
scaled and added to those of the turns before, so that no weight is rounded.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.experts.hopper import eight_bits, int4, nvfp4
from pallas_kernels.experts.hopper.launch import UNIT, Launch
from pallas_kernels.experts.hopper.mxfp4 import joined_operand
from pallas_kernels.interpreter import interpreting
from pallas_kernels.mosaic import Ref, Scalar, plgpu
from pallas_kernels.ring import Ring, Turn

Sums = list[Float[Array, "64 rows"]]
Operand = Float[Array, "64 64"]
Scales = list[Float[Array, ""]]


class Loop(NamedTuple):
    """The main loop of one consumer and one work tile.

    Attributes:
        x: stages of rows [stage, row, input].
        tiles: stages of weights [stage, part, consumer, unit, line, number]; see `plan.TILES`.
        consumer: its number.
        first: the ring's turn at which the work tile begins.
        end: turns of the ring in all.
        scale: the scale of a part's weights in the block of a turn, if weights have scales of blocks.
    """

    plan: Launch
    ring: Ring
    x: Ref
    tiles: Ref
    consumer: Scalar | int
    first: Scalar
    end: Scalar
    scale: Callable[[int, Scalar], Float[Array, ""]]

    def run(self) -> Sums:
        """Return the sums of each part, without scales of outputs, and of MXFP4 and NVFP4 times 2^-SHIFT."""
        return self._blocks() if self.plan.held == "fp8_blocks" else self._scoped(self._turns)

    def _scoped[T](self, body: Callable[["Compiled | Interpreted"], T]) -> T:
        """Run `body` with new accumulators, which are zeros."""
        shape, parts = (UNIT, self.plan.tuning.rows), self.plan.tuning.parts
        if interpreting():
            return body(Interpreted([jnp.zeros(shape, jnp.float32)] * parts))
        out: T = pl.run_scoped(lambda *totals: body(Compiled(totals)), *[plgpu.ACC(shape, jnp.float32)] * parts)
        return out

    def _blocks(self) -> Sums:
        """Return the sums of all turns, each scaled by itself."""
        zeros = [mosaic.full((UNIT, self.plan.tuning.rows), 0.0) for _ in range(self.plan.tuning.parts)]
        self.ring.consumer_wait(self.first)
        carry = zeros, self._operand(jnp.int32(0), 0, 0), self._scales(jnp.int32(0))
        last = self.plan.turns - 1
        carry = lax.fori_loop(0, last, lambda number, carry: self._block(number, carry, more=True), carry)
        return self._block(jnp.int32(last), carry, more=False)[0]

    def _block(
        self, number: Scalar, carry: tuple[Sums, Operand, Scales], *, more: bool
    ) -> tuple[Sums, Operand, Scales]:
        """Multiply one stage into new accumulators, and add their scaled sums."""
        totals, operand, scales = carry
        # A turn ahead: ptxas loads them just before they are needed, if they are needed in this one.
        coming = self._scales(number + 1) if more else scales

        def multiply(products: "Compiled | Interpreted") -> tuple[Sums, Operand]:
            _, following = self._turn(products, number, (products.carry, operand), more=more)
            return products.sums(), following

        sums, operand = self._scoped(multiply)
        totals = [total + own * scale for total, own, scale in zip(totals, sums, scales, strict=True)]
        return totals, operand, coming

    def _scales(self, number: Scalar) -> Scales:
        return [self.scale(part, number) for part in range(self.plan.tuning.parts)]

    def _turns(self, products: "Compiled | Interpreted") -> Sums:
        self.ring.consumer_wait(self.first)
        carry = products.carry, self._operand(jnp.int32(0), 0, 0)
        last = self.plan.turns - 1
        carry = lax.fori_loop(0, last, lambda number, carry: self._turn(products, number, carry, more=True), carry)
        self._turn(products, jnp.int32(last), carry, more=False)
        return products.sums()

    def _turn(
        self, products: "Compiled | Interpreted", number: Scalar, carry: tuple[Sums, Operand], *, more: bool
    ) -> tuple[Sums, Operand]:
        """Multiply one stage. `more`: unpack the first operand of the next stage, too."""
        products.carry, operand = carry
        items = [(deep, part) for deep in range(self.plan.tuning.depth) for part in range(self.plan.tuning.parts)]
        for (deep, part), following in zip(items, [*items[1:], None], strict=True):
            products.issue(part, operand, self.x.at[self._stage(number), :, pl.ds(deep * UNIT, UNIT)].T)
            products.wait(1 if len(items) > 1 else 0)
            if following is not None:
                operand = self._operand(number, *following)
            elif more:
                self.ring.consumer_wait(self.first + number + 1)
                operand = self._operand(number + 1, *items[0])
        products.wait(0)
        if self.plan.tuning.cluster > 1:
            plgpu.commit_smem()  # all warps have read the stage: one thread arrives for them at both thread blocks
        self.ring.consumer_release(self.first + number, self.end)
        return products.carry, operand

    def _stage(self, number: Scalar) -> Turn:
        return self.ring.stage(self.first + number)

    def _operand(self, number: Scalar, deep: int, part: int) -> Operand:
        tile = self.tiles.at[self._stage(number), part, self.consumer, deep]
        kind = self.plan.held
        if kind in ("int8", "fp8", "fp8_blocks"):
            return eight_bits.tile_operand(tile, "int8" if kind == "int8" else "fp8")
        if kind == "nvfp4":
            return nvfp4.tile_operand(tile)
        return joined_operand(tile) if kind == "mxfp4_joined" else int4.tile_operand(tile)


class Compiled:
    """Products that run while the warpgroup goes on, with sums in registers."""

    carry: Sums

    def __init__(self, totals: tuple[Ref, ...]) -> None:
        self.totals, self.carry = totals, []

    def issue(self, part: int, left: Operand, rows: Ref) -> None:
        """Begin to add left · rows to the sum of a part."""
        plgpu.wgmma(self.totals[part], left, rows)

    def wait(self, count: int) -> None:
        """Wait until no more than `count` products are under way."""
        plgpu.wgmma_wait(count)

    def sums(self) -> Sums:
        """Return the sums. Nothing is under way."""
        return [total[...] for total in self.totals]


class Interpreted:
    """The same for the interpreter, which has no product with operands in registers.

    A product reads its rows when it is waited for, so that a stage that is released too early is found as a race. Sums
    are values, which a loop must carry.
    """

    def __init__(self, sums: Sums) -> None:
        self.carry, self._under_way = sums, list[tuple[int, Operand, Ref]]()

    def issue(self, part: int, left: Operand, rows: Ref) -> None:
        """Remember a product."""
        self._under_way.append((part, left, rows))

    def wait(self, count: int) -> None:
        """Compute all but the last `count` products."""
        while len(self._under_way) > count:
            part, left, rows = self._under_way.pop(0)
            self.carry = [*self.carry]
            self.carry[part] = mosaic.accumulate(self.carry[part], left, rows)

    def sums(self) -> Sums:
        """Return the sums."""
        return self.carry

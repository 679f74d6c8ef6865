"""Products of linear layers on Hopper: the experts' kernel with one group, for weights of 4, 8 and 16 bits.

The weights are read as they are held. Those of 4 and 8 bits are unpacked in registers while the product before runs.
An output is one sum over its inputs in their order, whatever the number of tokens: a row has the same bits in every
batch.

Shape letters: T tokens, K inputs, C outputs; N outputs: C, or C / 2 behind gates and ups with a `Glu`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.errors import NoLinearKernel
from pallas_kernels.experts import api
from pallas_kernels.experts.api import Implementation, grouped_matmul, tiling_of
from pallas_kernels.experts.eight_bits import TILE
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups, list_one_group
from pallas_kernels.experts.hopper.heuristics import dense_tuning, tile_rows
from pallas_kernels.experts.hopper.launch import UNIT, Launch, OutputsFirst, Shape, launch
from pallas_kernels.hopper import SMS

_KERNEL: Implementation = "mosaic_overlap"


@runtime_checkable
class Tiles(Protocol):
    """The tiles of a matrix, or of a stack: those of `eight_bits`, `int4_tiles` or `nvfp4_tiles`."""

    @property
    def inputs(self) -> int:
        """K."""
        ...

    @property
    def columns(self) -> int:
        """C."""
        ...

    def numbers(self) -> Float[Array, "*E K C"]:
        """Return the weights in float32: for checks, since it makes many times the bytes."""
        ...

    def across(self, at: Int[Array, " n"]) -> "Tiles":
        """Return the tiles of some outputs of one matrix, by the number of 64 outputs."""
        ...


@partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["sms"])
@dataclass(frozen=True)
class DenseTiles:
    """One matrix in the tiles that the Hopper kernel reads.

    Attributes:
        tiles: without an axis of experts; of 4 or 8 bits.
        sms: multiprocessors of the device. None: as many as an H200 has.
    """

    tiles: Tiles
    sms: int | None = None

    @property
    def inputs(self) -> int:
        """K."""
        return self.tiles.inputs

    @property
    def outputs(self) -> int:
        """C."""
        return self.tiles.columns

    @property
    def native(self) -> bool:
        """Hopper's kernel multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weights in x's type."""
        return matmul(x, self)

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> Float[Array, "T N"] | None:
        """Return the unit of x · gates and ups, if gates end where a tile does."""
        return matmul(x, self, unit) if gates_fit(self) else None

    def variant(self, tokens: int, gated: Glu | None, *, wide: bool) -> Hashable:
        """See `variant`."""
        rows = -(-tokens // ALIGN) * ALIGN
        x = jax.ShapeDtypeStruct((rows, self.inputs), jnp.bfloat16)  # type: ignore[no-untyped-call]
        return gated, api.variant(x, self._stack(), None, gated, _KERNEL, self.sms)

    def product(self, x: BFloat16[Array, "T K"], gated: Glu | None, *, wide: bool) -> Float[Array, "T N"]:
        """See `matmul`. Raises NoLinearKernel if the result is to have float32."""
        if wide:
            raise NoLinearKernel("results in float32: weights must have 16 bits, not 4 or 8 in tiles")
        rows, held = jnp.pad(x, ((0, -len(x) % ALIGN), (0, 0))), self._stack()
        tiling = tiling_of(rows, held, None, gated, _KERNEL, self.sms)
        assert tiling is not None
        group = Groups(jnp.zeros(1, jnp.int32), jnp.full(1, len(rows), jnp.int32))
        tiles = jnp.asarray(list_one_group(tiling, len(rows)))
        out = grouped_matmul(rows, held, group, gated=gated, implementation=_KERNEL, sms=self.sms, tiles=tiles)
        return out[: len(x)]

    def first(self, count: int, parts: int) -> "DenseTiles":
        """Return the first outputs, at most so many, of each of so many equal parts: for checks."""
        tall = self.outputs // TILE // parts
        chosen = [part * tall + index for part in range(parts) for index in range(min(tall, count // TILE))]
        return replace(self, tiles=self.tiles.across(jnp.asarray(chosen)))

    def numbers(self) -> Float32[Array, "K C"]:
        """Return the weights in float32: for checks, since it makes many times the bytes."""
        return self.tiles.numbers()

    def _stack(self) -> Any:
        """Return the tiles as those of one expert."""
        return jax.tree.map(lambda array: array[None], self.tiles)


@partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["sms", "outputs_first"])
@dataclass(frozen=True)
class DensePlain:
    """One matrix in 16 bits, as it lies: [K, C], or [C, K] if outputs come first.

    Attributes:
        sms: multiprocessors of the device. None: as many as an H200 has.
    """

    matrix: Float[Array, "_ _"]
    sms: int | None = None
    outputs_first: bool = False

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.matrix.shape[1 if self.outputs_first else 0])

    @property
    def outputs(self) -> int:
        """C."""
        return int(self.matrix.shape[0 if self.outputs_first else 1])

    @property
    def native(self) -> bool:
        """Hopper's kernel multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weights in x's type."""
        return matmul(x, self)

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> Float[Array, "T N"] | None:
        """Return the unit of x · gates and ups, if gates end where a tile does."""
        return matmul(x, self, unit) if gates_fit(self) else None

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · weights in float32; outputs that are no whole number of tiles are padded on the way."""
        if self.outputs % UNIT == 0:
            return matmul(x, self, wide=True)
        return matmul(x, self.padded(), wide=True)[:, : self.outputs]

    def rows(self, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
        """Return the weights of outputs by their indices, of an embedding that is the head too."""
        assert self.outputs_first
        return self.matrix[ids]

    def variant(self, tokens: int, gated: Glu | None, *, wide: bool) -> Hashable:
        """See `variant`."""
        return replace(plain_launch(tokens, self, gated, wide=wide), rows=0)

    def product(self, x: BFloat16[Array, "T K"], gated: Glu | None, *, wide: bool) -> Float[Array, "T N"]:
        """See `matmul`."""
        from pallas_kernels.experts.hopper import call  # loads Mosaic's compiler

        tokens, plan = len(x), plain_launch(len(x), self, gated, wide=wide)
        rows = jnp.pad(x, ((0, plan.rows - tokens), (0, 0)))
        group = Groups(jnp.zeros(1, jnp.int32), jnp.full(1, plan.rows, jnp.int32))
        tiles = jnp.asarray(list_one_group(plan.tiling, plan.rows))
        stack = self.matrix[None]
        held = OutputsFirst(stack) if self.outputs_first else stack
        return call.grouped_matmul(rows, held, group, None, gated, plan.tuning, tiles=tiles, wide=wide)[:tokens]

    def first(self, count: int, parts: int) -> "DensePlain":
        """Return the first outputs, at most so many, of each of so many equal parts: for checks."""
        matrix, size = self.matrix.T if self.outputs_first else self.matrix, self.outputs // parts
        kept = [matrix[:, part * size : part * size + min(size, count)] for part in range(parts)]
        return DensePlain(jnp.concatenate(kept, axis=1), self.sms)

    def numbers(self) -> Float32[Array, "K C"]:
        """Return the weights in float32: for checks."""
        return (self.matrix.T if self.outputs_first else self.matrix).astype(jnp.float32)

    def padded(self) -> "DensePlain":
        """Return a copy with outputs of zeros up to a whole number of tiles, or this matrix if it has such a number."""
        assert not self.outputs_first
        missing = -self.outputs % UNIT
        return replace(self, matrix=jnp.pad(self.matrix, ((0, 0), (0, missing)))) if missing else self


Dense = DenseTiles | DensePlain


def fits(inputs: int, outputs: int) -> bool:
    """Return whether the kernel takes a matrix in 16 bits of these sides."""
    return inputs % UNIT == 0 and outputs % UNIT == 0


def gates_fit(weights: Dense) -> bool:
    """Return whether gates end where a tile does, so that `matmul` can apply an activation."""
    return weights.outputs % (2 * TILE) == 0


def variant(tokens: int, weights: Dense, gated: Glu | None = None, *, wide: bool = False) -> Hashable:
    """Return what tells the kernels of calls apart, but for the number of tokens; see `api.variant`."""
    return weights.variant(tokens, gated, wide=wide)


def matmul(
    x: Float[Array, "T K"], weights: Dense, gated: Glu | None = None, *, wide: bool = False
) -> Float[Array, "T N"]:
    """Return x · weights, after the activation if there is one. No copy of the weights is made.

    Args:
        wide: return float32; of weights in 16 bits alone.

    Raises NoLinearKernel if x is not bfloat16, and if results of weights in tiles are to have float32.
    """
    if x.dtype != jnp.bfloat16:
        raise NoLinearKernel(f"linear layers on Mosaic need bfloat16, not {x.dtype}")
    return weights.product(x, gated, wide=wide)


def plain_launch(tokens: int, weights: DensePlain, gated: Glu | None = None, *, wide: bool = False) -> Launch:
    """Return the launch of a product with weights in 16 bits, of which only shape and type are read.

    Tokens are padded to whole tiles if results are wide.
    """
    unit = tile_rows(tokens) if wide else ALIGN
    rows = -(-tokens // unit) * unit
    x = jax.ShapeDtypeStruct((rows, weights.inputs), jnp.bfloat16)  # type: ignore[no-untyped-call]
    stack: Any = jax.ShapeDtypeStruct((1, *weights.matrix.shape), weights.matrix.dtype)  # type: ignore[no-untyped-call]
    shape = Shape.of(x, OutputsFirst(stack) if weights.outputs_first else stack, None, gated, wide=wide)
    return launch(shape, dense_tuning(shape, weights.sms or SMS))

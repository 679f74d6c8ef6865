"""What is static about a launch of the Triton kernel: its shapes and its tuning. Needs no Triton."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.rows import Attend, Rows, Tiles
from pallas_kernels.attention.splits import splits
from pallas_kernels.errors import NoKernel

SMEM_BYTES = 101_376  # that one thread block may use on sm_86 and sm_89; sm_80 has 166,912
WIDEST = 512  # head sizes
_STAGE_BYTES = 24_576  # K and V of a block
_PLACES = 2 * 108  # thread blocks that fill a GPU: two per multiprocessor of an A100
_LEAST = 16  # rows, keys and columns of the smallest matrix product
_GRID = 65_535  # the most of a grid's second and third axis


class Tuning(NamedTuple):
    """What may be chosen freely. Results differ by rounding only.

    Attributes:
        rows: queries times heads of a thread block; a power of two ≥ 16.
        block: keys per turn of the loop; a power of two ≥ 16.
        warps: of a thread block.
        stages: of the software pipeline that loads keys and values.
        splits: thread blocks that share a row's keys; their parts are combined afterwards.
    """

    rows: int
    block: int
    warps: int
    stages: int
    splits: int


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        tiles: query tiles.
        queries: query tokens per tile.
        group: query heads per KV head.
        row: numbers of a token in a page (E); K the first head_dim, V the last v_dim.
        columns: pages of a row's page table (N).
        slots: layers that share a page. Which of them is an argument, so that all share one compiled kernel.
    """

    tiles: int
    queries: int
    group: int
    kv_heads: int
    head_dim: int
    v_dim: int
    row: int
    page: int
    columns: int
    slots: int
    dtype: jnp.dtype
    attend: Attend

    @classmethod
    def of(
        cls, q: Float[Array, "T H D"], kv: Float[Array, "P S K p E"], rows: Rows, tiles: Tiles, attend: Attend
    ) -> "Shape":
        """Of the arguments of `paged_attention`; arrays without values will do.

        Raises ValueError where the kernel cannot serve them.
        """
        tokens, heads, head_dim = q.shape
        _, slots, kv_heads, page, row = kv.shape
        queries = tiles.tokens.shape[1]
        out = cls(
            # With one token per tile, a tile per token: its results are then the output, padding tokens included.
            tiles=tokens if queries == 1 else tiles.tokens.shape[0],
            queries=queries,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=attend.value_size(row, head_dim),
            row=row,
            page=page,
            columns=rows.page_rows.shape[1],
            slots=slots,
            dtype=kv.dtype,
            attend=attend,
        )
        _check(out, q.dtype)
        return out

    def chunks(self, rows: int) -> int:
        """Thread blocks of so many rows that share a tile's queries."""
        return -(-self.queries * self.group // rows)

    def most_blocks(self, rows: int, block: int) -> int:
        """Blocks that the keys of one thread block's queries may touch."""
        reach, held = self.attend.window or self.attend.chunk, self.columns * self.page
        if reach is None:
            return -(-held // block)
        queries = min(self.queries, (rows - 2) // self.group + 2)
        return (min(reach - 1 + queries, held) - 1) // block + 2


def column_parts(size: int) -> tuple[int, int]:
    """A head size as two powers of two ≥ 16, the second 0 where one will do: 128 = 128 + 0, 192 = 128 + 64."""
    if size <= _LEAST:
        return _LEAST, 0
    main = 1 << (size.bit_length() - 1)
    return main, power_of_two(size - main) if size > main else 0


def power_of_two(size: int) -> int:
    """The smallest power of two ≥ 16 that holds `size`."""
    return max(_LEAST, 1 << (size - 1).bit_length())


def _check(shape: Shape, query_dtype: jnp.dtype) -> None:
    if shape.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NoKernel(f"implementation = 'triton' needs bfloat16, float16 or float32, not {shape.dtype}")
    if query_dtype != shape.dtype:
        raise NoKernel(f"queries are {query_dtype} and pages {shape.dtype}: implementation = 'triton' needs one type")
    if max(shape.head_dim, shape.v_dim) > WIDEST:
        raise NoKernel(
            f"head sizes {shape.head_dim} and {shape.v_dim}: implementation = 'triton' takes at most {WIDEST}"
        )
    if shape.kv_heads > _GRID:
        raise NoKernel(f"{shape.kv_heads} KV heads: implementation = 'triton' takes at most {_GRID}")


def check_tuning(tuning: Tuning) -> None:
    """Raises ValueError where Triton cannot compile it."""
    sizes = (tuning.rows, tuning.block)
    if any(size < _LEAST or size & (size - 1) for size in sizes) or tuning.splits > _GRID:
        raise ValueError(f"{tuning}: rows and block must be powers of two from {_LEAST} on, splits at most {_GRID}")


def default_tuning(shape: Shape) -> Tuning:
    """Chosen from what the compiler reports (`python -m tools.aot.triton`), not from measurements.

    * As many rows as the tile has, up to 64, 32 of wide heads, 16 in float32, which has no matrix units.
    * Blocks of keys whose K and V take up to 24 KB: two of them and the queries fit into L4's shared memory.
    * Five stages: page ids, then keys and values two turns ahead. With three, Triton waits for all copies before it
      computes anything: nothing is under way meanwhile.
    * Warps so that a thread has at most 64 numbers of the result in registers.
    * Splits: see `splits`.
    """
    size = shape.dtype.itemsize
    most_rows = 16 if size == 4 else 32 if shape.v_dim > 256 else 64
    rows = min(power_of_two(shape.queries * shape.group), most_rows)
    keys = _STAGE_BYTES // ((shape.head_dim + shape.v_dim) * size)
    block = max(_LEAST, min(64, 1 << (keys.bit_length() - 1 if keys else 0)))
    warps = max(4, rows * power_of_two(shape.v_dim) // (32 * 64))
    units = shape.tiles * shape.chunks(rows) * shape.kv_heads
    return Tuning(rows, block, warps, stages=5, splits=splits(shape.most_blocks(rows, block), units, _PLACES))

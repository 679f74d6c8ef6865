"""What is static about a launch of the decode kernel: its shapes, its tuning, and what both take of the GPU."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rows import Attend, Rows, Tiles

SMS = 132  # multiprocessors of an H100 or H200
WARPGROUP_ROWS = 64  # rows of one WGMMA
SMEM_BYTES = 232_448  # that one thread block may use on Hopper
SM_SMEM_BYTES = 233_472  # of one multiprocessor; each block on it takes 1 KB of its own
SMEM_ALIGN = 1_024  # of each array in shared memory
_SMEM_EXTRA = 256  # barriers
_MOST_STAGES = 4
_WIDEST = 256  # columns of one WGMMA


class Tuning(NamedTuple):
    """What may be chosen freely. Results differ by rounding only.

    Attributes:
        block: keys per turn of the loop.
        stages: blocks in shared memory at once.
        splits: thread blocks that share a row's keys; their parts are combined afterwards.
        loader: a warpgroup of its own issues the copies. Without it the computing warpgroup does, and twice the
            thread blocks fit into the registers.
    """

    block: int
    stages: int
    splits: int
    loader: bool


@dataclass(frozen=True)
class Shape:
    """Sizes of one call. Rows of WGMMA: the queries of a tile times the heads of a KV head's group.

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
    pages: int
    columns: int
    slots: int
    dtype: jnp.dtype
    attend: Attend

    @classmethod
    def of(
        cls,
        q: Float[Array, "T H D"],
        kv: Float[Array, "P S K p E"],
        rows: Rows,
        tiles: Tiles,
        attend: Attend,
    ) -> "Shape":
        """Of the arguments of `paged_attention`; arrays without values will do.

        Raises ValueError where the kernel cannot serve them.
        """
        tokens, heads, head_dim = q.shape
        pages, slots, kv_heads, page, row = kv.shape
        queries = tiles.tokens.shape[1]
        out = cls(
            # With one token per tile, a tile per token: then neither queries nor outputs are gathered.
            tiles=tokens if queries == 1 else tiles.tokens.shape[0],
            queries=queries,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=attend.value_size(row, head_dim),
            row=row,
            page=page,
            pages=pages,
            columns=rows.page_rows.shape[1],
            slots=slots,
            dtype=kv.dtype,
            attend=attend,
        )
        _check(out, q.dtype)
        return out

    @property
    def rows(self) -> int:
        """Rows of WGMMA that hold a query."""
        return self.queries * self.group

    @property
    def padded_rows(self) -> int:
        """Rows of queries in memory: copies into swizzled tiles take eight at a time."""
        return -(-self.rows // 8) * 8

    def most_blocks(self, block: int) -> int:
        """Blocks that the keys of one tile may touch."""
        reach = self.attend.window or self.attend.chunk
        longest = self.columns * self.page if reach is None else min(reach - 1 + self.queries, self.columns * self.page)
        return (longest - 1) // block + 1 if self.attend.window is None else (longest - 1) // block + 2


@dataclass(frozen=True)
class Launch(Shape):
    """A shape and its tuning.

    K and V of a token lie side by side, so one box per page brings both. Boxes begin and end at multiples of the
    swizzle: head sizes that are no multiple take neighbouring columns along, which meet zeros in the queries (K) or
    are dropped (V).
    """

    tuning: Tuning

    @property
    def tile_columns(self) -> int:
        """Columns of a swizzled tile: 128, 64 or 32 bytes, whichever divides rows and blocks."""
        sizes = [size // self.dtype.itemsize for size in (128, 64, 32)]
        return next(size for size in sizes if self.row % size == 0 and self.tuning.block % size == 0)

    @property
    def k_width(self) -> int:
        """Columns of K's box."""
        return -(-self.head_dim // self.tile_columns) * self.tile_columns

    @property
    def v_start(self) -> int:
        """First column of V's box, which ends with the row."""
        return (self.row - self.v_dim) // self.tile_columns * self.tile_columns

    @property
    def v_width(self) -> int:
        """Columns of V's box."""
        return self.row - self.v_start

    @property
    def consumers(self) -> int:
        """Computing warpgroups. Two share a V of more than 256: each takes half of its columns, and all scores."""
        return -(-self.v_width // _WIDEST)

    @property
    def page_boxes(self) -> int:
        """Copies per block."""
        return max(1, self.tuning.block // self.page)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        size = self.dtype.itemsize
        out_size = size if self.tuning.splits == 1 else 4
        queries = WARPGROUP_ROWS * self.k_width * size
        keys = self.tuning.stages * self.tuning.block * self.row * size
        out = WARPGROUP_ROWS * (self.v_width * out_size + (4 if self.tuning.splits > 1 else 0))
        return queries + max(keys, -(-out // SMEM_ALIGN) * SMEM_ALIGN) + _SMEM_EXTRA


def _check(shape: Shape, query_dtype: jnp.dtype) -> None:
    if query_dtype != shape.dtype:
        raise ValueError(f"queries are {query_dtype} and pages {shape.dtype}: implementation = 'mosaic' needs one type")
    if shape.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"implementation = 'mosaic' needs bfloat16 or float16, not {shape.dtype}")
    if shape.rows > WARPGROUP_ROWS:
        raise ValueError(
            f"implementation = 'mosaic' has no prefill kernel yet: {shape.queries} query tokens of {shape.group} heads "
            f"per KV head are {shape.rows} rows, and its decode kernel takes {WARPGROUP_ROWS}"
        )
    if max(shape.head_dim, shape.v_dim) > 2 * _WIDEST:
        raise ValueError(f"head sizes {shape.head_dim} and {shape.v_dim}: implementation = 'mosaic' takes at most 512")
    if shape.row % 16:
        raise ValueError(f"rows of {shape.row} numbers: implementation = 'mosaic' needs a multiple of 16")
    if shape.page % 8 or (64 % shape.page and shape.page % 64):
        raise ValueError(f"pages of {shape.page} tokens: implementation = 'mosaic' takes 8, 16, 32 and multiples of 64")
    if shape.pages * shape.slots * shape.kv_heads >= 2**31:
        raise ValueError(f"{shape.pages} pages of {shape.slots} slots and {shape.kv_heads} KV heads exceed 2^31 boxes")


def default_tuning(shape: Shape) -> Tuning:
    """Chosen from what the compiler reports (`make gpu-compile`) and from rules of thumb, not from measurements.

    * Blocks of 64 keys; 32 where V takes two warpgroups, so that two stages fit beside 64 queries of 512.
    * As many stages as let two thread blocks share a multiprocessor, but no more than there are blocks.
    * Splits: see `_splits`.
    """
    wide = shape.v_dim > _WIDEST
    block = 32 if wide else 64
    splits = _splits(shape, block)
    budget = SMEM_BYTES if wide or shape.head_dim + shape.v_dim > 384 else SM_SMEM_BYTES // 2 - 1_024
    stages = min(_MOST_STAGES, max(1, -(-shape.most_blocks(block) // splits)))
    while stages > 1 and _fit(shape, Tuning(block, stages, splits, loader=wide)).smem_bytes > budget:
        stages -= 1
    return Tuning(block, stages, splits, loader=wide)


def launch(shape: Shape, tuning: Tuning) -> Launch:
    """The shape with its tuning.

    Raises ValueError where they do not go together.
    """
    if tuning.block % 16 or (shape.page % tuning.block and tuning.block % shape.page):
        raise ValueError(f"blocks of {tuning.block} keys do not fit pages of {shape.page}")
    out = _fit(shape, tuning)
    if out.consumers > 1 and not tuning.loader:
        raise ValueError(f"values of {shape.v_dim} take two warpgroups, which need a loader")
    if out.smem_bytes > SMEM_BYTES:
        raise ValueError(f"{tuning} needs {out.smem_bytes} bytes of shared memory, of {SMEM_BYTES}")
    return out


def _fit(shape: Shape, tuning: Tuning) -> Launch:
    return Launch(**vars(shape), tuning=tuning)


def _splits(shape: Shape, block: int) -> int:
    """Thread blocks per tile and KV head: none for small windows, else enough to fill the GPU.

    The rule of FlashAttention 3 (hopper/heuristics.h): do not split what takes at most four blocks, nor what fills
    most of the GPU anyway; else the smallest number within 85 % of the best use of whole waves. It depends on the
    shape alone, so a row's result does not depend on the load.
    """
    blocks, units, places = shape.most_blocks(block), shape.tiles * shape.kv_heads, 2 * SMS
    if blocks <= 4 or units >= 0.8 * places:
        return 1

    def use(splits: int) -> float:
        waves = units * splits / places
        return waves / -(-units * splits // places)

    choices = range(1, min(blocks // 2, 64) + 1)
    best = max(use(splits) for splits in choices)
    return next(splits for splits in choices if use(splits) >= 0.85 * best)

"""What is static about a launch of the attention kernel: its shapes, its tuning, and what both take of the GPU."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.rows import Attend, Rows, Tiles
from pallas_kernels.attention.splits import splits
from pallas_kernels.errors import NoKernel

SMS = 132  # multiprocessors of an H100 or H200
WARPGROUP_ROWS = 64  # rows of one WGMMA
SMEM_BYTES = 232_448  # that one thread block may use on Hopper
SM_SMEM_BYTES = 233_472  # of one multiprocessor; each block on it takes 1 KB of its own
SMEM_ALIGN = 1_024  # of each array in shared memory
_SMEM_EXTRA = 256  # barriers
_MOST_STAGES = 4
_WIDEST = 256  # columns of one WGMMA
_FEW_BLOCKS = 6  # of keys: fewer do not make up for a thread block's start and end


class Tuning(NamedTuple):
    """What may be chosen freely. Results differ by rounding only.

    Attributes:
        block: keys per turn of the loop.
        stages: blocks in shared memory at once.
        splits: thread blocks that share a row's keys; their parts are combined afterwards.
        loader: a warpgroup of its own issues the copies. Without it the computing warpgroup does, and twice the
            thread blocks fit into the registers.
        row_parts: computing warpgroups of a thread block with rows of their own, 64 each: 1 or 2.
        ahead: a block's scores are formed while the softmax of the one before is taken.
    """

    block: int
    stages: int
    splits: int
    loader: bool
    row_parts: int = 1
    ahead: bool = False


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
        stored: type of the pages' numbers.
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
    stored: jnp.dtype
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
            stored=kv.dtype,
            attend=attend,
        )
        _check(out, q.dtype)
        return out

    @property
    def upcast(self) -> bool:
        """Whether pages hold 8-bit numbers, which the kernel casts to 16 bits as they come."""
        return self.stored.itemsize == 1

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the factors of both products, and of the output. Hopper casts 8 bits to float16 alone."""
        return jnp.dtype(jnp.float16) if self.upcast else self.stored

    @property
    def column_parts(self) -> int:
        """Warpgroups that share V: two where it has more than 256 columns; each takes half of them, and all scores."""
        return -(-self.v_dim // _WIDEST)

    def most_blocks(self, block: int, queries: int) -> int:
        """Blocks that the keys of so many consecutive queries may touch."""
        reach, held = self.attend.window or self.attend.chunk, self.columns * self.page
        if reach is None:
            return (held - 1) // block + 1
        longest = min(reach - 1 + queries, held)
        # A chunk begins with a block, if only one is seen.
        return (longest - 1) // block + (1 if self.attend.window is None and queries == 1 else 2)


@dataclass(frozen=True)
class Launch(Shape):
    """A shape and its tuning.

    Rows of a thread block are queries times heads of a KV head's group, so that the group's heads share what is
    loaded. A tile with more rows than a thread block takes is shared out as chunks of queries.

    K and V of a token lie side by side, so one box per page brings both. Boxes begin and end at multiples of the
    swizzle: head sizes that are no multiple take neighbouring columns along, which meet zeros in the queries (K) or
    are dropped (V).
    """

    tuning: Tuning

    @property
    def consumers(self) -> int:
        """Computing warpgroups."""
        return self.tuning.row_parts * self.column_parts

    @property
    def chunks(self) -> int:
        """Thread blocks that share a tile's queries: as few as their rows allow."""
        return -(-self.queries // (WARPGROUP_ROWS * self.tuning.row_parts // self.group))

    @property
    def chunk_queries(self) -> int:
        """Query tokens of a thread block."""
        return -(-self.queries // self.chunks)

    @property
    def items(self) -> int:
        """Chunks of all tiles."""
        return self.tiles * self.chunks

    @property
    def rows(self) -> int:
        """Rows of a thread block that hold a query."""
        return self.chunk_queries * self.group

    @property
    def padded_rows(self) -> int:
        """Rows of its queries in memory: copies into swizzled tiles take eight at a time, warpgroups all of theirs."""
        return -(-self.rows // 8) * 8 if self.tuning.row_parts == 1 else WARPGROUP_ROWS * self.tuning.row_parts

    @property
    def stored_rows(self) -> int:
        """Rows of its output in memory."""
        return self.rows if self.tuning.row_parts == 1 else self.padded_rows

    @property
    def tile_columns(self) -> int:
        """Columns of a swizzled tile: 128, 64 or 32 bytes, whichever divides rows and blocks."""
        sizes = [size // self.dtype.itemsize for size in (128, 64, 32)]
        return next(size for size in sizes if self.row % size == 0 and self.tuning.block % size == 0)

    @property
    def stored_columns(self) -> int:
        """Columns of a swizzled tile of 8-bit numbers, as they come from the pages."""
        return next(size for size in (64, 32) if self.row % size == 0)

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
    def page_boxes(self) -> int:
        """Copies per block."""
        return max(1, self.tuning.block // self.page)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        size = self.dtype.itemsize
        out_size = size if self.tuning.splits == 1 else 4
        rows = WARPGROUP_ROWS * self.tuning.row_parts
        queries = rows * self.k_width * size
        stored = self.tuning.stages * self.tuning.block * self.row if self.upcast else 0
        keys = self.tuning.stages * self.tuning.block * self.row * size
        out = rows * (self.v_width * out_size + (4 * self.column_parts if self.tuning.splits > 1 else 0))
        return queries + stored + max(keys, -(-out // SMEM_ALIGN) * SMEM_ALIGN) + _SMEM_EXTRA


def tile_tokens(group: int) -> int:
    """Query tokens per tile that fill a thread block of two warpgroups with 128 rows."""
    return max(1, 2 * WARPGROUP_ROWS // group)


def _check(shape: Shape, query_dtype: jnp.dtype) -> None:
    if shape.stored not in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn):
        raise NoKernel(f"implementation = 'mosaic' needs bfloat16, float16 or float8_e4m3fn, not {shape.stored}")
    if query_dtype != shape.dtype and not shape.upcast:
        raise NoKernel(f"queries are {query_dtype} and pages {shape.dtype}: implementation = 'mosaic' needs one type")
    if shape.upcast and shape.row % 32:
        raise NoKernel(f"rows of {shape.row} 8-bit numbers: implementation = 'mosaic' needs a multiple of 32")
    if max(shape.head_dim, shape.v_dim) > 2 * _WIDEST:
        raise NoKernel(f"head sizes {shape.head_dim} and {shape.v_dim}: implementation = 'mosaic' takes at most 512")
    if shape.v_dim > _WIDEST and shape.v_dim % 128:
        raise NoKernel(f"values of {shape.v_dim}: implementation = 'mosaic' takes multiples of 128 above 256")
    if shape.group > WARPGROUP_ROWS:
        raise NoKernel(f"{shape.group} query heads per KV head: implementation = 'mosaic' takes at most 64")
    if shape.row % 16:
        raise NoKernel(f"rows of {shape.row} numbers: implementation = 'mosaic' needs a multiple of 16")
    if shape.page % 8 or (64 % shape.page and shape.page % 64):
        raise NoKernel(f"pages of {shape.page} tokens: implementation = 'mosaic' takes 8, 16, 32 and multiples of 64")
    if shape.pages * shape.slots * shape.kv_heads >= 2**31:
        raise NoKernel(f"{shape.pages} pages of {shape.slots} slots and {shape.kv_heads} KV heads exceed 2^31 boxes")


def default_tuning(shape: Shape) -> Tuning:
    """Chosen from what the compiler reports (`make gpu-compile`) and from rules of thumb, not from measurements.

    * Two computing warpgroups of 64 rows each where a tile has more than 64, they see many keys, and V needs no two
      warpgroups anyway. Over few keys (a window of 128) starting and ending takes longer than computing: there
      several small thread blocks on a multiprocessor hide each other's.
    * Blocks of 64 keys; 128 for two warpgroups of rows, where registers and shared memory allow (FlashAttention 3's
      tiles); 32 where V takes two warpgroups and two stages of 64 do not fit beside 64 queries of 512.
    * As many stages as let two thread blocks share a multiprocessor, but no more than there are blocks. Where
      several warpgroups compute, or rows are long, a thread block has the multiprocessor to itself.
    * Splits: see `_splits`.
    * Scores ahead (FlashAttention 3: a tenth faster) where the compiler spills no registers.
    """
    block, row_parts = 64, 1
    if shape.column_parts == 1 and shape.queries * shape.group > WARPGROUP_ROWS:
        row_parts = 2 if shape.most_blocks(64, shape.queries) > _FEW_BLOCKS else 1
    if row_parts == 2 and shape.head_dim + shape.v_dim <= 320 and 128 % shape.page == 0:
        block = 128
    if row_parts == 2 and _fit(shape, Tuning(block, 2, 1, True, 2)).smem_bytes > SMEM_BYTES:
        row_parts = 1
    loader = row_parts * shape.column_parts > 1 or shape.upcast
    alone = row_parts * shape.column_parts > 1 or shape.head_dim + shape.v_dim > 384
    if shape.upcast and shape.head_dim > 64:  # too many registers for two thread blocks with a loader each
        alone = True
        if shape.head_dim + shape.v_dim <= 256 and 128 % shape.page == 0 and shape.most_blocks(128, 1) > _FEW_BLOCKS:
            block = 128
    budget = SMEM_BYTES if alone else SM_SMEM_BYTES // 2 - 1_024
    if shape.column_parts > 1 and _fit(shape, Tuning(block, 2, 2, loader)).smem_bytes > budget:
        block = 64 if shape.upcast else 32
    splits = _splits(_fit(shape, Tuning(block, 1, 1, loader, row_parts)))
    out = Tuning(block, _MOST_STAGES, splits, loader, row_parts)
    fit = _fit(shape, out)
    stages = min(out.stages, max(1, -(-fit.most_blocks(block, fit.chunk_queries) // splits)))
    while stages > 1 and _fit(shape, out._replace(stages=stages)).smem_bytes > budget:
        stages -= 1
    # Two blocks of scores, output and page ids must fit into the registers, beside another thread block's if small.
    room = shape.v_dim <= 128 and fit.page_boxes <= 4 and not (shape.upcast and row_parts == 1)
    ahead = room and splits == 1 and stages > row_parts and shape.queries > 1
    return out._replace(stages=stages, ahead=ahead)


def launch(shape: Shape, tuning: Tuning) -> Launch:
    """The shape with its tuning.

    Raises ValueError where they do not go together.
    """
    if tuning.block % 16 or (shape.page % tuning.block and tuning.block % shape.page):
        raise ValueError(f"blocks of {tuning.block} keys do not fit pages of {shape.page}")
    out = _fit(shape, tuning)
    if tuning.row_parts not in (1, 2):
        raise ValueError(f"row_parts = {tuning.row_parts} must be 1 or 2")
    if out.consumers > 2:
        raise ValueError(f"values of {shape.v_dim} take two warpgroups: row_parts = {tuning.row_parts} must be 1")
    if out.consumers > 1 and not tuning.loader:
        raise ValueError("two computing warpgroups need a loader")
    if tuning.ahead and (tuning.splits > 1 or shape.queries == 1):
        raise ValueError(f"ahead needs tiles of several queries and no splits, not {tuning}")
    # Of two that take turns one is half a turn behind, and holds its block while the other wants the next. With fewer
    # stages they would wait for each other for ever.
    if tuning.stages < tuning.row_parts + tuning.ahead:
        raise ValueError(f"{tuning} needs {tuning.row_parts + tuning.ahead} stages")
    if out.upcast and not (tuning.loader and tuning.block % 64 == 0):
        raise ValueError(f"8-bit pages need a loader and blocks of a multiple of 64 keys, not {tuning}")
    if out.smem_bytes > SMEM_BYTES:
        raise ValueError(f"{tuning} needs {out.smem_bytes} bytes of shared memory, of {SMEM_BYTES}")
    return out


def _fit(shape: Shape, tuning: Tuning) -> Launch:
    return Launch(**{name: getattr(shape, name) for name in Shape.__dataclass_fields__}, tuning=tuning)


def _splits(plan: Launch) -> int:
    """Thread blocks per item and KV head. Two fit on a multiprocessor where one warpgroup computes."""
    blocks, units = plan.most_blocks(plan.tuning.block, plan.chunk_queries), plan.items * plan.kv_heads
    return splits(blocks, units, SMS if plan.consumers > 1 else 2 * SMS)

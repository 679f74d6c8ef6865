"""The static part of a launch of the Hopper attention kernel: shapes, tuning, and the resources that they take."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles
from pallas_kernels.errors import NoAttentionKernel
from pallas_kernels.hopper import SMEM_ALIGN, SMEM_BYTES, WARPGROUP_ROWS, WGMMA_COLUMNS

_BARRIER_BYTES = 256  # shared memory of all barriers, at most


class Tuning(NamedTuple):
    """Parameters that may be chosen freely: results differ by rounding only.

    Attributes:
        block: keys per turn of the main loop.
        stages: blocks of keys in shared memory at once; see `Launch.key_stages`.
        splits: thread blocks that share a row's keys. Their results are combined afterwards.
        producer: a warpgroup of its own issues the copies, and casts 8-bit numbers. Without it the only consumer does,
            and twice as many thread blocks fit into the registers.
        row_parts: consumers with 64 rows of their own each: 1 or 2.
        ahead: the scores of a block are formed during the softmax of the block before (FlashAttention 3's overlap
            within a warpgroup).
        split_keys: keys of a split in a work list, for rows that are not too long; see `worklist`. 0: no list.
        most_splits: of an item in such a list.
        workers: thread blocks that share such a list. 0: one for each KV head of each entry that the shapes allow.
    """

    block: int
    stages: int
    splits: int
    producer: bool
    row_parts: int = 1
    ahead: bool = False
    split_keys: int = 0
    most_splits: int = 0
    workers: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        tiles: query tiles.
        queries: query tokens per tile.
        group: query heads per KV head.
        row: numbers of a token in a page (E). K is the first `head_dim` of them, V the last `v_dim`.
        columns: pages in a row's page table (N).
        layers_per_page: layers that share a page (S). The index of the layer is an argument of the kernel, so that all
            of them share one compiled kernel.
        stored: type of the numbers in pages.
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
    layers_per_page: int
    stored: jnp.dtype
    attend: AttentionParams

    @classmethod
    def of(
        cls,
        q: Float[Array | jax.ShapeDtypeStruct, "T H D"],
        kv: Float[Array | jax.ShapeDtypeStruct, "P S K p E"],
        rows: PagedRows,
        tiles: QueryTiles,
        attend: AttentionParams,
    ) -> "Shape":
        """Return the sizes of a call of `paged_attention`. Only shapes and types of the arrays are read.

        Raises NoAttentionKernel if the kernel cannot serve them.
        """
        tokens, heads, head_dim = q.shape
        pages, layers_per_page, kv_heads, page, row = kv.shape
        queries = tiles.tokens.shape[1]
        out = cls(
            # With one token per tile there is a tile per token, so neither queries nor outputs need to be gathered.
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
            layers_per_page=layers_per_page,
            stored=kv.dtype,
            attend=attend,
        )
        _check(out, q.dtype)
        return out

    @property
    def upcast(self) -> bool:
        """Whether pages hold 8-bit numbers, which are cast to 16 bits in shared memory."""
        return self.stored.itemsize == 1

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the factors of both products and of the output. Hopper casts 8-bit numbers to float16 only."""
        return jnp.dtype(jnp.float16) if self.upcast else self.stored

    @property
    def column_parts(self) -> int:
        """Consumers that share V: 2 if V has more than 256 columns. Each takes half of V, and computes all scores."""
        return -(-self.v_dim // WGMMA_COLUMNS)

    def most_blocks(self, block: int, queries: int) -> int:
        """Return how many blocks the keys of `queries` consecutive queries touch at most."""
        span, chunk, held = self.attend.span, self.attend.chunk, self.columns * self.page
        if span is None:
            return (held - 1) // block + 1
        longest = min(span - 1 + queries, held)
        # If chunks begin at the first key of a block, and there is one query, no block is cut at the front.
        aligned = chunk is not None and chunk % block == 0 and queries == 1
        return (longest - 1) // block + (1 if aligned else 2)


@dataclass(frozen=True)
class Launch(Shape):
    """A shape with its tuning.

    The rows of a thread block are queries times heads of a KV head's group, so that the group's heads share the keys
    that are loaded. A tile with more rows than a thread block takes is cut into chunks of queries.

    K and V of a token lie side by side, so one TMA box per page brings both. Boxes begin and end at multiples of the
    swizzle. If a head size is no multiple, its box has some columns of its neighbour: for K they meet zeros in the
    queries, for V they are dropped.
    """

    tuning: Tuning

    @classmethod
    def of_shape(cls, shape: Shape, tuning: Tuning) -> "Launch":
        """Return the shape with its tuning, whether they fit together or not; see `launch`."""
        return cls(**{name: getattr(shape, name) for name in Shape.__dataclass_fields__}, tuning=tuning)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.tuning.row_parts * self.column_parts

    @property
    def listed(self) -> bool:
        """Whether thread blocks take their work from a list."""
        return self.tuning.split_keys > 0

    @property
    def in_parts(self) -> bool:
        """Whether thread blocks write parts of a result, in float32, that are combined afterwards."""
        return self.tuning.splits > 1 or self.listed or self.attend.parts > 1

    @property
    def most_splits(self) -> int:
        """Entries of an item in a work list at most."""
        share = self.tuning.split_keys // self.tuning.block
        return min(self.tuning.most_splits, -(-self.most_blocks(self.tuning.block, self.chunk_queries) // share))

    @property
    def entries(self) -> int:
        """Entries of a work list at most."""
        return self.items * self.most_splits

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
        """Rows of a thread block's queries in memory: copies into swizzled tiles take 8 at a time, warpgroups 64."""
        return -(-self.rows // 8) * 8 if self.tuning.row_parts == 1 else WARPGROUP_ROWS * self.tuning.row_parts

    @property
    def stored_rows(self) -> int:
        """Rows of a thread block's output in memory."""
        return self.rows if self.tuning.row_parts == 1 else self.padded_rows

    @property
    def tile_columns(self) -> int:
        """Columns of a swizzled tile: the widest of 128, 64 and 32 bytes that divides both rows and blocks."""
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
        """Copies per block of keys."""
        return max(1, self.tuning.block // self.page)

    @property
    def key_stages(self) -> int:
        """Stages of 16-bit numbers: of 8-bit pages the only consumer casts a block when it needs it, so that is one."""
        return 1 if self.upcast and not self.tuning.producer else self.tuning.stages

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        size = self.dtype.itemsize
        out_size = 4 if self.in_parts else size
        rows = WARPGROUP_ROWS * self.tuning.row_parts
        queries = rows * self.k_width * size
        stored = self.tuning.stages * self.tuning.block * self.row if self.upcast else 0
        keys = self.key_stages * self.tuning.block * self.row * size
        out = rows * (self.v_width * out_size + (4 * self.column_parts if self.in_parts else 0))
        return stored + max(queries + keys, -(-out // SMEM_ALIGN) * SMEM_ALIGN) + _BARRIER_BYTES


def launch(shape: Shape, tuning: Tuning) -> Launch:
    """Return the shape with its tuning.

    Raises ValueError if they do not fit together, or need more shared memory than a thread block may use.
    """
    if tuning.block % 16 or (shape.page % tuning.block and tuning.block % shape.page):
        raise ValueError(f"blocks of {tuning.block} keys do not fit pages of {shape.page}")
    out = Launch.of_shape(shape, tuning)
    if tuning.row_parts not in (1, 2):
        raise ValueError(f"row_parts = {tuning.row_parts} must be 1 or 2")
    if out.consumers > 2:
        raise ValueError(f"values of {shape.v_dim} take two consumers: row_parts = {tuning.row_parts} must be 1")
    if out.consumers > 1 and not tuning.producer:
        raise ValueError("two consumers need a producer")
    if tuning.ahead and (tuning.splits > 1 or shape.queries == 1):
        raise ValueError(f"ahead needs tiles of several queries and no splits, not {tuning}")
    # The law of progress in `ring`: each of two consumers that take turns waits for the other, which is half a turn
    # behind and still holds its block, and with `ahead` a consumer wants the next block before it releases this one.
    if tuning.stages < tuning.row_parts + tuning.ahead:
        raise ValueError(f"{tuning} needs {tuning.row_parts + tuning.ahead} stages")
    _check_list(out)
    if out.upcast:
        _check_upcast(tuning)
    if out.smem_bytes > SMEM_BYTES:
        raise ValueError(f"{tuning} needs {out.smem_bytes} bytes of shared memory, of {SMEM_BYTES}")
    return out


def _check_upcast(tuning: Tuning) -> None:
    if tuning.block % 64:
        raise ValueError(f"8-bit pages need blocks of a multiple of 64 keys, not {tuning}")
    if tuning.ahead and not tuning.producer:
        raise ValueError(f"8-bit pages need a producer for scores ahead, not {tuning}")


def _check_list(plan: Launch) -> None:
    tuning = plan.tuning
    if tuning.split_keys % tuning.block:
        raise ValueError(f"split_keys = {tuning.split_keys} must be a multiple of block = {tuning.block}")
    if plan.listed and (tuning.splits > 1 or tuning.most_splits < 1):
        raise ValueError(f"a work list needs splits = 1 and most_splits > 0, not {tuning}")
    if tuning.workers and not plan.listed:
        raise ValueError(f"workers need split_keys > 0, not {tuning}")


def _check(shape: Shape, query_dtype: jnp.dtype) -> None:
    if shape.stored not in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn):
        raise NoAttentionKernel(
            f"implementation = 'mosaic' needs bfloat16, float16 or float8_e4m3fn, not {shape.stored}"
        )
    if query_dtype != shape.dtype and not shape.upcast:
        raise NoAttentionKernel(
            f"queries are {query_dtype} and pages {shape.dtype}: implementation = 'mosaic' needs one type"
        )
    if shape.upcast and shape.row % 32:
        raise NoAttentionKernel(f"rows of {shape.row} 8-bit numbers: implementation = 'mosaic' needs a multiple of 32")
    if max(shape.head_dim, shape.v_dim) > 2 * WGMMA_COLUMNS:
        raise NoAttentionKernel(
            f"head sizes {shape.head_dim} and {shape.v_dim}: implementation = 'mosaic' takes at most 512"
        )
    if shape.v_dim > WGMMA_COLUMNS and shape.v_dim % 128:
        raise NoAttentionKernel(f"values of {shape.v_dim}: implementation = 'mosaic' takes multiples of 128 above 256")
    if shape.group > WARPGROUP_ROWS:
        raise NoAttentionKernel(f"{shape.group} query heads per KV head: implementation = 'mosaic' takes at most 64")
    if shape.row % 16:
        raise NoAttentionKernel(f"rows of {shape.row} numbers: implementation = 'mosaic' needs a multiple of 16")
    if shape.page % 8 or (64 % shape.page and shape.page % 64):
        raise NoAttentionKernel(
            f"pages of {shape.page} tokens: implementation = 'mosaic' takes 8, 16, 32 and multiples of 64"
        )
    if shape.pages * shape.layers_per_page * shape.kv_heads >= 2**31:
        layers = shape.layers_per_page
        raise NoAttentionKernel(
            f"{shape.pages} pages of {layers} layers and {shape.kv_heads} KV heads exceed 2^31 boxes"
        )

"""The static part of a launch of the Triton kernel: shapes and tuning. Imports no Triton."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles
from pallas_kernels.errors import NoAttentionKernel

SMEM_BYTES = 101_376  # that one thread block may use on sm_86 and sm_89; sm_80 has 166,912
WIDEST = 512  # the largest head size
LEAST = 16  # rows, keys and columns of the smallest matrix product
_GRID = 65_535  # the largest size of a grid's second and third axis


class Tuning(NamedTuple):
    """Parameters that may be chosen freely: results differ by rounding only.

    Attributes:
        rows: queries times heads of a thread block; a power of two ≥ 16.
        block: keys per turn of the main loop; a power of two ≥ 16.
        warps: of a thread block.
        stages: of the software pipeline that loads keys and values.
        splits: thread blocks that share a row's keys. Their results are combined afterwards.
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
        row: numbers of a token in a page (E). K is the first `head_dim` of them, V the last `v_dim`.
        columns: pages in a row's page table (N).
        layers_per_page: layers that share a page (S). The index of the layer is an argument of the kernel, so that all
            of them share one compiled kernel.
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
    layers_per_page: int
    dtype: jnp.dtype
    attend: AttentionParams

    @classmethod
    def of(
        cls,
        q: Float[Array, "T H D"],
        kv: Float[Array, "P S K p E"],
        rows: PagedRows,
        tiles: QueryTiles,
        attend: AttentionParams,
    ) -> "Shape":
        """Return the sizes of a call of `paged_attention`. Only shapes and types of the arrays are read.

        Raises NoAttentionKernel if the kernel cannot serve them.
        """
        tokens, heads, head_dim = q.shape
        _, layers_per_page, kv_heads, page, row = kv.shape
        queries = tiles.tokens.shape[1]
        out = cls(
            # With one token per tile there is a tile per token, and its result is the output, also of padding tokens.
            tiles=tokens if queries == 1 else tiles.tokens.shape[0],
            queries=queries,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=attend.value_size(row, head_dim),
            row=row,
            page=page,
            columns=rows.page_rows.shape[1],
            layers_per_page=layers_per_page,
            dtype=kv.dtype,
            attend=attend,
        )
        _check(out, q.dtype)
        return out

    def chunks(self, rows: int) -> int:
        """Return how many thread blocks of `rows` rows share a tile's queries."""
        return -(-self.queries * self.group // rows)

    def most_blocks(self, rows: int, block: int) -> int:
        """Return how many blocks the keys of a thread block's queries touch at most."""
        span, held = self.attend.span, self.columns * self.page
        if span is None:
            return -(-held // block)
        queries = min(self.queries, (rows - 2) // self.group + 2)
        return (min(span - 1 + queries, held) - 1) // block + 2


def column_parts(size: int) -> tuple[int, int]:
    """Cut a head size into two powers of two ≥ 16, or one and 0 if that suffices: 128 = 128 + 0, 192 = 128 + 64."""
    if size <= LEAST:
        return LEAST, 0
    main = 1 << (size.bit_length() - 1)
    return main, power_of_two(size - main) if size > main else 0


def power_of_two(size: int) -> int:
    """Return the smallest power of two ≥ 16 and ≥ `size`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def _check(shape: Shape, query_dtype: jnp.dtype) -> None:
    if shape.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NoAttentionKernel(f"implementation = 'triton' needs bfloat16, float16 or float32, not {shape.dtype}")
    if query_dtype != shape.dtype:
        raise NoAttentionKernel(
            f"queries are {query_dtype} and pages {shape.dtype}: implementation = 'triton' needs one type"
        )
    if max(shape.head_dim, shape.v_dim) > WIDEST:
        raise NoAttentionKernel(
            f"head sizes {shape.head_dim} and {shape.v_dim}: implementation = 'triton' takes at most {WIDEST}"
        )
    if shape.kv_heads > _GRID:
        raise NoAttentionKernel(f"{shape.kv_heads} KV heads: implementation = 'triton' takes at most {_GRID}")


def check_tuning(tuning: Tuning) -> None:
    """Raise ValueError if Triton cannot compile the tuning."""
    sizes = (tuning.rows, tuning.block)
    if any(size < LEAST or size & (size - 1) for size in sizes) or tuning.splits > _GRID:
        raise ValueError(f"{tuning}: rows and block must be powers of two from {LEAST} on, splits at most {_GRID}")

"""Norms of heads, rotary embedding and KV write for Hopper.

A warpgroup takes a token and a part of its heads: some query heads, or all KV heads. It holds a few heads at a time in
registers, the two halves of the rotated columns apart, so that a pair is in one thread.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Shaped

from pallas_kernels import mosaic
from pallas_kernels.errors import NoGlueKernel
from pallas_kernels.glue.hopper.layouts import by_column, by_row, head_layout, head_rows
from pallas_kernels.glue.plan import Cells, Heads, HeadWeights, Rms, scaled
from pallas_kernels.mosaic import Ref, Scalar, plgpu

MOST_HEADS = 16  # query heads of a thread block, at most


class Span(NamedTuple):
    """Neighbouring columns of a head."""

    first: int
    size: int

    @property
    def of(self) -> Any:
        """The columns, as an index."""
        return pl.ds(self.first, self.size)


@dataclass(frozen=True)
class _Refs:
    """Global memory of the call; what is not given is None."""

    values: Ref
    pages: Ref
    offsets: Ref
    layer: Ref
    kv: Ref
    q: Ref
    bias: Ref | None = None
    cos: Ref | None = None
    sin: Ref | None = None
    temperature: Ref | None = None
    q_norm: Ref | None = None
    k_norm: Ref | None = None
    v_norm: Ref | None = None


def rotate_and_write(
    values: Float[Array, "S T N"],
    bias: Float[Array, " N"] | None,
    kv: Shaped[Array, "P L K p E"],
    heads: Heads,
    weights: HeadWeights,
    rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None,
    cells: Cells,
    dtype: jnp.dtype,
    temperature: Float[Array, " T"] | None,
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "P L K p E"]]:
    """See `api.rotate_and_write`.

    Raises NoGlueKernel if the kernel cannot serve the head size.
    """
    cos, sin = rope or (None, None)
    spans(heads.head_dim, 0 if cos is None else cos.shape[-1])
    parts, tokens, _ = values.shape
    rows = heads.heads + 2 * heads.kv_heads
    named = {
        "values": values.reshape(parts, tokens, rows, heads.head_dim),
        "pages": cells.pages,
        "offsets": cells.offsets,
        "layer": jnp.full(1, cells.layer_index, jnp.int32),
        "bias": None if bias is None else bias.reshape(rows, heads.head_dim),
        "cos": cos,
        "sin": sin,
        "temperature": temperature,
        "q_norm": weights.q,
        "k_norm": weights.k,
        "v_norm": weights.v,
    }
    out: tuple[Array, Array] = _run(heads, dtype, {name: x for name, x in named.items() if x is not None}, kv)
    return out


def spans(head_dim: int, half: int) -> list[Span]:
    """Return the columns of a head in pieces: the two halves that are rotated, or none, then the others.

    Raises NoGlueKernel if a piece is no multiple of eight columns.
    """
    pieces = [Span(0, half), Span(half, half)] if half else []
    if 2 * half < head_dim:
        pieces.append(Span(2 * half, head_dim - 2 * half))
    if any(piece.size % 8 for piece in pieces):
        raise NoGlueKernel(f"head_dim = {head_dim}, {2 * half} of it rotated: must be multiples of 8 for mosaic")
    return pieces


@partial(jax.jit, static_argnames=("heads", "dtype"), inline=False)
def _run(
    heads: Heads, dtype: jnp.dtype, named: dict[str, Array], kv: Shaped[Array, "P L K p E"]
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "P L K p E"]]:
    """Run the kernel. Jitted by itself, so that layers share one trace and hence one kernel."""
    tokens = named["values"].shape[1]
    shape = tokens, heads.kv_heads, heads.rows, heads.head_dim
    run = mosaic.in_place(
        partial(_body, heads, tuple(named)),
        name="rotate_and_write",
        outputs=[(shape, dtype)],
        grid={"token": tokens, "part": heads.heads // _heads_per_block(heads) + 1},
    )
    pages = jax.new_ref(kv)
    (q,) = run(*named.values(), pages)
    return q, jax.freeze(pages)


def _heads_per_block(heads: Heads) -> int:
    """Return the query heads of a thread block: whole KV heads' groups, or a part of one."""
    fitting = (count for count in range(1, min(heads.heads, MOST_HEADS) + 1) if heads.heads % count == 0)
    return max(count for count in fitting if count % heads.group == 0 or heads.group % count == 0)


def _body(heads: Heads, names: tuple[str, ...], *arrays: Ref) -> None:
    """Run a thread block."""
    refs = _Refs(**dict(zip(names, arrays, strict=False)), kv=arrays[-2], q=arrays[-1])
    token, part = lax.axis_index("token"), lax.axis_index("part")
    count = _heads_per_block(heads)
    blocks = heads.heads // count
    pl.when(part < blocks)(lambda: _queries(heads, refs, token, part * count, count))
    page = refs.pages[token]
    written = (part == blocks) & (page < refs.kv.shape[0])
    pl.when(written)(lambda: _keys_and_values(heads, refs, token, page))


def _queries(heads: Heads, refs: _Refs, token: Scalar, first: Scalar, count: int) -> None:
    """Write some query heads of a token."""
    halves = refs.cos.shape[-1] if refs.cos is not None else 0
    pieces = spans(heads.head_dim, halves)
    rows = min(head_rows(min(count, heads.group), piece.size) for piece in pieces)

    @pl.loop(0, count // rows)
    def _heads(index: Scalar) -> None:
        head = first + index * rows
        turned = _turned(heads.q_norm, refs, refs.q_norm, token, head, rows, pieces, rotates=True)
        target = refs.q.at[token, lax.div(head, heads.group), pl.ds(lax.rem(head, heads.group), rows)]
        for piece, x in zip(pieces, turned, strict=True):
            if refs.temperature is not None:
                x = (x.astype(jnp.float32) * refs.temperature[token]).astype(x.dtype)
            target.at[:, piece.of][...] = x


def _keys_and_values(heads: Heads, refs: _Refs, token: Scalar, page: Scalar) -> None:
    """Write K and V of a token to their cell."""
    halves = refs.cos.shape[-1] if refs.cos is not None else 0
    offset, layer = refs.offsets[token], refs.layer[0]
    kinds = (
        (heads.heads, heads.k_norm, refs.k_norm, True),
        (heads.heads + heads.kv_heads, heads.v_norm, refs.v_norm, False),
    )
    for which, (first, norm, weight, rotates) in enumerate(kinds):
        pieces = spans(heads.head_dim, halves if rotates else 0)
        rows = min(head_rows(heads.kv_heads, piece.size) for piece in pieces)

        @pl.loop(0, heads.kv_heads // rows)
        def _heads(
            index: Scalar,
            first: int = first,
            norm: Rms | None = norm,
            weight: Ref | None = weight,
            pieces: list[Span] = pieces,
            rows: int = rows,
            column: int = which * heads.head_dim,
            rotates: bool = rotates,
        ) -> None:
            own = pl.ds(index * rows, rows)
            turned = _turned(norm, refs, weight, token, first + index * rows, rows, pieces, rotates=rotates)
            for piece, x in zip(pieces, turned, strict=True):
                refs.kv.at[page, layer, own, offset, pl.ds(column + piece.first, piece.size)][...] = x


def _turned(
    norm: Rms | None,
    refs: _Refs,
    weight: Ref | None,
    token: Scalar,
    head: Scalar,
    rows: int,
    pieces: list[Span],
    *,
    rotates: bool,
) -> list[Float[Array, "rows columns"]]:
    """Return the pieces of some heads after norm and rotation, in the type of the queries."""
    dtype = refs.q.dtype
    x = [_total(refs, token, head, rows, piece) for piece in pieces]
    if norm is not None:
        wide = [part.astype(jnp.float32) for part in x]
        squares = sum((part * part).sum(axis=1) for part in wide)
        inverse = lax.rsqrt(squares / sum(piece.size for piece in pieces) + norm.eps)
        x = []
        for part, piece in zip(wide, pieces, strict=True):
            own = None if weight is None else by_column(_of_columns(weight.at[piece.of], rows, piece), rows)
            x.append(scaled(norm, part, by_row(inverse, (rows, piece.size)), own, dtype))
    if rotates and refs.cos is not None and refs.sin is not None:
        half = pieces[0]
        cos, sin = (by_column(_of_columns(table.at[token], rows, half), rows) for table in (refs.cos, refs.sin))
        first, second = (part.astype(jnp.float32) for part in x[:2])
        x = [(first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype), *x[2:]]
    return x


def _total(refs: _Refs, token: Scalar, head: Scalar, rows: int, piece: Span) -> Float[Array, "rows columns"]:
    """Return columns of some heads of the projection: the sum of its parts, and the bias."""
    layout, own = head_layout(rows, piece.size), pl.ds(head, rows)

    def load(ref: Ref) -> Array:
        out: Array = plgpu.load(ref.at[own, piece.of], layout=layout, optimized=False)
        return out

    out = load(refs.values.at[0, token])
    for part in range(1, refs.values.shape[0]):
        out = out.astype(jnp.float32) + load(refs.values.at[part, token]).astype(jnp.float32)
    out = out.astype(refs.q.dtype)
    return out if refs.bias is None else out + load(refs.bias)


def _of_columns(ref: Ref, rows: int, piece: Span) -> Float[Array, " columns"]:
    """Load a number per column, where the columns of `rows` heads lie."""
    out: Array = plgpu.load(ref, layout=head_layout(rows, piece.size).reduce(0), optimized=False)
    return out

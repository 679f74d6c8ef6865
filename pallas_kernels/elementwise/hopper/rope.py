"""Norms of heads, rotary embedding and KV write for Hopper.

A warpgroup takes a token and a part of its heads: some query heads, or some KV heads. It holds a few heads at a time in
registers, the two numbers of the rotated pairs apart, so that a pair is in one thread. Where V has another size than K
the heads are no rows of one array: they are taken one by one then, by more thread blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Shaped

from pallas_kernels import mosaic
from pallas_kernels.elementwise.arguments import Heads, HeadWeights, KVCells, Rms, scaled
from pallas_kernels.elementwise.hopper.layouts import LANES, by_column, by_row, head_layout, head_rows, lanes_of
from pallas_kernels.errors import NoElementwiseKernel
from pallas_kernels.mosaic import Ref, Scalar, plgpu
from pallas_kernels.quantized import cut

MOST_HEADS = 16  # query heads of a thread block, at most
_MOST_SINGLE = 4  # the same where heads are taken one by one

_Rope = tuple[Float[Array, "T n"], Float[Array, "T n"]]
_Store = Callable[[Scalar, int, "Span", Array], None]  # of a head and those behind it, how many, columns, numbers


class Span(NamedTuple):
    """Columns of a head that a load takes: neighbours, or one of each pair of neighbours.

    Attributes:
        first, size: in columns, or in pairs.
        place: which of each pair; None: whole columns.
        lanes: of a warp, that share these columns; all pieces of a head have as many.
    """

    first: int
    size: int
    place: int | None = None
    lanes: int = LANES

    def layout(self, rows: int) -> Any:
        """Return how these columns of some heads, [rows, size], lie in registers."""
        return head_layout(rows, self.size, self.lanes, paired=self.place is not None)

    def of(self, base: Scalar | int = 0) -> tuple[Any, ...]:
        """Return the columns as an index of the last axis, or of the last two, behind `base`."""
        columns = pl.ds(base + self.first, self.size)
        return (columns,) if self.place is None else (columns, self.place)


class _Kind(NamedTuple):
    """Q, K or V in a token's projection.

    Attributes:
        first: the first head, of all in the projection.
        column: the first column.
        size: columns of a head.
        scale: factor.
    """

    first: int
    column: int
    size: int
    norm: Rms | None
    rotates: bool
    scale: float = 1.0


@dataclass(frozen=True)
class _Refs:
    """Global memory of the call, and the type of the activations; what is not given is None.

    With `interleaved` heads the last axis of what has a head's columns is two: pairs, and the numbers of a pair.
    """

    values: Ref
    pages: Ref
    offsets: Ref
    layer: Ref
    kv: Ref
    q: Ref
    dtype: jnp.dtype
    bias: Ref | None = None
    cos: Ref | None = None
    sin: Ref | None = None
    temperature: Ref | None = None
    q_norm: Ref | None = None
    k_norm: Ref | None = None
    v_norm: Ref | None = None
    scales: Ref | None = None

    @property
    def half(self) -> int:
        """Rotated pairs of a head."""
        return 0 if self.cos is None else int(self.cos.shape[-1])


def rotate_and_write(
    values: Float[Array, "S T N"],
    bias: Float[Array, " N"] | None,
    kv: Shaped[Array, "P L K p E"],
    heads: Heads,
    weights: HeadWeights,
    rope: _Rope | None,
    cells: KVCells,
    dtype: jnp.dtype,
    temperature: Float[Array, " T"] | None,
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "P L K p E"]]:
    """See `api.rotate_and_write`.

    Raises NoElementwiseKernel if the kernel cannot serve the head size.
    """
    cos, sin = rope or (None, None)
    heads = heads._replace(interleaved=heads.interleaved and rope is not None)
    require_served(heads, 0 if cos is None else cos.shape[-1])

    def split(x: Array | None) -> Array | None:
        return x if x is None or not heads.interleaved else x.reshape(*x.shape[:-1], -1, 2)

    def by_head(x: Array | None) -> Array | None:
        rows = heads.heads + 2 * heads.kv_heads if _are_rows(heads) else 1
        return None if x is None else split(x.reshape(*x.shape[:-1], rows, -1))

    named = {
        "values": by_head(values),
        "pages": cells.pages,
        "offsets": cells.offsets,
        "layer": jnp.full(1, cells.layer_index, jnp.int32),
        "bias": by_head(bias),
        "cos": cos,
        "sin": sin,
        "temperature": temperature,
        "q_norm": split(weights.q),
        "k_norm": split(weights.k),
        "v_norm": split(weights.v),
        "scales": cells.scales,
    }
    given, pages = {name: x for name, x in named.items() if x is not None}, split(kv)
    q, written = _run(heads, dtype, given, pages)
    return q.reshape(values.shape[1], heads.kv_heads, heads.rows, heads.head_dim), written.reshape(kv.shape)


def require_served(heads: Heads, half: int) -> None:
    """Raise NoElementwiseKernel if the kernel cannot serve such heads, of which `half` pairs are rotated."""
    turned = heads._replace(interleaved=heads.interleaved and half > 0)
    for kind in _kinds(turned):
        spans(turned, kind.size, half, rotates=kind.rotates)


def spans(heads: Heads, size: int, half: int, *, rotates: bool) -> list[Span]:
    """Return the columns of a head of that size in pieces: the two halves that are rotated, or none, then the others.

    Of interleaved pairs the first pieces are the first and the second numbers. Raises NoElementwiseKernel if a piece is
    no multiple of eight columns, and for interleaved pairs in a part of the columns.
    """
    limit = f"head_dim = {size}, {2 * half} of it rotated: must be multiples of 8 for mosaic"
    if heads.interleaved:
        if 2 * half != heads.head_dim or not _are_rows(heads):
            raise NoElementwiseKernel(
                f"{2 * half} of {heads.head_dim} columns in interleaved pairs: must be all for mosaic"
            )
        pieces = [Span(0, size // 2, 0), Span(0, size // 2, 1)]
    else:
        turned = half if rotates else 0
        pieces = [Span(0, turned), Span(turned, turned)] if turned else []
        if 2 * turned < size:
            pieces.append(Span(2 * turned, size - 2 * turned))
    if any(piece.size % 8 for piece in pieces):
        raise NoElementwiseKernel(limit)
    lanes = min(lanes_of(piece.size) for piece in pieces)
    return [piece._replace(lanes=lanes) for piece in pieces]


def _kinds(heads: Heads) -> tuple[_Kind, _Kind, _Kind]:
    count, kv, size = heads.heads, heads.kv_heads, heads.head_dim
    q = _Kind(0, 0, size, heads.q_norm, rotates=True)
    k = _Kind(count, count * size, size, heads.k_norm, rotates=True)
    v = _Kind(count + kv, (count + kv) * size, heads.v_size, heads.v_norm, rotates=False, scale=heads.v_scale)
    return q, k, v


def _are_rows(heads: Heads) -> bool:
    """Return whether all heads have one size: then they are rows of one array, of which several are loaded at once."""
    return heads.v_size == heads.head_dim


@partial(jax.jit, static_argnames=("heads", "dtype"), inline=False)
def _run(
    heads: Heads, dtype: jnp.dtype, named: dict[str, Array], kv: Shaped[Array, "P L K p ..."]
) -> tuple[Float[Array, "T K R ..."], Shaped[Array, "P L K p ..."]]:
    """Run the kernel. Jitted by itself, so that layers share one trace and hence one kernel."""
    tokens = named["values"].shape[1]
    columns = (heads.head_dim // 2, 2) if heads.interleaved else (heads.head_dim,)
    count, written = _heads_per_block(heads)
    run = mosaic.in_place(
        partial(_body, heads, dtype, tuple(named)),
        name="rotate_and_write",
        outputs=[((tokens, heads.kv_heads, heads.rows, *columns), heads.query_dtype or dtype)],
        grid={"token": tokens, "part": heads.heads // count + heads.kv_heads // written},
    )
    pages = jax.new_ref(kv)
    (q,) = run(*named.values(), pages)
    return q, jax.freeze(pages)


def _heads_per_block(heads: Heads) -> tuple[int, int]:
    """Return the heads of a thread block: whole KV heads' groups of query heads or a part of one, or KV heads."""
    most = MOST_HEADS if _are_rows(heads) else _MOST_SINGLE
    fitting = (count for count in range(1, min(heads.heads, most) + 1) if heads.heads % count == 0)
    queries = max(count for count in fitting if count % heads.group == 0 or heads.group % count == 0)
    return queries, heads.kv_heads if _are_rows(heads) else 1


def _body(heads: Heads, dtype: jnp.dtype, names: tuple[str, ...], *arrays: Ref) -> None:
    """Run a thread block."""
    refs = _Refs(**dict(zip(names, arrays, strict=False)), kv=arrays[-2], q=arrays[-1], dtype=dtype)
    token, part = lax.axis_index("token"), lax.axis_index("part")
    count, written = _heads_per_block(heads)
    blocks = heads.heads // count
    pl.when(part < blocks)(lambda: _queries(heads, refs, token, part * count, count))
    page = refs.pages[token]
    stored = (part >= blocks) & (page < refs.kv.shape[0])
    pl.when(stored)(lambda: _keys_and_values(heads, refs, token, page, (part - blocks) * written, written))


def _queries(heads: Heads, refs: _Refs, token: Scalar, first: Scalar, count: int) -> None:
    """Write some query heads of a token."""

    def store(head: Scalar, rows: int, piece: Span, x: Array) -> None:
        if refs.temperature is not None:
            x = (x.astype(jnp.float32) * refs.temperature[token]).astype(x.dtype)
        if heads.query_dtype is not None:
            wide = x.astype(jnp.float32)
            wide = wide if refs.scales is None else wide * refs.scales[0, lax.div(head, heads.group)]
            x = cut(wide, heads.query_dtype)
        own = lax.div(head, heads.group), pl.ds(lax.rem(head, heads.group), rows)
        refs.q.at[(token, *own, *piece.of())][...] = x

    _each(heads, refs, _kinds(heads)[0], refs.q_norm, token, first, count, min(count, heads.group), store)


def _keys_and_values(heads: Heads, refs: _Refs, token: Scalar, page: Scalar, first: Scalar, count: int) -> None:
    """Write K and V of some KV heads of a token to their cell."""
    offset, layer = refs.offsets[token], refs.layer[0]
    _, k, v = _kinds(heads)
    for which, kind, weight, column in ((0, k, refs.k_norm, 0), (1, v, refs.v_norm, heads.head_dim)):
        base = column // 2 if heads.interleaved else column

        def store(head: Scalar, rows: int, piece: Span, x: Array, which: int = which, base: int = base) -> None:
            own = x if refs.kv.dtype == x.dtype else _in_8_bits(refs, which, head, rows, piece, x)
            refs.kv.at[(page, layer, pl.ds(head, rows), offset, *piece.of(base))][...] = own

        _each(heads, refs, kind, weight, token, first, count, count, store)


def _in_8_bits(
    refs: _Refs, which: int, head: Scalar, rows: int, piece: Span, x: Float[Array, "rows _"]
) -> Float[Array, "rows _"]:
    """Return columns of some heads of K (`which` = 0) or V (1) as pages of 8 bits hold them."""
    wide = x.astype(jnp.float32)
    if refs.scales is not None:
        layout = piece.layout(rows).reduce(1)
        scales = plgpu.load(refs.scales.at[which, pl.ds(head, rows)], layout=layout, optimized=False)
        wide = wide / by_row(scales, (rows, piece.size))
    return cut(wide, refs.kv.dtype)


def _each(
    heads: Heads,
    refs: _Refs,
    kind: _Kind,
    weight: Ref | None,
    token: Scalar,
    first: Scalar,
    count: int,
    together: int,
    store: _Store,
) -> None:
    """Norm, rotate and store `count` heads of a kind, a few at a time, of which `together` have one group."""
    pieces = spans(heads, kind.size, refs.half, rotates=kind.rotates)
    rows = head_rows(together, pieces[0].lanes) if _are_rows(heads) else 1

    @pl.loop(0, count // rows)
    def _heads(index: Scalar) -> None:
        head = first + index * rows
        x = [_total(heads, refs, kind, token, head, rows, piece) for piece in pieces]
        if kind.norm is not None:
            x = _normed(kind.norm, x, weight, rows, pieces)
        if kind.rotates and refs.half:
            x = _turned(x, refs, token, rows, pieces)
        for piece, own in zip(pieces, x, strict=True):
            store(head, rows, piece, own if kind.scale == 1.0 else own * jnp.asarray(kind.scale, own.dtype))


def _normed(
    norm: Rms, x: list[Float[Array, "rows _"]], weight: Ref | None, rows: int, pieces: list[Span]
) -> list[Float[Array, "rows _"]]:
    """Return the pieces of some heads after their norm."""
    wide = [part.astype(jnp.float32) for part in x]
    squares = sum((part * part).sum(axis=1) for part in wide)
    inverse = lax.rsqrt(squares / sum(piece.size for piece in pieces) + norm.eps)
    out = []
    for part, piece in zip(wide, pieces, strict=True):
        own = None if weight is None else by_column(_of_columns(weight.at[piece.of()], rows, piece), rows)
        out.append(scaled(norm, part, by_row(inverse, (rows, piece.size)), own, x[0].dtype))
    return out


def _turned(
    x: list[Float[Array, "rows _"]], refs: _Refs, token: Scalar, rows: int, pieces: list[Span]
) -> list[Float[Array, "rows _"]]:
    """Return the pieces of some heads after the first two, which are the numbers of the pairs, are rotated."""
    dtype, half, tables = x[0].dtype, pieces[0], (refs.cos, refs.sin)
    cos, sin = (by_column(_of_columns(table.at[token], rows, half), rows) for table in tables if table is not None)
    first, second = (part.astype(jnp.float32) for part in x[:2])
    return [(first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype), *x[2:]]


def _total(
    heads: Heads, refs: _Refs, kind: _Kind, token: Scalar, head: Scalar, rows: int, piece: Span
) -> Float[Array, "rows columns"]:
    """Return columns of some heads of the projection: the sum of its parts, and the bias."""
    layout = piece.layout(rows)
    if _are_rows(heads):
        own = pl.ds(kind.first + head, rows), *piece.of()
    else:
        own = pl.ds(0, rows), *piece.of(kind.column + head * kind.size)

    def load(ref: Ref) -> Array:
        out: Array = plgpu.load(ref.at[own], layout=layout, optimized=False)
        return out

    out = load(refs.values.at[0, token])
    for part in range(1, refs.values.shape[0]):
        out = out.astype(jnp.float32) + load(refs.values.at[part, token]).astype(jnp.float32)
    out = out.astype(refs.dtype)
    return out if refs.bias is None else out + load(refs.bias)


def _of_columns(ref: Ref, rows: int, piece: Span) -> Float[Array, " columns"]:
    """Load a number per column, where the columns of `rows` heads lie."""
    layout = piece.layout(rows).reduce(0)
    out: Array = plgpu.load(ref, layout=layout, optimized=False)
    return out

"""Residual and norms for Hopper: a warpgroup per token, which holds the token's numbers in registers."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.elementwise.arguments import Join, Pairs, Parts, Rms, scaled
from pallas_kernels.elementwise.hopper.layouts import Chunk, chunks
from pallas_kernels.mosaic import Ref

_Row = list[Float[Array, "..."]]  # the chunks of a token's numbers, of several sizes


@partial(jax.jit, static_argnames="join", inline=False)
def residual_norms(
    branch: Parts | Pairs,
    x: Float[Array, "T M"],
    join: Join,
    post_weight: Float[Array, " M"] | None,
    pre_weight: Float[Array, " M"] | None,
) -> tuple[Float[Array, "T M"], Float[Array, "T M"]]:
    """See `api.residual_norms`. Jitted by itself, so that layers share one trace and hence one kernel.

    Raises NoElementwiseKernel if the kernel cannot serve the width.
    """
    tokens, width = x.shape
    pieces = list(chunks(width))
    own = branch._asdict()
    values = own.pop("values")
    optional = {**own, "post_weight": post_weight, "pre_weight": pre_weight}
    given = {name: array for name, array in optional.items() if array is not None}
    run = mosaic.kernel(
        partial(_body, join, pieces, tuple(given)),
        name="residual_norms",
        outputs=[((tokens, width), x.dtype)] * (1 if join.pre is None else 2),
        grid={"token": tokens},
        num_threads=1,
        scratch={},
        reduction_scratch_bytes=mosaic.REDUCTION_BYTES,
    )
    y, *read = run(values, x, *given.values())
    return y, read[0] if read else y


def _body(join: Join, pieces: list[Chunk], names: tuple[str, ...], values: Ref, x: Ref, *refs: Ref) -> None:
    """Run one token."""
    given, outputs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    token, dtype = lax.axis_index("token"), x.dtype
    if "rows" in given:
        sums = _of_experts(values, given["rows"], given.get("weights"), pieces, token)
        if "shared" in given:
            shared = [_total(piece, given["shared"], token).astype(jnp.float32) for piece in pieces]
            sums = [part + own for part, own in zip(sums, shared, strict=True)]
    else:
        sums = [_total(piece, values, token) for piece in pieces]
    branch = [part.astype(dtype) for part in sums]
    if "bias" in given:
        branch = [part + piece.load(given["bias"]) for part, piece in zip(branch, pieces, strict=True)]
    if join.post is not None:
        branch = _normed(join.post, branch, pieces, given.get("post_weight"))
    joined = []
    for part, piece in zip(branch, pieces, strict=True):
        kept = piece.load(x.at[token])
        kept = kept if join.keep == 1.0 else kept * jnp.asarray(join.keep, dtype)
        y = kept + (part if join.add == 1.0 else part * jnp.asarray(join.add, dtype))
        outputs[0].at[token, piece.of][...] = y
        joined.append(y)
    if join.pre is not None:
        read = _normed(join.pre, joined, pieces, given.get("pre_weight"))
        for part, piece in zip(read, pieces, strict=True):
            outputs[1].at[token, piece.of][...] = part


def _of_experts(values: Ref, rows: Ref, weights: Ref | None, pieces: list[Chunk], token: Array) -> _Row:
    """Return the sum of a token's experts, in their order."""
    out: _Row = []
    for number in range(rows.shape[1]):
        row = rows[token, number]
        found = [piece.load(values.at[row]).astype(jnp.float32) for piece in pieces]
        if weights is not None:
            found = [part * weights[token, number] for part in found]
        out = [a + b for a, b in zip(out, found, strict=True)] if out else found
    return out


def _total(piece: Chunk, values: Ref, token: Array) -> Float[Array, " size"]:
    """Return the sum of the parts, in their order."""
    out = piece.load(values.at[0, token])
    for part in range(1, values.shape[0]):
        out = out.astype(jnp.float32) + piece.load(values.at[part, token]).astype(jnp.float32)
    return out


def _normed(norm: Rms, row: _Row, pieces: list[Chunk], weight: Ref | None) -> _Row:
    """Return the norm of a row."""
    wide = [part.astype(jnp.float32) for part in row]
    squares = sum((part * part).sum() for part in wide)
    inverse = lax.rsqrt(squares / sum(piece.size for piece in pieces) + norm.eps)
    weights = [None if weight is None else piece.load(weight) for piece in pieces]
    return [scaled(norm, part, inverse, own, row[0].dtype) for part, own in zip(wide, weights, strict=True)]

"""Sums along rows, and what is made of them, on XLA, in the library of CPU kernels or on Triton.

The order in which XLA adds the numbers of a row depends on the number of rows, and on the operations around the sum.
The last bit of an exponential or a logarithm depends on them too: inside of a loop that adds or compares, XLA rounds
otherwise than elsewhere. In the library, and on Triton (`row_sums`), a row depends on no other row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from pallas_kernels import Sums
from pallas_kernels.cpu import library

Implementation = Sums
_MOST_COLUMNS = 2_048  # at a time, of a thread block on Triton


def row_sums(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... 1"]:
    """Return the sums along the last axis, in float32 if `by` is not "xla". Raises NoLibrary, or ImportError."""
    if by == "xla":
        return x.sum(axis=-1, keepdims=True)
    rows, none = x.reshape(-1, x.shape[-1]).astype(jnp.float32), jnp.zeros((0, 0), jnp.uint32)
    out: Array = _on_library(rows, none, none, sums=1) if by == "cpu" else _on_triton(rows)
    return out.reshape(*x.shape[:-1], 1)


def sums_from(
    values: Float[Array, "R V"], keys: UInt[Array, "R V"], thresholds: UInt[Array, "R N"], by: Implementation = "xla"
) -> Float[Array, "R N"]:
    """Return the sums of the values of each row whose key is at least a threshold. Raises NoLibrary, or ImportError."""
    if by == "xla":
        return jnp.where(keys[:, None] >= thresholds[..., None], values[:, None], 0.0).sum(axis=-1)
    if by == "triton":
        return _on_triton(values, keys, thresholds)
    return _on_library(values, keys, thresholds, sums=thresholds.shape[1])


def row_means(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... 1"]:
    """Return the means along the last axis."""
    return x.mean(axis=-1, keepdims=True) if by == "xla" else row_sums(x, by) / x.shape[-1]


def softmax(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... N"]:
    """Return the softmax along the last axis."""
    return jax.nn.softmax(x, axis=-1) if by == "xla" else _shares(x, by, columns=x.shape[-1])[0]


def log_softmax(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... N"]:
    """Return the logarithm of the softmax along the last axis."""
    if by == "xla":
        return jax.nn.log_softmax(x, axis=-1)
    return x - x.max(axis=-1, keepdims=True) - _shares(x, by, columns=0)[1]


def apart(x: Float[Array, "..."], by: Implementation) -> Float[Array, "..."]:
    """Return x; if `by` is not "xla", a barrier keeps XLA from computing x inside of the loops that read it."""
    return x if by == "xla" else lax.optimization_barrier(x)  # type: ignore[no-untyped-call]


def _shares(
    x: Float[Array, "... N"], by: Implementation, *, columns: int
) -> tuple[Float[Array, "... columns"], Float[Array, "... 1"]]:
    """Return the softmax, or no columns of it, and the logarithm of what it divides by."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if by == "triton":
        shares, logs = _shares_on_triton(rows, columns)
    else:
        library.digest()
        shares, logs = jax.ffi.ffi_call("jswa_shares", (_out(len(rows), columns), _out(len(rows))))(rows)
    return shares.reshape(*x.shape[:-1], columns), logs.reshape(*x.shape[:-1], 1)


def _on_library(
    values: Float[Array, "T N"], keys: UInt[Array, "_ _"], thresholds: UInt[Array, "_ _"], *, sums: int
) -> Float[Array, "T {sums}"]:
    library.digest()
    out: Array = jax.ffi.ffi_call("jswa_sums", _out(len(values), sums))(values.astype(jnp.float32), keys, thresholds)
    return out


def _on_triton(
    values: Float[Array, "T N"], keys: UInt[Array, "T N"] | None = None, thresholds: UInt[Array, "T S"] | None = None
) -> Float[Array, "T S"]:
    """Return the sums of the values whose key is at least a threshold; without keys those of all."""
    from pallas_kernels import triton

    triton.load()
    from pallas_kernels.elementwise import row_sums

    count = 1 if thresholds is None else thresholds.shape[1]
    operands: dict[str, Array | int | None] = {"values": values, "keys": None, "thresholds": None}
    if keys is not None and thresholds is not None:
        operands |= {"keys": _as_int(keys), "thresholds": _as_int(thresholds)}
    (out,) = triton.call(
        row_sums.add,
        operands,
        [_out(len(values), count)],
        (len(values), count),
        {"COLUMNS": values.shape[1], "COUNT": count, "BLOCK": _block(values.shape[1])},
        warps=4,
    )
    return out


def _shares_on_triton(rows: Float[Array, "T N"], columns: int) -> tuple[Float[Array, "T columns"], Float[Array, " T"]]:
    from pallas_kernels import triton

    triton.load()
    from pallas_kernels.elementwise import row_sums

    size = rows.shape[1]
    shape, given = (_out(len(rows), size), {}) if columns else (None, {"shares": None})
    found = triton.call(
        row_sums.share,
        {"values": rows, **given},
        [_out(len(rows)), *(() if shape is None else (shape,))],
        (len(rows),),
        {"COLUMNS": size, "BLOCK": _block(size)},
        warps=4,
    )
    return found[1] if columns else jnp.zeros((len(rows), 0), jnp.float32), found[0]


def _block(columns: int) -> int:
    """Return the columns that a thread block reads at a time, which depend on the row's size alone."""
    return min(1 << max(columns - 1, 1).bit_length(), _MOST_COLUMNS)


def _as_int(keys: UInt[Array, "_ _"]) -> Array:
    return lax.bitcast_convert_type(keys, jnp.int32)


def _out(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]

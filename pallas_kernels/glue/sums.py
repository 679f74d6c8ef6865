"""Sums along rows, and what is made of them, on XLA or in the library of CPU kernels.

The order in which XLA adds the numbers of a row depends on the number of rows, and on the operations around the sum.
The last bit of an exponential or a logarithm depends on them too: inside of a loop that adds or compares, XLA rounds
otherwise than elsewhere. In the library a row depends on no other row.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from pallas_kernels.cpu import library

Implementation = Literal["xla", "cpu"]


def row_sums(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... 1"]:
    """Return the sums along the last axis, in float32 if `by` is "cpu". Raises NoLibrary."""
    if by == "xla":
        return x.sum(axis=-1, keepdims=True)
    out: Array = _call(x.reshape(-1, x.shape[-1]), *(jnp.zeros((0, 0), jnp.uint32),) * 2, sums=1)
    return out.reshape(*x.shape[:-1], 1)


def sums_from(
    values: Float[Array, "R V"], keys: UInt[Array, "R V"], thresholds: UInt[Array, "R N"], by: Implementation = "xla"
) -> Float[Array, "R N"]:
    """Return the sums of the values of each row whose key is at least a threshold. Raises NoLibrary."""
    if by == "xla":
        return jnp.where(keys[:, None] >= thresholds[..., None], values[:, None], 0.0).sum(axis=-1)
    return _call(values, keys, thresholds, sums=thresholds.shape[1])


def row_means(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... 1"]:
    """Return the means along the last axis."""
    return x.mean(axis=-1, keepdims=True) if by == "xla" else row_sums(x, by) / x.shape[-1]


def softmax(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... N"]:
    """Return the softmax along the last axis."""
    return jax.nn.softmax(x, axis=-1) if by == "xla" else _shares(x, x.shape[-1])[0]


def log_softmax(x: Float[Array, "... N"], by: Implementation = "xla") -> Float[Array, "... N"]:
    """Return the logarithm of the softmax along the last axis."""
    if by == "xla":
        return jax.nn.log_softmax(x, axis=-1)
    return x - x.max(axis=-1, keepdims=True) - _shares(x, 0)[1]


def apart(x: Float[Array, "..."], by: Implementation) -> Float[Array, "..."]:
    """Return x; if `by` is "cpu", a barrier keeps XLA from computing x inside of the loops that read it."""
    return x if by == "xla" else lax.optimization_barrier(x)  # type: ignore[no-untyped-call]


def _shares(x: Float[Array, "... N"], columns: int) -> tuple[Float[Array, "... columns"], Float[Array, "... 1"]]:
    """Return the softmax, or no columns of it, and the logarithm of what it divides by."""
    library.digest()
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((len(rows), columns), (len(rows),)))  # type: ignore[no-untyped-call]
    shares, logs = jax.ffi.ffi_call("jswa_shares", tuple(shapes))(rows)
    return shares.reshape(*x.shape[:-1], columns), logs.reshape(*x.shape[:-1], 1)


def _call(
    values: Float[Array, "T N"], keys: UInt[Array, "_ _"], thresholds: UInt[Array, "_ _"], *, sums: int
) -> Float[Array, "T {sums}"]:
    library.digest()
    shape = jax.ShapeDtypeStruct((len(values), sums), jnp.float32)  # type: ignore[no-untyped-call]
    out: Array = jax.ffi.ffi_call("jswa_sums", shape)(values.astype(jnp.float32), keys, thresholds)
    return out

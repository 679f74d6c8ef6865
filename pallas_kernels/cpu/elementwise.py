"""Residuals with the norms around them, and heads that are normed, rotated and written, each in one call on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.cpu import library
from pallas_kernels.cpu.products import PRODUCT_TYPES
from pallas_kernels.elementwise.arguments import Heads, HeadWeights, Join, KVCells, Rms
from pallas_kernels.errors import NoElementwiseKernel


def residual_norms(
    values: Float[Array, "S T M"],
    bias: Float[Array, " M"] | None,
    x: Float[Array, "T M"],
    join: Join,
    post_weight: Float[Array, " M"] | None,
    pre_weight: Float[Array, " M"] | None,
) -> tuple[Float[Array, "T M"], Float[Array, "T M"]]:
    """See `elementwise.api.residual_norms`. A row depends on no other row. Raises NoLibrary."""
    _require(x.dtype)
    library.digest()
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_join", (shape, shape))
    weights = (_or_none(bias, x.dtype), x, _or_none(post_weight, x.dtype), _or_none(pre_weight, x.dtype))
    norms = {"post": _numbers(join.post), "pre": _numbers(join.pre)}
    y, normed = call(values, *weights, **norms, keep=np.float32(join.keep), add=np.float32(join.add))
    return y, normed


def rotate_and_write(
    values: Float[Array, "S T N"],
    bias: Float[Array, " N"] | None,
    kv: Shaped[Array, "..."],
    heads: Heads,
    weights: HeadWeights,
    rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None,
    cells: KVCells,
    dtype: jnp.dtype,
    temperature: Float[Array, " T"] | None,
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "..."]]:
    """See `elementwise.api.rotate_and_write`. A row depends on no other row. Raises NoLibrary and NoElementwiseKernel.

    XLA updates `kv` in place in the shape in which the step has it: between a parameter and a call that updates it, a
    reshape would be a copy.
    """
    _require(dtype)
    require_served(heads)
    if kv.dtype.name not in PRODUCT_TYPES:
        raise NoElementwiseKernel(f"pages of {kv.dtype}: must be one of {PRODUCT_TYPES} for elementwise=cpu")
    library.digest()
    tokens = values.shape[1]
    q = jax.ShapeDtypeStruct((tokens, heads.heads, heads.head_dim), dtype)  # type: ignore[no-untyped-call]
    pages = jax.ShapeDtypeStruct(kv.shape, kv.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_rotate", (q, pages), input_output_aliases={2: 1})
    cos, sin = rope or (jnp.zeros((tokens, 0), jnp.float32),) * 2
    queries, written = call(
        values,
        _or_none(bias, dtype),
        kv,
        *(_or_none(weight, dtype) for weight in weights),
        cos,
        sin,
        _or_none(temperature, jnp.dtype(jnp.float32)),
        cells.pages.astype(jnp.int32),
        cells.offsets.astype(jnp.int32),
        q_norm=_numbers(heads.q_norm),
        k_norm=_numbers(heads.k_norm),
        v_norm=_numbers(heads.v_norm),
        layer=np.int64(cells.layer_index),
        shape=np.array(cells.shape, np.int64),
    )
    grouped = queries.reshape(tokens, heads.kv_heads, heads.group, heads.head_dim)
    more = heads.rows - heads.group
    return (jnp.pad(grouped, ((0, 0), (0, 0), (0, more), (0, 0))) if more else grouped), written


def require_served(heads: Heads) -> None:
    """Raise NoElementwiseKernel if the library cannot serve such heads, with the reason."""
    unserved = {
        f"V of {heads.v_size} numbers beside K of {heads.head_dim}": heads.v_size != heads.head_dim,
        f"V times {heads.v_scale}": heads.v_scale != 1.0,
        "interleaved pairs": heads.interleaved,
        f"queries in {heads.query_dtype}": heads.query_dtype is not None,
    }
    for name, found in unserved.items():
        if found:
            raise NoElementwiseKernel(f"{name}: choose elementwise=xla for this model")


def _require(dtype: jnp.dtype) -> None:
    if jnp.dtype(dtype).name not in PRODUCT_TYPES:
        raise NoElementwiseKernel(f"{dtype}: must be one of {PRODUCT_TYPES} for elementwise=cpu")


def _or_none(array: Array | None, dtype: jnp.dtype) -> Array:
    return jnp.zeros(0, dtype) if array is None else array.astype(dtype)


def _numbers(norm: Rms | None) -> Float[np.ndarray, " 4"]:
    """Return a norm as src/between_ffi.h reads it."""
    if norm is None:
        return np.zeros(4, np.float32)
    return np.array([1, norm.cast_first, norm.eps, norm.offset], np.float32)

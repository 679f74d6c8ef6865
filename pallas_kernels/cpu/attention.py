"""Paged attention on a CPU, in float32, page by page as they lie."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles
from pallas_kernels.cpu import library
from pallas_kernels.errors import NoAttentionKernel

_TYPES = ("float32", "bfloat16", "float16")


def paged_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    *,
    layer_index: int,
    attend: AttentionParams,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H V"]:
    """See `attention.api.paged_attention`. Raises NoAttentionKernel for other types than those of the library."""
    for name, array, types in (("q", q, _TYPES), ("kv", kv, (*_TYPES, "float8_e4m3fn"))):
        if array.dtype.name not in types:
            raise NoAttentionKernel(f"implementation = 'cpu' takes no {name} of {array.dtype}")
    library.digest()
    v_dim = attend.value_size(kv.shape[-1], q.shape[2])
    shape = jax.ShapeDtypeStruct((*q.shape[:2], v_dim), q.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_attention", shape)
    window, chunk = attend.bounds
    own = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out: Array = call(
        q,
        kv,
        *(array.astype(jnp.int32) for array in (*rows, tiles.row, tiles.offset, tiles.tokens)),
        own,
        layer=np.int64(layer_index),
        window=np.int64(window),
        chunk=np.int64(chunk),
        scale=np.float32(attend.scale),
        softcap=np.float32(attend.softcap or 0.0),
    )
    return out

"""The hook of the step for layers that leave norms of heads, rotation and the KV write to one kernel."""

import jax
from jaxtyping import Array, Float, Shaped

from jswa.exec.backends import Backends
from jswa.model.glue.projection import Projection
from pallas_kernels.attention.api import packed_rows
from pallas_kernels.attention.rows import Attend, Packed, Rows, Tiles
from pallas_kernels.glue.api import rotate_and_write
from pallas_kernels.glue.plan import Cells


def write_projection(
    backends: Backends,
    own: Projection,
    view: Shaped[Array, "P S K p E"],
    cells: Cells,
    rows: Rows,
    tiles: Tiles,
    attend: Attend,
) -> tuple[Shaped[Array, "P S K p E"], Float[Array, "T H D"] | Packed]:
    """Write a layer's K and V to its pages; return the pages and the queries, as the attention kernel reads them."""
    heads, tokens = own.heads, own.qkv.values.shape[1]
    shape = jax.ShapeDtypeStruct((tokens, heads.heads, heads.head_dim), own.dtype)  # type: ignore[no-untyped-call]
    packed = packed_rows(shape, view, rows, tiles, attend, backends.attention, backends.sms)  # type: ignore[arg-type]
    heads = heads._replace(rows=packed or heads.group)
    q, view = rotate_and_write(
        own.qkv,
        view,
        heads,
        own.weights,
        own.rope,
        cells,
        own.dtype,
        temperature=own.temperature,
        implementation=own.implementation,
    )
    return view, Packed(q, heads.group) if packed else q.reshape(tokens, heads.heads, heads.head_dim)

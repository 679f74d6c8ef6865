"""Copies pages to the host and back, in slots: a full page is one slot, a local page m consecutive slots.

Both programs work in batches of one fixed width. They depend on the state alone, so they may be launched between any
two steps: a read sees what the last launched step wrote, and the next step sees what was written.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from jswa.cache.layout import KVLayout
from jswa.exec.mesh import COLUMNS, mesh_of, on_mesh, specs_of
from jswa.exec.programs.state import DeviceState

WIDTH = 32  # slots per launch
_READS_AHEAD = 2


def read_slots(state: DeviceState, ids: Int[Array, " width"], *, layout: KVLayout) -> list[Float[Array, "width elems"]]:
    """Return the contents of slots, for each lane. Ids ≥ the number of slots are padding and return garbage."""
    slots = state["lanes"][0].shape[1] * layout.pages_per_block
    return [lane.reshape(slots, -1).at[ids].get(mode="clip") for lane in state["lanes"]]


def write_slots(
    state: DeviceState, ids: Int[Array, " width"], contents: list[Float[Array, "width elems"]], *, layout: KVLayout
) -> DeviceState:
    """Overwrite slots in each lane. Ids must be distinct; ids ≥ the number of slots are padding.

    The state is donated.
    """
    slots = state["lanes"][0].shape[1] * layout.pages_per_block
    lanes = [
        lane.reshape(slots, -1).at[ids].set(new, mode="drop", unique_indices=True).reshape(lane.shape)
        for lane, new in zip(state["lanes"], contents, strict=True)
    ]
    return {**state, "lanes": lanes}


def slot_batch(ids: Int[np.ndarray, " n"], num_slots: int) -> Int[np.ndarray, " width"]:
    """Pad at most `WIDTH` ids with distinct ids past the end."""
    out = num_slots + np.arange(WIDTH, dtype=np.int32)
    out[: len(ids)] = ids
    return out


def gather(
    read: Callable[[Int[np.ndarray, " width"]], list[jax.Array]],
    ids: Int[np.ndarray, " n"],
    num_slots: int,
    like: list[jax.ShapeDtypeStruct],
) -> list[Shaped[np.ndarray, "n elems"]]:
    """Read any number of slots, batch by batch, a few batches ahead. `like`: shapes of one batch, for each lane."""
    out = [np.empty((len(ids), batch.shape[1]), batch.dtype) for batch in like]
    under_way: deque[tuple[int, list[jax.Array]]] = deque()

    def take() -> None:
        start, lanes = under_way.popleft()
        for whole, lane in zip(out, jax.device_get(lanes), strict=True):
            part = whole[start : start + WIDTH]
            part[:] = lane[: len(part)]

    for start in range(0, len(ids), WIDTH):
        lanes = read(slot_batch(ids[start : start + WIDTH], num_slots))
        for lane in lanes:
            lane.copy_to_host_async()
        under_way.append((start, lanes))
        if len(under_way) > _READS_AHEAD:
            take()
    while under_way:
        take()
    return out


def clear_stale(
    contents: list[Shaped[np.ndarray, "slots elems"]],
    layout: KVLayout,
    full: Int[np.ndarray, " F"],
    local: Int[np.ndarray, " L"],
) -> None:
    """Zero, in place, the parts of saved pages that no layer reads: they may hold texts of other users.

    Args:
        contents: for each lane, and in it for each device, the full pages, then the local pages.
        full, local: number of tokens in each page.
    """
    p, pages = layout.page_size, len(full)
    for number, lane in enumerate(contents):
        if layout.full is not None:
            view = lane[:pages].reshape(pages, layout.full.num_kv_heads, p, layout.full.row)
            for page in np.flatnonzero(full < p).tolist():
                view[page, :, full[page] :] = 0
        if layout.local is not None:
            kind, owner = layout.local, number // layout.devices
            view = lane[pages:].reshape(len(local), kind.layers_per_page, kind.num_kv_heads, p, kind.row)
            used = len({own.index for own in layout.layers if (own.kind, own.lane) == ("local", owner)})
            view[:, used:] = 0
            for page in np.flatnonzero(local < p).tolist():
                view[page, :, :, local[page] :] = 0


def compile_read_slots(layout: KVLayout, state: DeviceState) -> jax.stages.Compiled:
    """Compile `read_slots` ahead of time, from arrays or shapes. Contents of several devices lie side by side."""
    ids, function = np.zeros(WIDTH, np.int32), partial(read_slots, layout=layout)
    run = on_mesh(function, mesh_of(state["lanes"][0]), (state, ids), COLUMNS)
    return jax.jit(run).lower(state, ids).compile()


def compile_write_slots(layout: KVLayout, state: DeviceState) -> jax.stages.Compiled:
    """Compile `write_slots` ahead of time. The state is donated."""
    arguments = state, np.zeros(WIDTH, np.int32), slot_shapes(layout, state)
    run = on_mesh(partial(write_slots, layout=layout), mesh_of(state["lanes"][0]), arguments, specs_of(state))
    return jax.jit(run, donate_argnums=0).lower(*arguments).compile()


def slot_shapes(layout: KVLayout, state: DeviceState) -> list[jax.ShapeDtypeStruct]:
    """Return the shape of one batch of slots, for each lane."""
    elems, mesh = layout.devices * layout.block_elems // layout.pages_per_block, mesh_of(state["lanes"][0])
    spread = None if mesh is None else NamedSharding(mesh, COLUMNS)
    return [
        jax.ShapeDtypeStruct((WIDTH, elems), lane.dtype, sharding=spread)  # type: ignore[no-untyped-call]
        for lane in state["lanes"]
    ]

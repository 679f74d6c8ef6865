"""Copies pages to the host and back, in slots: a full page is one slot, a local page m consecutive slots.

Both programs work in batches of one fixed width, of at most 16 MiB on each device. They depend on the state alone, so
they may be launched between any two steps: a read sees what the last launched step wrote, and the next step sees what
was written.
"""

from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from jswa.cache.layout import KVLayout
from jswa.exec.compile.store import ProgramStore, compiled, named
from jswa.exec.mesh import COLUMNS, mesh_of, on_mesh, specs_of
from jswa.exec.programs.state import DeviceState

MOST_BYTES = 16 * 2**20  # of a batch on each device, unless one slot is larger
_MOST_SLOTS = 32


def copy_width(layout: KVLayout, itemsize: int) -> int:
    """Return the slots of a batch, a power of two: batches are the scratch memory of copies."""
    slot = layout.slab_bytes(itemsize) // layout.pages_per_slab
    return 1 << (max(1, min(_MOST_SLOTS, MOST_BYTES // slot)).bit_length() - 1)


def read_slots(state: DeviceState, ids: Int[Array, " width"], *, layout: KVLayout) -> list[Float[Array, "width elems"]]:
    """Return the contents of slots, for each lane. Ids ≥ the number of slots are padding and return garbage."""
    slots = state["lanes"][0].shape[1] * layout.pages_per_slab
    return [lane.reshape(slots, -1).at[ids].get(mode="clip") for lane in state["lanes"]]


def write_slots(
    state: DeviceState, ids: Int[Array, " width"], contents: list[Float[Array, "width elems"]], *, layout: KVLayout
) -> DeviceState:
    """Overwrite slots in each lane. Ids must be distinct; ids ≥ the number of slots are padding.

    The state is donated.
    """
    slots = state["lanes"][0].shape[1] * layout.pages_per_slab
    lanes = [
        lane.reshape(slots, -1).at[ids].set(new, mode="drop", unique_indices=True).reshape(lane.shape)
        for lane, new in zip(state["lanes"], contents, strict=True)
    ]
    return {**state, "lanes": lanes}


def slot_batch(ids: Int[np.ndarray, " n"], num_slots: int, width: int) -> Int[np.ndarray, " width"]:
    """Pad at most `width` ids with distinct ids past the end."""
    out = num_slots + np.arange(width, dtype=np.int32)
    out[: len(ids)] = ids
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
            parts = layout.full.parts
            view = lane[:pages].reshape(pages, layout.full.num_kv_heads, p // parts, layout.full.row)
            held = -((number % layout.devices % parts - full) // parts)  # tokens of each page in this part
            for page in np.flatnonzero(full < p).tolist():
                view[page, :, held[page] :] = 0
        if layout.local is not None:
            kind, owner = layout.local, number // layout.devices
            view = lane[pages:].reshape(len(local), kind.layers_per_page, kind.num_kv_heads, p, kind.row)
            used = len({own.index for own in layout.layers if (own.kind, own.lane) == ("local", owner)})
            view[:, used:] = 0
            for page in np.flatnonzero(local < p).tolist():
                view[page, :, :, local[page] :] = 0


def compile_read_slots(layout: KVLayout, state: DeviceState, store: ProgramStore | None = None) -> jax.stages.Compiled:
    """Compile `read_slots` ahead of time, from arrays or shapes. Contents of several devices lie side by side."""
    ids, function = np.zeros(_width(layout, state), np.int32), partial(read_slots, layout=layout)
    run = on_mesh(function, mesh_of(state["lanes"][0]), (state, ids), COLUMNS)
    return compiled(store, named(function), jax.jit(run), (state, ids))


def compile_write_slots(layout: KVLayout, state: DeviceState, store: ProgramStore | None = None) -> jax.stages.Compiled:
    """Compile `write_slots` ahead of time. The state is donated."""
    arguments = state, np.zeros(_width(layout, state), np.int32), slot_shapes(layout, state)
    function = partial(write_slots, layout=layout)
    run = on_mesh(function, mesh_of(state["lanes"][0]), arguments, specs_of(state))
    return compiled(store, named(function), jax.jit(run, donate_argnums=0), arguments)


def slot_shapes(layout: KVLayout, state: DeviceState) -> list[jax.ShapeDtypeStruct]:
    """Return the shape of one batch of slots, for each lane."""
    elems, mesh = layout.devices * layout.slab_elems // layout.pages_per_slab, mesh_of(state["lanes"][0])
    spread, width = None if mesh is None else NamedSharding(mesh, COLUMNS), _width(layout, state)
    return [
        jax.ShapeDtypeStruct((width, elems), lane.dtype, sharding=spread)  # type: ignore[no-untyped-call]
        for lane in state["lanes"]
    ]


def _width(layout: KVLayout, state: DeviceState) -> int:
    return copy_width(layout, state["lanes"][0].dtype.itemsize)

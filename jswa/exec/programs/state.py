"""The device state: the arrays that stay on the device between steps and are donated to each."""

from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.mesh import BY_DEVICE, REPLICATED, mesh_of, shard_elems
from jswa.exec.programs.drafts.lookup import Texts, init_texts
from jswa.exec.programs.logits_state import LogitsState, init_logits_state


class SamplingState(TypedDict):
    """The part of the state that only sampling writes, so that its program gets no more than that."""

    length: Int[Array, " max_rows"]
    last_token: Int[Array, " max_rows"]
    for_logits: LogitsState
    carry: Float[Array, "max_rows C"] | None


class DeviceState(TypedDict):
    """The state that every step gets and returns; only the runner holds it. [max_rows] is indexed by row id.

    Attributes:
        lanes: KV arena, one array `[devices, num_slabs, slab_elems]` per lane; within a step the first
            axis is 1, the device's own. Slab 0 stays zero. All other arrays are on every device.
        full_table, local_table: page id by absolute page position; entries of freed pages are stale.
        length: the position from which each row goes on, if its start is FROM_DEVICE in the plan. Without speculation
            no start is, and steps leave it as it was.
        last_token: the token that each row sampled last.
        for_logits: the logits state: counts, biases and masks of the rows that have penalties or constraints.
        texts: in which drafts are looked up; None without.
        carry: what a drafter with weights keeps of each row's last token that was run; None if that is nothing.
        draft_lanes: KV of a drafter's full layers, one array `[devices, num_slabs, elems]` per layer.
    """

    lanes: list[Float[Array, "devices slabs elems"]]
    full_table: Int[Array, "max_rows N"]
    local_table: Int[Array, "max_rows N"]
    length: Int[Array, " max_rows"]
    last_token: Int[Array, " max_rows"]
    for_logits: LogitsState
    texts: Texts | None
    carry: Float[Array, "max_rows C"] | None
    draft_lanes: list[Float[Array, "devices slabs elems"]]


class Carry(NamedTuple):
    """What a drafter keeps of a row: so many numbers of a type."""

    size: int
    dtype: jnp.dtype


def init_state(
    layout: KVLayout, limits: Limits, vocab: int, dtype: jnp.dtype, carry: Carry | None = None
) -> DeviceState:
    """Return the state of an engine that has run nothing yet."""
    speculation = limits.speculation
    texts = None
    if speculation is not None and speculation.looks_up:
        texts = init_texts(limits.max_rows, speculation.history, speculation.reference)
    lane, table = (layout.devices, limits.num_slabs, layout.slab_elems), (limits.max_rows, limits.pages_per_row)
    return DeviceState(
        lanes=[jnp.zeros(lane, dtype) for _ in range(layout.num_lanes)],
        full_table=jnp.zeros(table, jnp.int32),
        local_table=jnp.zeros(table, jnp.int32),
        length=jnp.zeros(limits.max_rows, jnp.int32),
        last_token=jnp.zeros(limits.max_rows, jnp.int32),
        for_logits=init_logits_state(limits.max_rows, vocab, 0 if speculation is None else speculation.programs[-1]),
        texts=texts,
        carry=None if carry is None else jnp.zeros((limits.max_rows, carry.size), carry.dtype),
        draft_lanes=[jnp.zeros((*lane[:2], elems), dtype) for elems in layout.draft_slab_elems],
    )


def state_shapes(
    layout: KVLayout,
    limits: Limits,
    vocab: int,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    carry: Carry | None = None,
) -> DeviceState:
    """Return the state's `jax.ShapeDtypeStruct`s, sharded over a mesh; nothing is allocated."""
    shapes: DeviceState = jax.eval_shape(lambda: init_state(layout, limits, vocab, dtype, carry))
    if mesh is None:
        return shapes

    def spread(shape: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))  # type: ignore[no-untyped-call]

    lanes, drafts = ([spread(lane, BY_DEVICE) for lane in found] for found in (shapes["lanes"], shapes["draft_lanes"]))
    others: DeviceState = {**shapes, "lanes": [], "draft_lanes": []}
    rest: DeviceState = jax.tree.map(lambda shape: spread(shape, REPLICATED), others)
    return {**rest, "lanes": lanes, "draft_lanes": drafts}


def allocate(
    layout: KVLayout, limits: Limits, vocab: int, shapes: DeviceState, carry: Carry | None = None
) -> DeviceState:
    """Allocate `init_state` with the shardings of `shapes`; no device ever has more than its own part."""
    dtype = jnp.dtype(shapes["lanes"][0].dtype)
    if mesh_of(shapes["lanes"][0]) is None:
        return init_state(layout, limits, vocab, dtype, carry)
    where = jax.tree.map(lambda shape: shape.sharding, shapes)
    state: DeviceState = jax.jit(partial(init_state, layout, limits, vocab, dtype, carry), out_shardings=where)()
    return state


def state_bytes(state: DeviceState) -> int:
    """Return the bytes of all arrays of the state, on each device."""
    return sum(shard_elems(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

"""The one jitted function of a step: (params, state, packed inputs) -> (state, tokens). State is donated."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax, named_scope
from jaxtyping import Array, Float, Int

from jswa.cache.layout import KVLayout
from jswa.config import ModelConfig
from jswa.exec.buckets import Bucket
from jswa.exec.indices import StepIndices, step_indices
from jswa.exec.pack import Inputs, PackSpec, unpack
from jswa.exec.sampling import sample
from jswa.exec.state import DeviceState
from jswa.model.transformer import Params, bind
from jswa.types import FROM_DEVICE
from pallas_kernels.api import Attend, Implementation, paged_attention, write_kv


@dataclass(frozen=True)
class StepConfig:
    """Everything static about a step: hashable, one compiled program each."""

    model: ModelConfig
    layout: KVLayout
    bucket: Bucket
    pack: PackSpec
    implementation: Implementation = "xla"


def step(
    params: Params, state: DeviceState, packed: Int[Array, " size"], *, config: StepConfig
) -> tuple[DeviceState, Int[Array, " R"]]:
    """Run one step. Returns the next state and a token per row (garbage for rows that sample none)."""
    inputs = unpack(packed, config.pack)
    state, logits = forward(params, state, inputs, config=config)
    with named_scope("sampling"):
        sampled = sample(
            logits,
            inputs.column("start") + inputs.column("count"),
            temperature=_bits(inputs, "temperature", jnp.float32),
            top_k=inputs.column("top_k"),
            top_p=_bits(inputs, "top_p", jnp.float32),
            keys=jnp.stack([_bits(inputs, "key_high", jnp.uint32), _bits(inputs, "key_low", jnp.uint32)], axis=-1),
        )
    slots = jnp.where(inputs.column("samples") != 0, inputs.column("slot"), config.pack.max_rows)
    last_token = state["last_token"].at[slots].set(jnp.maximum(sampled, 0), mode="drop")
    return {**state, "last_token": last_token}, sampled


def forward(
    params: Params, state: DeviceState, inputs: Inputs, *, config: StepConfig
) -> tuple[DeviceState, Float[Array, "R V"]]:
    """Enter the plan's pages, run its tokens through the model, and return the logits after each row's last token."""
    with named_scope("indices"):
        full_table = _enter(state["full_table"], inputs.full_pages)
        local_table = _enter(state["local_table"], inputs.local_pages)
        state = {**state, "full_table": full_table, "local_table": local_table}
        indices = step_indices(inputs, state, layout=config.layout, bucket=config.bucket)
        # A row whose next token the host does not know yet runs the one it sampled last.
        previous = state["last_token"].at[indices.token_slots].get(mode="fill", fill_value=0)
        tokens = jnp.where(inputs.tokens == FROM_DEVICE, previous, inputs.tokens)
    lanes = list(state["lanes"])
    model = bind(config.model, params)

    def attend(
        layer: int, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K V"]
    ) -> Float[Array, "T H V"]:
        lane = config.layout.layers[layer].lane
        lanes[lane], out = _attend(config, indices, layer, lanes[lane], q, k, v)
        return out

    hidden = model(tokens, indices.positions, attend)
    with named_scope("logits"):
        logits = model.logits(hidden[indices.last_tokens])
    return {**state, "lanes": lanes}, logits


def _attend(
    config: StepConfig,
    indices: StepIndices,
    layer: int,
    lane: Float[Array, "1 blocks elems"],
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
) -> tuple[Float[Array, "1 blocks elems"], Float[Array, "T H V"]]:
    """Write the layer's KV to its place in the lane, then attend. The reshapes are bitcasts: the lane stays put."""
    layout, place = config.layout, config.layout.layers[layer]
    shape, kind = (layout.full, indices.full) if place.kind == "full" else (layout.local, indices.local)
    assert shape is not None
    assert kind is not None
    attention = config.model.layers[layer].attention
    view = lane.reshape(
        lane.shape[1] * shape.pages_per_block,
        shape.slots,
        shape.num_kv_heads,
        layout.page_size,
        shape.head_dim + shape.v_head_dim,
    )
    with named_scope("attention"):
        view = write_kv(view, k, v, pages=kind.write_pages, offsets=kind.write_offsets, slot=place.slot)
        out = paged_attention(
            q,
            view,
            kind.rows,
            indices.tiles,
            slot=place.slot,
            attend=Attend(attention.scale, attention.window, attention.softcap),
            implementation=config.implementation,
        )
    return view.reshape(lane.shape), out


def _enter(table: Int[Array, "max_rows N"], entries: Int[Array, "U 3"]) -> Int[Array, "max_rows N"]:
    """The table with the plan's new pages; entries of the slot that does not exist are dropped."""
    return table.at[entries[:, 0], entries[:, 1]].set(entries[:, 2], mode="drop")


def _bits(inputs: Inputs, name: str, dtype: type) -> Array:
    return lax.bitcast_convert_type(inputs.column(name), dtype)

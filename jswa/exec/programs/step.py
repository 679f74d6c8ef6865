"""The jitted functions of a step: (params, state, packed inputs) -> (state, tokens). State is donated.

`step` runs a whole step. A step in which some row's mask depends on a token that the host does not know yet runs in two
halves: `forward_half` ends at hidden states, the host fills the masks meanwhile, and `finish_half` samples. Since masks
depend on drafts too, `propose_drafts` runs before if rows have any.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, named_scope
from jaxtyping import Array, Bool, Float, Int

from jswa.exec.pack import Inputs, column, unpack
from jswa.exec.programs.attend import Cells, attend_pages, static
from jswa.exec.programs.beside import of_tokens
from jswa.exec.programs.config import StepConfig, decoder_of, layer_scales, layer_tile_tokens
from jswa.exec.programs.drafts.propose import make_drafts, note_texts, with_drafts
from jswa.exec.programs.indices import StepIndices, by_token, enter_pages, places_of, row_spans, running, step_indices
from jswa.exec.programs.logits_state import LogitsState, count_tokens, note_recent
from jswa.exec.programs.sampling.rows import Beside, Sampling, StepOutputs
from jswa.exec.programs.sampling.verify import Draws, accepted, draw, proposed
from jswa.exec.programs.state import DeviceState, SamplingState
from jswa.model.binding import bind_head
from jswa.model.collectives import true_on_all
from jswa.model.fused_projection import Projection
from jswa.model.transformer import Params
from jswa.plan import FROM_DEVICE, NOT_FINITE, PAST_LIMIT, SAMPLING
from jswa.ribs.table import VARIANTS

Queries = Float[Array, "T H D"] | Projection
Stored = Float[Array, "T K E"] | None
Carried = Float[Array, "T C"] | None
Experts = Int[Array, "N L k"] | None


class Half(NamedTuple):
    """The first half's result for the second: of R rows, at S places that each are behind K = S - 1 drafts or fewer.

    Attributes:
        rows: the packed records.
        first: one past the last position that each row has run, but for its drafts.
        runs: whether it has run any.
        samples: whether tokens are drawn of it.
        drafts: its drafts, ABSENT behind the last.
        hidden: the hidden states before the draws.
        finite: whether the KV is finite: of the row's tokens but for its drafts, then of each draft.
        carry: what a drafter with weights carries on behind each place; None if that is nothing.
    """

    rows: Int[Array, "R C"]
    first: Int[Array, " R"]
    runs: Bool[Array, " R"]
    samples: Bool[Array, " R"]
    drafts: Int[Array, "R K"]
    hidden: Float[Array, "R S M"]
    finite: Bool[Array, "R S"]
    carry: Float[Array, "R S C"] | None = None


def step(
    params: Params, state: DeviceState, packed: Int[Array, " size"], *, config: StepConfig
) -> tuple[DeviceState, StepOutputs]:
    """Run one step; return the next state and the outputs. With several devices, each runs it on its shards."""
    state, half, beside = _forward_rows(params, state, packed, config)
    sampled, outputs = finish_half(params, sampling_state(state), half, config=config)
    return {**state, **sampled}, outputs._replace(**beside._asdict())


def propose_drafts(
    params: Params, state: DeviceState, packed: Int[Array, " size"], *, config: StepConfig
) -> tuple[DeviceState, Int[Array, "R K"]]:
    """Return the state and the drafts of a step, ABSENT behind the last of a row; the step itself has yet to run."""
    inputs = unpack(packed, config.pack)
    with named_scope("indices"):
        state = enter_pages(state, inputs, config.layout)
    return make_drafts(params, state, inputs, config, partial(_index, state, inputs, None, config))


def forward_half(
    params: Params,
    state: DeviceState,
    packed: Int[Array, " size"],
    drafts: Int[Array, "R K"] | None = None,
    *,
    config: StepConfig,
) -> tuple[DeviceState, Half, Beside]:
    """Run a step up to the hidden states, and what a rib computes of all of them.

    `drafts`: those of `propose_drafts`; None if the step can have none.
    """
    state, half, beside = _forward_rows(params, state, packed, config, drafts)
    with named_scope("sampling"):
        return state, half._replace(finite=true_on_all(half.finite, config.model.devices)), beside


def sampling_state(state: DeviceState) -> SamplingState:
    """Return the part of the state that the second half reads and writes."""
    return {
        "length": state["length"],
        "last_token": state["last_token"],
        "for_logits": state["for_logits"],
        "carry": state["carry"],
    }


def finish_half(
    params: Params, state: SamplingState, half: Half, *, config: StepConfig
) -> tuple[SamplingState, StepOutputs]:
    """Run the rest of a step: head, masks, sampling, and what a rib computes of the draws.

    The masks are those that the state has by now. Of the parameters, those of the head are enough. The outputs lack
    what the first half has computed (`Beside`).
    """
    rows, devices = half.rows, config.model.devices

    def run() -> Draws:
        own = config.kernels
        head = bind_head(config.model, params, half.hidden.dtype, own.linear, own.sums, own.sms)
        return draw(
            head.logits,
            half.hidden,
            half.first,
            half.drafts,
            Sampling.of(rows[:, -len(SAMPLING) :]),
            state["for_logits"],
            half.finite,
            runs=half.runs,
            room=config.bucket.tokens,
            vocab=config.model.vocab_size // devices,
            devices=devices,
            hooks=config.drawing,
            deterministic=config.deterministic,
            sampler=own.sampling,
            sums=own.sums,
        )

    def skip() -> Draws:
        finite = true_on_all(half.finite & jnp.isfinite(half.hidden).all(axis=-1), devices)
        none = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(run).beside)
        return Draws(jnp.where(finite, 0, NOT_FINITE), none)

    # Every decode step samples; a chunk inside a prompt does not need the head, which may be a tenth of the weights.
    if config.bucket.decode:
        draws = run()
    else:
        with named_scope("sampling"):
            draws = lax.cond(half.samples.any(), run, skip)
    with named_scope("sampling"):
        right = jnp.where(half.samples, accepted(draws.tokens, half.drafts), 0)
        row_ids, length = column(rows, "row_id"), state["length"]
        if config.speculation is not None:  # without drafts the plan has all lengths
            length = length.at[row_ids].set(half.first + right, mode="drop")
        last = jnp.take_along_axis(draws.tokens, right[:, None], axis=1)[:, 0]
        sampled = jnp.where(half.samples, row_ids, config.pack.max_rows)
        last_token = state["last_token"].at[sampled].set(jnp.maximum(last, 0), mode="drop")
        carry, logits_state = state["carry"], state["for_logits"]
        if carry is not None and half.carry is not None:
            own = jnp.take_along_axis(half.carry, right[:, None, None], axis=1)[:, 0]
            carry = carry.at[row_ids].set(own, mode="drop")
        if config.bucket.drafts:
            logits_state = _count_right(logits_state, half.drafts, right, column(rows, "logits_state"))
    sampled_state: SamplingState = {
        **state, "length": length, "last_token": last_token, "carry": carry, "for_logits": logits_state,
    }  # fmt: skip
    return sampled_state, StepOutputs(_sent_tokens(draws, half, right, config), draws.beside)


def _sent_tokens(
    draws: Draws, half: Half, right: Int[Array, " R"], config: StepConfig
) -> Int[Array, " R"] | Int[Array, "R C"]:
    """Return the tokens that the host gets; see `StepOutputs`. `right`: how many drafts of each row are right."""
    tokens = draws.tokens[:, 0]
    if config.bucket.drafts:
        count = jnp.where(half.runs, right + 1, 0)
        return jnp.concatenate([draws.tokens, count[:, None], proposed(half.drafts)[:, None]], axis=1)
    return tokens if config.speculation is None else jnp.where(half.runs, tokens, PAST_LIMIT)


def _count_right(
    logits_state: LogitsState, drafts: Int[Array, "R K"], right: Int[Array, " R"], row_ids: Int[Array, " R"]
) -> LogitsState:
    """Count the right drafts of rows among their generated tokens; `row_ids` as in `count_tokens`."""
    counted = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < right[:, None]
    owners = jnp.broadcast_to(row_ids[:, None], drafts.shape)
    return count_tokens(logits_state, jnp.maximum(drafts, 0).reshape(-1), owners.reshape(-1), counted.reshape(-1))


def _forward_rows(
    params: Params,
    state: DeviceState,
    packed: Int[Array, " size"],
    config: StepConfig,
    drafts: Int[Array, "R K"] | None = None,
) -> tuple[DeviceState, Half, Beside]:
    inputs, bucket = unpack(packed, config.pack), config.bucket
    # Some ribs and drafts need every token's hidden state, sampling only each row's last. If a deterministic engine
    # computed these alone, XLA would fuse the last layer otherwise, and round otherwise.
    variant = VARIANTS[config.variant]
    every = variant.every or bucket.drafts > 0 or config.deterministic or _shared_tail_too(config)
    state, hidden, indices, drafts, finite, carry, experts = forward(
        params, state, inputs, config=config, every=every, drafts=drafts
    )
    of_all = of_tokens(config, params, hidden, inputs, indices) if variant.every else {}
    places = places_of(indices, bucket)
    drawn = experts[places.reshape(-1)] if experts is not None and every else experts
    beside = Beside(of_all, drawn, experts if of_all else None)
    hidden = hidden[places] if every else hidden[:, None]
    if carry is not None:
        carry = carry[places]
    elif config.placed is not None and config.placed.only_last:
        carry = hidden
    runs = indices.counts > 0
    samples = (inputs.column("samples") != 0) & runs
    first = indices.starts + indices.counts - indices.drafts
    return state, Half(inputs.rows, first, runs, samples, drafts, hidden, finite, carry), beside


def _shared_tail_too(config: StepConfig) -> bool:
    """Return whether a drafter reads all tokens' hidden states from layers that run for the last tokens alone."""
    return config.placed is not None and not config.placed.only_last and config.model.has_tail


def forward(
    params: Params,
    state: DeviceState,
    inputs: Inputs,
    *,
    config: StepConfig,
    every: bool,
    drafts: Int[Array, "R K"] | None = None,
) -> tuple[DeviceState, Float[Array, "N M"], StepIndices, Int[Array, "R K"], Bool[Array, "R S"], Carried, Experts]:
    """Set the plan's page-table entries, draft tokens unless they are given, and run the tokens through the model.

    Returns a hidden state for `every` token, or for each row's last token; then the layers at the end that store no KV
    run for the last tokens alone. The last results are the rows' drafts, whether this device's KV of its tokens (see
    `Half`) is finite, what a drafter with weights carries on behind each token, unless that is the hidden state, and
    the experts of each token that has a hidden state (`StepOutputs.experts`), if the program gives them.
    """
    placed, decoder = config.placed, decoder_of(config, params)
    with named_scope("indices"):
        state = enter_pages(state, inputs, config.layout)
    if not config.bucket.drafts:
        drafts = jnp.zeros((config.bucket.rows, 0), jnp.int32)
    elif drafts is None:
        state, drafts = make_drafts(params, state, inputs, config, partial(_index, state, inputs, None, config))
    tokens, indices = _index(state, inputs, drafts, config)
    with named_scope("drafts"):
        tokens = with_drafts(tokens, drafts, indices) if config.bucket.drafts else tokens
        if state["texts"] is not None:
            state = {**state, "texts": note_texts(state["texts"], tokens, indices)}
    with named_scope("logits_state"):
        spread = partial(by_token, token_rows=indices.token_rows, bucket=config.bucket)
        generated = indices.positions >= spread(inputs.column("prompt_length"))
        if config.bucket.drafts:  # which count if they are right
            place = jnp.arange(config.bucket.tokens, dtype=jnp.int32) - spread(indices.first_token)
            generated &= place < spread(indices.counts - indices.drafts)
        row_ids = jnp.where(indices.real, spread(inputs.column("logits_state")), config.pack.max_rows)
        logits_state = count_tokens(state["for_logits"], tokens, row_ids, generated)
        ends = spread(indices.starts + indices.counts)
        logits_state = note_recent(logits_state, tokens, row_ids, indices.positions, ends)
    lanes, scales = list(state["lanes"]), partial(layer_scales, params, state, config)
    taps, chosen = dict[int, Array](), dict[int, Array]()
    finite = jnp.ones((config.bucket.rows, 1 + config.bucket.drafts), bool)

    def attend(layer: int, q: Queries, kv: Stored, sinks: Float[Array, " H"] | None) -> Float[Array, "T H V"]:
        nonlocal finite
        stored = q.stored() if isinstance(q, Projection) else kv
        if layer == config.model.tail - 1 and stored is not None:
            finite = _finite_rows(stored, indices, config)
        lane, last = config.layout.layers[layer].lane, not every and layer >= config.model.tail
        lanes[lane], out = attend_layer(config, indices, layer, lanes[lane], q, kv, sinks, scales(layer), last=last)
        return out

    # The tokens of a decode step without drafts are each row's last.
    select = None if every or (config.bucket.decode and not config.bucket.drafts) else indices.last_tokens
    adapters = None if inputs.adapters is None else spread(inputs.adapters)
    tap = None if placed is None or placed.only_last else taps.__setitem__
    routed = chosen.__setitem__ if config.experts else None
    stand_ins = _stand_ins(indices) if config.kernels.routing == "triton" else None
    rows = None if inputs.embedded is None else _rows_of(inputs.embedded, indices, config)
    hidden = decoder(tokens, indices.positions, attend, select, adapters, tap, routed, stand_ins, rows)
    experts = _experts(chosen, select, config.model.tail) if config.experts else None
    state, carry = {**state, "lanes": lanes, "for_logits": logits_state}, None
    if placed is not None and not placed.only_last:
        with named_scope("drafts"):
            words = tokens if rows is None else jnp.maximum(tokens, 0)
            state, carry = placed.absorb(params, decoder, state, words, indices, taps)
    return state, hidden, indices, drafts, finite, carry, experts


def _index(
    state: DeviceState, inputs: Inputs, drafts: Int[Array, "R K"] | None, config: StepConfig
) -> tuple[Int[Array, " T"], StepIndices]:
    """Return the tokens of the step, without drafts, and its indices.

    `drafts`: of rows that share the step's tokens, each of which runs no more than it has; None: all that are planned.
    """
    with named_scope("indices"):
        own = inputs
        if config.bucket.shared and drafts is not None:
            own = running(inputs, row_spans(inputs, state), proposed(drafts))
        sizes = [layer_tile_tokens(config, layer) for layer in range(len(config.model.layers))]
        sizes += [] if config.placed is None else config.placed.tile_sizes
        known = config.speculation is None
        indices = step_indices(own, state, layout=config.layout, bucket=config.bucket, tile_tokens=sizes, known=known)
        # A row whose next token the host does not know yet runs the token that it sampled last.
        previous = state["last_token"].at[indices.token_row_ids].get(mode="fill", fill_value=0)
        tokens = inputs.tokens[indices.token_rows] if config.bucket.shared else inputs.tokens
        return jnp.where(tokens == FROM_DEVICE, previous, tokens), indices


def _rows_of(bits: Int[Array, "T M"], indices: StepIndices, config: StepConfig) -> Float[Array, "T M"]:
    """Return the rows that tokens get in place of their embeddings."""
    with named_scope("indices"):
        rows = lax.bitcast_convert_type(bits, jnp.float32)
        return rows[indices.token_rows] if config.bucket.shared else rows


def _stand_ins(indices: StepIndices) -> Int[Array, " T"]:
    """Return the token whose experts each token has: of padding the first that runs, so that it reads no others."""
    with named_scope("indices"):
        return jnp.where(indices.real, jnp.arange(len(indices.real), dtype=jnp.int32), jnp.argmax(indices.real))


def _experts(chosen: dict[int, Array], select: Int[Array, " R"] | None, tail: int) -> Int[Array, "N L k"]:
    """Return the experts of each token that has a hidden state; layers from `tail` on run for the selected alone."""
    most = max(ids.shape[1] for ids in chosen.values())
    own = [ids if select is None or layer >= tail else ids[select] for layer, ids in sorted(chosen.items())]
    padded = [jnp.pad(ids, ((0, 0), (0, most - ids.shape[1])), constant_values=-1) for ids in own]
    return jnp.stack(padded, axis=1).astype(jnp.int16)


def _finite_rows(kv: Float[Array, "T K E"], indices: StepIndices, config: StepConfig) -> Bool[Array, "R S"]:
    """Return whether the KV of a row's tokens is finite (see `Half`), given that of the last layer that stores any.

    A token sees its own KV: where that is not finite in one layer, neither is the residual stream behind it, nor the KV
    of later layers.
    """
    with named_scope("sampling"):  # which reports it, once a step
        bad = indices.real & ~jnp.isfinite(kv).all(axis=(1, 2))
        if config.bucket.decode and not config.bucket.shared:
            return ~bad.reshape(config.bucket.rows, -1)  # place i of the rows has token i
        rows = jnp.arange(config.bucket.rows, dtype=jnp.int32)
        own = indices.token_rows[None] == rows[:, None]
        if not config.bucket.drafts:
            return ~(own & bad[None]).any(axis=1, keepdims=True)
        drafted = jnp.arange(len(bad)) >= (indices.first_token + indices.counts - indices.drafts)[indices.token_rows]
        whole = ~(own & (bad & ~drafted)[None]).any(axis=1)
        return jnp.concatenate([whole[:, None], ~bad[places_of(indices, config.bucket)][:, 1:]], axis=1)


def attend_layer(
    config: StepConfig,
    indices: StepIndices,
    layer: int,
    lane: Float[Array, "1 slabs elems"],
    q: Float[Array, "T H D"] | Projection,
    kv: Float[Array, "T K E"] | None,
    sinks: Float[Array, " H"] | None,
    kv_scales: Float[Array, "2 K"] | None,
    *,
    last: bool,
) -> tuple[Float[Array, "1 slabs elems"], Float[Array, "T H V"]]:
    """Write the layer's KV to the lane, unless it reads another layer's, and attend; see `attend_pages`.

    Args:
        last: the queries are each row's last token.
    """
    layout, own = config.layout, config.layout.layers[layer]
    shape, kind = (layout.full, indices.full) if own.kind == "full" else (layout.local, indices.local)
    assert shape is not None
    assert kind is not None
    tiles = indices.last_tiles if last else indices.tiles[layer_tile_tokens(config, layer)]
    return attend_pages(
        lane,
        q,
        kv,
        sinks,
        kv_scales,
        shape=shape,
        page_size=layout.page_size,
        index=own.index,
        cells=Cells(kind.write_pages, kind.write_offsets, kind.last if last else kind.rows, tiles),
        attend=static(config.model.layers[layer].attention),
        kernels=config.kernels,
    )

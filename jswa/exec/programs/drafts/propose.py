"""The drafts of a step, put among its tokens before it runs."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import named_scope
from jaxtyping import Array, Int

from jswa.exec.pack import Inputs
from jswa.exec.programs.config import StepConfig, decoder_of, layer_scales
from jswa.exec.programs.drafts.lookup import Texts, look_up, note_tokens
from jswa.exec.programs.indices import Spans, StepIndices, packed_first, row_spans
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.verify import ABSENT, proposed
from jswa.exec.programs.state import DeviceState
from jswa.model.transformer import Params
from jswa.plan import FROM_DEVICE, SAMPLING
from jswa.speculation import Speculation

_MIX = 0x9E3779B1  # odd, so that products differ


def make_drafts(
    params: Params,
    state: DeviceState,
    inputs: Inputs,
    config: StepConfig,
    index: Callable[[], tuple[Int[Array, " T"], StepIndices]],
) -> tuple[DeviceState, Int[Array, "R K"]]:
    """Return the state and the drafts of each row of a step whose bucket has drafts, ABSENT behind the last.

    `index`: returns the tokens and the indices of the step with all drafts for which the host has pages; drafters with
    weights need them.
    """
    bucket, speculation = config.bucket, config.speculation
    assert speculation is not None
    with named_scope("drafts"):
        spans = row_spans(inputs, state)
        first = inputs.tokens[jnp.clip(packed_first(inputs, bucket), 0, bucket.tokens - 1)]
        previous = state["last_token"].at[spans.row_ids].get(mode="fill", fill_value=0)
        first = jnp.where(first == FROM_DEVICE, previous, first)
        if config.placed is None:
            state, found = _look_up(state, first, spans, bucket.drafts, speculation)
        else:
            rows, decoder = Sampling.of(inputs.rows[:, -len(SAMPLING) :]), decoder_of(config, params)
            scales = partial(layer_scales, params, state, config)
            given = params, decoder, state, first, index()[1], bucket.drafts
            state, found = config.placed.propose(*given, rows=rows, scales=scales)
        if speculation.acceptance is not None:
            found = _spoiled(found, spans.starts, spans.drafting(len(state["length"])), speculation.acceptance)
        place = jnp.arange(bucket.drafts, dtype=jnp.int32)[None]
        drafts = jnp.where((place < spans.drafts[:, None]) & (found >= 0), found, ABSENT)
        if not bucket.shared:
            return state, drafts
        room = bucket.tokens - (spans.counts - spans.drafts).sum(dtype=jnp.int32)
        return state, jnp.where(place < shares(proposed(drafts), room, bucket.drafts)[:, None], drafts, ABSENT)


def shares(wanted: Int[Array, " R"], room: Int[Array, ""], most: int) -> Int[Array, " R"]:
    """Return how many of the tokens that there is room for each row gets, which wants so many, `most` at most.

    All get equally many, or as many as they want; the first rows get one more until none is left.
    """
    counts = jnp.arange(most + 1, dtype=jnp.int32)
    taken = jnp.minimum(wanted[None], counts[:, None]).sum(axis=1, dtype=jnp.int32)
    each = (taken <= room).sum(dtype=jnp.int32) - 1
    goes_on = wanted > each
    left = room - taken[each]
    return jnp.minimum(wanted, each) + (goes_on & (jnp.cumsum(goes_on, dtype=jnp.int32) <= left)).astype(jnp.int32)


def with_drafts(tokens: Int[Array, " T"], drafts: Int[Array, "R K"], indices: StepIndices) -> Int[Array, " T"]:
    """Return the tokens of a step with the drafts of each row behind its last token; 0 in place of absent ones."""
    place = jnp.arange(len(tokens), dtype=jnp.int32) - indices.first_token[indices.token_rows]
    before = indices.counts - 1 - indices.drafts
    number = place - before[indices.token_rows] - 1
    own = drafts[indices.token_rows, jnp.clip(number, 0, drafts.shape[1] - 1)]
    return jnp.where(number >= 0, jnp.maximum(own, 0), tokens)


def note_texts(texts: Texts, tokens: Int[Array, " T"], indices: StepIndices) -> Texts:
    """Return the texts in which drafts are looked up with the tokens of a step."""
    # Of a long chunk only the end stays in the ring; two tokens must not have one place.
    kept = indices.positions >= (indices.starts + indices.counts)[indices.token_rows] - texts["history"].shape[1]
    row_ids = jnp.where(indices.real & kept, indices.token_row_ids, len(texts["history"]))
    return note_tokens(texts, row_ids, indices.positions, tokens)


def _look_up(
    state: DeviceState, first: Int[Array, " R"], spans: Spans, count: int, speculation: Speculation
) -> tuple[DeviceState, Int[Array, "R K"]]:
    """Look up the next tokens of the rows that run drafts, given the last token that each has sampled."""
    texts = state["texts"]
    assert texts is not None
    row_ids = spans.drafting(len(texts["history"]))
    texts = note_tokens(texts, row_ids, spans.starts, first)
    texts, found = look_up(texts, row_ids, spans.starts, count, speculation.longest, speculation.shortest)
    return {**state, "texts": texts}, found


def _spoiled(
    drafts: Int[Array, "R K"], positions: Int[Array, " R"], row_ids: Int[Array, " R"], share: float
) -> Int[Array, "R K"]:
    """Return the drafts, of which this share stays as it is; another token takes the place of the others."""
    at = positions[:, None] + 1 + jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    mixed = (at + 40_503 * row_ids[:, None]).astype(jnp.uint32) * jnp.uint32(_MIX)
    chance = (mixed >> 8).astype(jnp.float32) / 2**24
    return jnp.where((chance < share) | (drafts < 0), drafts, jnp.where(drafts > 0, drafts - 1, 1))

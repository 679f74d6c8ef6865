"""The drafts of a step, put among its tokens before it runs."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from jswa.exec.buckets import Bucket
from jswa.exec.programs.drafts.lookup import look_up, note_tokens
from jswa.exec.programs.indices import StepIndices, row_ids_of
from jswa.exec.programs.state import DeviceState
from jswa.exec.programs.verify import ABSENT
from jswa.text.speculation import Speculation

ProposeFn = Callable[[DeviceState, Int[Array, " R"], StepIndices, int], tuple[DeviceState, Int[Array, "R K"]]]
_MIX = 0x9E3779B1  # odd, so that products differ


def make_drafts(
    state: DeviceState,
    tokens: Int[Array, " T"],
    indices: StepIndices,
    bucket: Bucket,
    speculation: Speculation,
    model: ProposeFn | None = None,
) -> tuple[DeviceState, Int[Array, "R K"]]:
    """Return the state and the drafts of each row of a step, ABSENT behind the last.

    Args:
        tokens: at the place of a draft any valid token.
        model: has a drafter with weights propose drafts; None: they are looked up.
    """
    first = tokens[jnp.clip(indices.first_token, 0, len(tokens) - 1)]
    if model is None:
        state, found = _look_up(state, first, indices, bucket.drafts, speculation)
    else:
        state, found = model(state, first, indices, bucket.drafts)
    if speculation.acceptance is not None:
        found = _spoiled(found, indices.starts, row_ids_of(indices, len(state["length"])), speculation.acceptance)
    wanted = jnp.arange(bucket.drafts, dtype=jnp.int32)[None] < indices.drafts[:, None]
    return state, jnp.where(wanted & (found >= 0), found, ABSENT)


def with_drafts(tokens: Int[Array, " T"], drafts: Int[Array, "R K"], indices: StepIndices) -> Int[Array, " T"]:
    """Return the tokens of a step with the drafts of each row behind its last token; 0 in place of absent ones."""
    place = jnp.arange(len(tokens), dtype=jnp.int32) - indices.first_token[indices.token_rows]
    before = indices.counts - 1 - indices.drafts
    number = place - before[indices.token_rows] - 1
    own = drafts[indices.token_rows, jnp.clip(number, 0, drafts.shape[1] - 1)]
    return jnp.where(number >= 0, jnp.maximum(own, 0), tokens)


def note_texts(state: DeviceState, tokens: Int[Array, " T"], indices: StepIndices) -> DeviceState:
    """Return the state with the tokens of a step in the texts in which drafts are looked up, if there are any."""
    texts = state["texts"]
    if texts is None:
        return state
    # Of a long chunk only the end stays in the ring; two tokens must not have one place.
    kept = indices.positions >= (indices.starts + indices.counts)[indices.token_rows] - texts["history"].shape[1]
    row_ids = jnp.where(indices.real & kept, indices.token_row_ids, len(texts["history"]))
    return {**state, "texts": note_tokens(texts, row_ids, indices.positions, tokens)}


def _look_up(
    state: DeviceState, tokens: Int[Array, " R"], indices: StepIndices, count: int, speculation: Speculation
) -> tuple[DeviceState, Int[Array, "R K"]]:
    """Look up the next tokens of the rows that run drafts, given the last token that each has sampled."""
    texts = state["texts"]
    assert texts is not None
    row_ids = row_ids_of(indices, len(texts["history"]))
    texts = note_tokens(texts, row_ids, indices.starts, tokens)
    texts, found = look_up(texts, row_ids, indices.starts, count, speculation.longest, speculation.shortest)
    return {**state, "texts": texts}, found


def _spoiled(
    drafts: Int[Array, "R K"], positions: Int[Array, " R"], row_ids: Int[Array, " R"], share: float
) -> Int[Array, "R K"]:
    """Return the drafts, of which this share stays as it is; another token takes the place of the others."""
    at = positions[:, None] + 1 + jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    mixed = (at + 40_503 * row_ids[:, None]).astype(jnp.uint32) * jnp.uint32(_MIX)
    chance = (mixed >> 8).astype(jnp.float32) / 2**24
    return jnp.where((chance < share) | (drafts < 0), drafts, jnp.where(drafts > 0, drafts - 1, 1))

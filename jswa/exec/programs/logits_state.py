"""Token counts, biases and masks of rows that have penalties or constraints, in tables by row id.

Before a step samples, it counts the generated tokens that it runs. The tokens of the prompt, and the generated tokens
that a row skips because their KV is cached, are set when the row begins. The entries of a row without penalties or
constraints are meaningless: its packed record has a row id past the end of the tables.

Rows are set by *items*: an item sets one token of the prompt, one word of the mask, or one bias. A usual row has a few
hundred bytes of items. A long prompt, and a mask of many words, is sent as bits.
"""

from collections.abc import Iterator, Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jswa.model.collectives import shard_columns, shard_start
from jswa.plan import ANY_TOKEN, BAN_TOKENS, BANS, AllWords, LogitsEntry, RowMask, Words, bits_of
from jswa.types import MAX_LOGIT_BIAS

IN_PROMPT = 1 << 15
MOST = IN_PROMPT - 1  # the largest count
_PIECE = 2**13  # tokens that are counted together
BEGINS = 8  # rows that a launch of `set_logits_state` begins, at most
ITEMS = 1_024  # of a launch
MASKS = (1, 4, 16, 64)  # whole masks of a launch
PROMPT, MASK = range(2)  # kinds of lines of `set_bits`
# Kinds of items; `_CHANGED` comes after `_WORD`.
_SEEN, _SKIPPED, _WORD, _CHANGED, _BIAS, _BAN, _RECENT = range(7)
_RING = 16  # the last tokens of a row: those in front of any place of a step, and drafts
_KIND, _SLOT = 8, 8 * MAX_LOGIT_BIAS  # an item's first word is row id x _SLOT + slot x _KIND + kind
_BIASES = np.arange(MAX_LOGIT_BIAS, dtype=np.int32) * _KIND + _BIAS
_NO_TOKEN = 2**30  # past every vocabulary


class LogitsState(TypedDict):
    """Part of the device state; V tokens. A row's entries are set before its first step.

    Attributes:
        seen: how often the row's generated text so far has each token, in the low 15 bits, and whether the prompt has
            it, in the highest. Counts stop between `MOST` - 2^13 and `MOST`.
        bias_ids, bias: token ids, and the biases that are added to their logits; ids past the vocabulary are padding.
        mask: bits of the allowed tokens, 32 a word.
        ahead: of a row that is held to a grammar, the masks behind its first K drafts of a step; others have none. None
            without drafts: XLA cannot compile programs for several devices that hand on an array without elements.
        bans: sequences whose last token is forbidden behind the others (`Constraint.bans`); lines of zeros are none.
        recent: the last tokens of the row, each at its position % `_RING`.
    """

    seen: UInt[Array, "max_rows V"]
    bias_ids: Int[Array, "max_rows B"]
    bias: Float[Array, "max_rows B"]
    mask: Int[Array, "max_rows words"]
    ahead: Int[Array, "max_rows K words"] | None
    bans: Int[Array, "max_rows N columns"]
    recent: Int[Array, "max_rows ring"]


def init_logits_state(rows: int, vocab: int, drafts: int = 0) -> LogitsState:
    """Return tables in which no row has a penalty or a constraint. `drafts`: of a row and step, at most."""
    words = -(-vocab // 32)
    return LogitsState(
        seen=jnp.zeros((rows, vocab), jnp.uint16),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), vocab, jnp.int32),
        bias=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        mask=jnp.full((rows, words), -1, jnp.int32),
        ahead=jnp.zeros((rows, drafts, words), jnp.int32) if drafts else None,
        bans=jnp.zeros((rows, BANS, 1 + BAN_TOKENS), jnp.int32),
        recent=jnp.zeros((rows, _RING), jnp.int32),
    )


def set_logits_state(state: LogitsState, batch: Int[Array, " size"]) -> LogitsState:
    """Begin rows, then set what the items of a batch (`logits_state_batches`) say. The tables are donated.

    A row begins without counts and bias. What a line of `set_bits` has set of it before, stays.
    """
    begins, items = batch[: 4 * BEGINS].reshape(4, -1), batch[4 * BEGINS :].reshape(3, -1)
    rows, (where, at, value) = len(state["seen"]), items
    row_ids, slots, kinds = where // _SLOT, where % _SLOT // _KIND, where % _KIND

    def only(kind: int) -> Int[Array, " n"]:
        return jnp.where(kinds == kind, row_ids, rows)

    seen = state["seen"].at[begins[1]].set(jnp.uint16(0), mode="drop")
    seen = seen.at[only(_SEEN), at].set(jnp.uint16(IN_PROMPT), mode="drop")
    bias_ids = state["bias_ids"].at[begins[0]].set(state["seen"].shape[1], mode="drop")
    mask = state["mask"].at[begins[2]].set(begins[3][:, None], mode="drop")
    mask = mask.at[only(_WORD), at].set(value, mode="drop")
    bans = state["bans"].at[begins[0]].set(0, mode="drop")
    begun = LogitsState(
        bans=bans.at[only(_BAN), slots, at].set(value, mode="drop"),
        recent=state["recent"].at[only(_RECENT), at].set(value, mode="drop"),
        seen=seen,
        bias_ids=bias_ids.at[only(_BIAS), slots].set(at, mode="drop"),
        bias=state["bias"].at[only(_BIAS), slots].set(value.view(jnp.float32), mode="drop"),
        ahead=state["ahead"],
        mask=mask.at[only(_CHANGED), at].set(value, mode="drop"),
    )
    return count_tokens(begun, at, only(_SKIPPED), jnp.ones(len(at), bool))


def set_bits(state: LogitsState, line: Int[Array, " size"]) -> LogitsState:
    """Set the tokens of a row's prompt, or its mask: row id, kind and bits. The tables are donated."""
    rows, vocab = state["seen"].shape
    row_id, kind, bits = line[0], line[1], line[2:]
    flags = _unpacked(bits[None], vocab)[0].astype(jnp.uint16) * jnp.uint16(IN_PROMPT)
    return {
        **state,
        "seen": state["seen"].at[jnp.where(kind == PROMPT, row_id, rows)].set(flags, mode="drop"),
        "mask": state["mask"].at[jnp.where(kind == MASK, row_id, rows)].set(bits, mode="drop"),
    }


def set_masks(state: LogitsState, batch: Int[Array, "n size"]) -> LogitsState:
    """Set whole masks: a line of a batch (`mask_batches`) has row id, place and words. The tables are donated."""
    row_ids, places, words = batch[:, 0], batch[:, 1], batch[:, 2:]
    own = jnp.where(places == 0, row_ids, len(state["mask"]))
    mask, ahead = state["mask"].at[own].set(words, mode="drop"), state["ahead"]
    if ahead is None:
        return {**state, "mask": mask}
    behind = jnp.where(places > 0, places - 1, ahead.shape[1])
    return {**state, "mask": mask, "ahead": ahead.at[row_ids, behind].set(words, mode="drop")}


def count_tokens(
    state: LogitsState, tokens: Int[Array, " T"], row_ids: Int[Array, " T"], generated: Bool[Array, " T"]
) -> LogitsState:
    """Count the generated tokens among those that a step runs. Rows without logits state have ids past the end."""
    seen = state["seen"]
    for start in range(0, len(tokens), _PIECE):
        piece = slice(start, start + _PIECE)
        now = seen.at[row_ids[piece], tokens[piece]].get(mode="clip")  # of rows without logits state it does not matter
        # All tokens of a piece may be the same one: stop counting while the count of a whole piece still fits.
        counted = generated[piece] & ((now & jnp.uint16(MOST)) <= MOST - len(tokens[piece]))
        rows = jnp.where(counted, row_ids[piece], len(seen))
        seen = seen.at[rows, tokens[piece]].add(jnp.uint16(1), mode="drop")
    return {**state, "seen": seen}


def note_recent(
    state: LogitsState,
    tokens: Int[Array, " T"],
    row_ids: Int[Array, " T"],
    positions: Int[Array, " T"],
    ends: Int[Array, " T"],
) -> LogitsState:
    """Note the last tokens of rows, drafts among them, before a step samples. Row ids past the end note nothing.

    Args:
        ends: one past the last position that the row of each token runs.
    """
    recent = state["recent"]
    rows = jnp.where(positions >= ends - _RING, row_ids, len(recent))
    return {**state, "recent": recent.at[rows, positions % _RING].set(tokens, mode="drop")}


def banned_tokens(
    state: LogitsState, row_ids: Int[Array, " R"], positions: Int[Array, " R"], prompt_length: Int[Array, " R"]
) -> Int[Array, "R N"]:
    """Return the tokens that rows may not generate at these positions, past the vocabulary where there are fewer.

    They end a bad word of which the text has the other tokens, all of them generated, or it is too short to end.
    """
    bans = state["bans"][row_ids]
    at = positions[:, None] - jnp.arange(BAN_TOKENS - 1, 0, -1, dtype=jnp.int32)[None]
    recent = jnp.where(at >= prompt_length[:, None], state["recent"][row_ids[:, None], at % _RING], _NO_TOKEN)
    until, before, last = bans[..., 0], bans[..., 1:-1], bans[..., -1]
    met = ((before == ANY_TOKEN) | (before == recent[:, None])).all(axis=-1)
    return jnp.where(met & (positions[:, None] < until), last, _NO_TOKEN)


def seen_tokens(
    state: LogitsState, row_ids: Int[Array, " R"], drafts: Int[Array, "R K"] | None, devices: int = 1
) -> tuple[Bool[Array, "R V"], Float[Array, "R V"]]:
    """Return which tokens rows have seen, and how often they have generated them, of this device's columns.

    `drafts`: tokens that count besides, as the draw is behind them; ids that are negative are none.
    """
    seen = shard_columns(state["seen"][row_ids], devices)
    counts = (seen & MOST).astype(jnp.float32)
    if drafts is not None:
        columns = drafts - shard_start(counts.shape[1], devices)
        columns = jnp.where((drafts < 0) | (columns < 0), counts.shape[1], columns)
        counts = counts.at[jnp.arange(len(counts))[:, None], columns].add(1.0, mode="drop")
    return (seen > 0) | (counts > 0), counts


def masks_of(
    state: LogitsState, row_ids: Int[Array, " R"], by_place: Int[Array, " R"], drafts: Int[Array, "R K"] | None
) -> Int[Array, "R words"]:
    """Return the masks of rows: of rows `by_place` those behind these drafts. Ids that are negative are none."""
    mask, ahead = state["mask"][row_ids], state["ahead"]
    if drafts is None or ahead is None:
        return mask
    place = (drafts >= 0).sum(axis=1, dtype=jnp.int32)
    behind = ahead[row_ids, jnp.maximum(place - 1, 0)]
    return jnp.where(((by_place != 0) & (place > 0))[:, None], behind, mask)


def allowed_tokens(mask: Int[Array, "R words"], vocab: int) -> Bool[Array, "R V"]:
    """Return the tokens that masks allow."""
    return _unpacked(mask, vocab) == 1


def bit_lines(entries: Sequence[LogitsEntry], vocab: int) -> Iterator[Int[np.ndarray, " size"]]:
    """Yield the lines of `set_bits` for rows that begin, which are set before their batches."""
    for entry in entries:
        if len(entry.prompt) > ITEMS:
            yield np.concatenate([np.array([entry.row_id, PROMPT], np.int32), bits_of(entry.prompt, vocab)])
        if entry.allowed.at is None:
            yield np.concatenate([np.array([entry.row_id, MASK], np.int32), entry.allowed.bits])


def logits_state_batches(
    entries: Sequence[LogitsEntry], masks: Sequence[RowMask], max_rows: int
) -> Iterator[Int[np.ndarray, " size"]]:
    """Yield the arguments of `set_logits_state` for rows that begin, and for words of masks that change."""
    for start in range(0, max(1, len(entries)), BEGINS):
        group = entries[start : start + BEGINS]
        items = [item for entry in group for item in _items(entry)]
        if start + BEGINS >= len(entries):
            items += [
                (mask.row_id * _SLOT + _CHANGED, mask.words.at, mask.words.bits)
                for mask in masks
                if isinstance(mask.words, Words)
            ]
        begins = np.full((4, BEGINS), max_rows, np.int32)
        for column, entry in enumerate(group):
            seen = entry.row_id if len(entry.prompt) <= ITEMS else max_rows
            mask = entry.row_id if entry.allowed.at is not None else max_rows
            begins[:, column] = entry.row_id, seen, mask, entry.allowed.fill
        yield from _batches(begins, items, max_rows)


def mask_batches(masks: Sequence[RowMask], max_rows: int) -> Iterator[Int[np.ndarray, "n size"]]:
    """Yield the arguments of `set_masks` for whole masks that change, padded with rows that do not exist."""
    whole = [(mask.row_id, mask.place, mask.words.bits) for mask in masks if isinstance(mask.words, AllWords)]
    for start in range(0, len(whole), MASKS[-1]):
        some = whole[start : start + MASKS[-1]]
        lines = next(count for count in MASKS if count >= len(some))
        out = np.empty((lines, 2 + len(some[0][2])), np.int32)
        out[len(some) :] = 0
        out[len(some) :, 0] = max_rows
        for line, (row_id, place, bits) in zip(out, some, strict=False):
            line[0], line[1], line[2:] = row_id, place, bits
        yield out


_Items = tuple[int | Int[np.ndarray, " _"], Int[np.ndarray, " _"], int | Int[np.ndarray, " _"]]


def _items(entry: LogitsEntry) -> Iterator[_Items]:
    """Yield the items of a row that begins."""
    first = entry.row_id * _SLOT
    if 0 < len(entry.prompt) <= ITEMS:
        yield first + _SEEN, entry.prompt, 0
    if len(entry.generated):
        yield first + _SKIPPED, entry.generated, 0
    if entry.allowed.at is not None and len(entry.allowed.at):
        yield first + _WORD, entry.allowed.at, entry.allowed.bits
    for slot, line in enumerate(entry.bans):
        yield first + slot * _KIND + _BAN, np.arange(len(line), dtype=np.int32), line
    if len(entry.recent):
        places = np.arange(entry.start - len(entry.recent), entry.start, dtype=np.int32) % _RING
        yield first + _RECENT, places, entry.recent
    if len(entry.bias_ids):
        yield first + _BIASES[: len(entry.bias_ids)], entry.bias_ids, entry.bias.view(np.int32)


def _batches(
    begins: Int[np.ndarray, "4 _"], items: Sequence[_Items], max_rows: int
) -> Iterator[Int[np.ndarray, " size"]]:
    """Yield batches of items; the first one begins rows."""
    used = sum(len(at) for _, at, _ in items)
    table = np.empty((3, max(1, -(-used // ITEMS)) * ITEMS), np.int32)
    end = 0
    for where, at, value in items:
        part = table[:, end : end + len(at)]
        part[0], part[1], part[2] = where, at, value
        end += len(at)
    table[:, end:] = max_rows * _SLOT
    for start in range(0, table.shape[1], ITEMS):
        yield np.concatenate([begins.reshape(-1), table[:, start : start + ITEMS].reshape(-1)])
        begins = np.full_like(begins, max_rows)


def _unpacked(words: Int[Array, "n words"], vocab: int) -> Int[Array, "n V"]:
    """Return bits, 32 a word, as zeros and ones."""
    repeated = jnp.repeat(words, 32, axis=1)[:, :vocab]
    return (repeated >> (jnp.arange(vocab, dtype=jnp.int32) % 32)[None]) & 1

"""Drafts that are looked up on the device: what followed the last tokens of a row before, in its own text or others.

A row's own text lies in a ring, the token at position p in place p % H. A step writes the tokens that it runs, drafts
too: what is wrong lies behind the row's new length, and is overwritten like its KV. So the ring is right where KV is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jswa.plan import RowText
from jswa.speculation import PROGRAMS

ROWS = 8  # of a launch of `set_texts`, at most
NONE = -1  # in `reference` and among drafts: no token


class Texts(TypedDict):
    """Part of the device state, by row id.

    Attributes:
        history: the ring of the row's own tokens.
        reference: tokens of earlier texts, one text behind the other, NONE between them and behind the last. None if
            drafts are looked up in the row's own text alone: see `LogitsState.ahead`.
        offset: where the row was found last in the reference: place there less position here. None without references.
    """

    history: Int[Array, "max_rows H"]
    reference: Int[Array, "max_rows F"] | None
    offset: Int[Array, " max_rows"] | None


def init_texts(rows: int, history: int, reference: int) -> Texts:
    """Return rings and references without tokens."""
    return Texts(
        history=jnp.zeros((rows, history), jnp.int32),
        reference=jnp.full((rows, reference), NONE, jnp.int32) if reference else None,
        offset=jnp.zeros(rows, jnp.int32) if reference else None,
    )


def note_tokens(
    texts: Texts, row_ids: Int[Array, " n"], positions: Int[Array, " n"], tokens: Int[Array, " n"]
) -> Texts:
    """Write tokens to the rings; row ids past the end write nothing."""
    places = positions % texts["history"].shape[1]
    return {**texts, "history": texts["history"].at[row_ids, places].set(tokens, mode="drop")}


def look_up(
    texts: Texts, row_ids: Int[Array, " R"], positions: Int[Array, " R"], count: int, longest: int, shortest: int
) -> tuple[Texts, Int[Array, "R count"]]:
    """Return the `count` tokens that followed the last tokens of each row before, NONE where nothing did.

    The longest match counts, of `longest` tokens at most and `shortest` at least. Of equal ones those of the reference
    come first: the one where the row was found last, else the first. In the row's own text it is the latest.

    Args:
        positions: that of the last token of each row; it is in the ring already.
    """
    own, followed = _in_history(texts["history"], row_ids, positions, count, longest)
    if texts["reference"] is None or texts["offset"] is None:
        return texts, jnp.where((own >= shortest)[:, None], followed, NONE)
    recent = _recent(texts["history"], row_ids, positions, longest)
    other, at, there = _in_reference(texts["reference"], texts["offset"], row_ids, positions, recent, count)
    known = jnp.where((other >= own)[:, None], there, followed)
    found = (other >= own) & (other >= shortest)
    offset = texts["offset"].at[jnp.where(found, row_ids, len(texts["offset"]))].set(at - positions, mode="drop")
    drafts = jnp.where((jnp.maximum(own, other) >= shortest)[:, None], known, NONE)
    return {**texts, "offset": offset}, drafts


def _recent(
    history: Int[Array, "max_rows H"], row_ids: Int[Array, " R"], positions: Int[Array, " R"], count: int
) -> Int[Array, "R count"]:
    """Return the last tokens of each row, the last first; NONE before its first."""
    back = positions[:, None] - jnp.arange(count, dtype=jnp.int32)[None]
    tokens = history.at[row_ids[:, None], back % history.shape[1]].get(mode="fill", fill_value=NONE)
    return jnp.where(back >= 0, tokens, NONE)


def _in_history(
    history: Int[Array, "max_rows H"], row_ids: Int[Array, " R"], positions: Int[Array, " R"], count: int, longest: int
) -> tuple[Int[Array, " R"], Int[Array, "R count"]]:
    """Return the length of each row's longest match in its own text, and what followed there."""
    size, last = history.shape[1], longest - 1
    ring = history.at[row_ids].get(mode="fill", fill_value=NONE)
    ago = positions[:, None] % size - jnp.arange(size, dtype=jnp.int32)[None]
    ago = jnp.where(ago < 0, ago + size, ago)  # positions before the last one: a CPU divides one number at a time
    # Drafts that were wrong may have overwritten the oldest places. So no match goes on from the oldest to the newest.
    ring = jnp.where((ago < size - PROGRAMS[-1]) & (ago <= positions[:, None]), ring, NONE)
    around = jnp.concatenate([ring[:, size - last :], ring], axis=1)
    recent = _recent(history, row_ids, positions, longest)
    lengths = _match_lengths(lambda i: lax.slice_in_dim(around, last - i, last - i + size, axis=1), recent)
    lengths = jnp.where(ago == 0, 0, lengths)
    best = (lengths * size + size - 1 - ago).max(axis=1)  # the latest of the longest
    longest_match, found = best // size, size - 1 - best % size
    # A text that repeats itself goes on repeating: what follows the end of the row begins behind the match again.
    places = jnp.arange(count, dtype=jnp.int32)[None] % jnp.maximum(found, 1)[:, None]
    back = jnp.maximum(found[:, None] - 1 - places, 0)
    return longest_match, jnp.take_along_axis(ring, (positions[:, None] - back) % size, axis=1)


def _in_reference(
    references: Int[Array, "max_rows F"],
    offsets: Int[Array, " max_rows"],
    row_ids: Int[Array, " R"],
    positions: Int[Array, " R"],
    recent: Int[Array, "R n"],
    count: int,
) -> tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, "R count"]]:
    """Return the length of each row's longest match in its reference, the place of its end, and what follows there."""
    reference = references.at[row_ids].get(mode="fill", fill_value=NONE)
    size = reference.shape[1]
    lengths = _match_lengths(
        lambda i: jnp.pad(reference[:, : size - i], ((0, 0), (i, 0)), constant_values=NONE), recent
    )
    places = jnp.arange(size, dtype=jnp.int32)
    expected = (offsets.at[row_ids].get(mode="fill", fill_value=0) + positions)[:, None]
    doubled, at = _first_largest(2 * lengths + (places[None] == expected).astype(jnp.int32))
    after = at[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(reference, jnp.minimum(after, size - 1), axis=1)
    ends = jnp.cumsum((tokens == NONE) | (after >= size), axis=1, dtype=jnp.int32) > 0
    return doubled // 2, at, jnp.where(ends, NONE, tokens)


def _first_largest(lengths: Int[Array, "R P"]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Return the largest number of each row, small and not negative, and its first place.

    Number and place are one integer, of which the largest is found: a CPU computes `argmax` a number at a time.
    """
    size = lengths.shape[1]
    found = (lengths * size + jnp.arange(size - 1, -1, -1, dtype=jnp.int32)[None]).max(axis=1)
    return found // size, size - 1 - found % size


def _match_lengths(shifted: Callable[[int], Int[Array, "R P"]], recent: Int[Array, "R n"]) -> Int[Array, "R P"]:
    """Return for each place how many tokens up to there equal the last ones of the row.

    `shifted(i)`: of each place the token i before it.
    """
    equal: Bool[Array, "R P"] | None = None
    lengths: Int[Array, "R P"] | None = None
    for i in range(recent.shape[1]):
        same = (shifted(i) == recent[:, i : i + 1]) & (recent[:, i : i + 1] != NONE)
        equal = same if equal is None else equal & same
        lengths = equal.astype(jnp.int32) + (0 if lengths is None else lengths)
    assert lengths is not None
    return lengths


def set_texts(texts: Texts, batch: Int[Array, "n size"]) -> Texts:
    """Set rings and references; `batch` comes from `text_batches`. The tables are donated."""
    history, size = texts["history"], texts["history"].shape[1]
    ring, reference, offset = batch[:, 3 : 3 + size], texts["reference"], texts["offset"]
    return Texts(
        history=history.at[batch[:, 0]].set(ring, mode="drop"),
        reference=None if reference is None else reference.at[batch[:, 1]].set(batch[:, 3 + size :], mode="drop"),
        offset=None if offset is None else offset.at[batch[:, 1]].set(batch[:, 2], mode="drop"),
    )


def text_batches(
    rows: Sequence[RowText], history: int, reference: int, max_rows: int
) -> Iterator[Int[np.ndarray, "n size"]]:
    """Cut rows into batches of at most `ROWS`, each padded to a power of two with rows that do not exist.

    A line has the row id of the ring and that of the reference, which may name no row; the offset; ring and reference.
    """
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        out = np.full((1 << (len(some) - 1).bit_length(), 3 + history + reference), NONE, np.int32)
        out[:, :2] = max_rows
        for line, row in zip(out, some, strict=False):
            if row.text is not None:
                line[0] = row.row_id
                length = len(row.text)
                kept = row.text[max(0, length - history) :]
                line[3 + np.arange(length - len(kept), length) % history] = kept
            if reference and row.reference is not None:
                line[1], line[2] = row.row_id, row.offset
                line[3 + history : 3 + history + len(row.reference)] = row.reference[:reference]
        yield out

"""Drafts that are looked up on the device (jswa/exec/programs/drafts/lookup.py), against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jswa.exec.programs.drafts.lookup import NONE, init_texts, look_up, note_tokens, set_texts, text_batches
from jswa.plan import RowText
from jswa.speculation import PROGRAMS
from tests.support.builders import share

HISTORY, REFERENCE, COUNT, LONGEST = 64, 16, 4, 3
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=100)
_look_up, _note = jax.jit(look_up, static_argnums=(3, 4, 5)), jax.jit(note_tokens)


def match(text: list[int], end: int, recent: list[int]) -> int:
    """How many of the last tokens of `recent` also end at place `end` of a text."""
    length = 0
    while length < min(LONGEST, len(recent)) and end - length >= 0 and text[end - length] == recent[-1 - length]:
        length += 1
    return length


def expected(text: list[int], reference: list[int], place: int, shortest: int) -> list[int]:
    """What `look_up` finds for a row with this text, which stood at `place` of the reference."""
    oldest = max(0, len(text) - HISTORY + PROGRAMS[-1])
    own = [(match(text[oldest:], at - oldest, text), -at, at) for at in range(len(text) - 2, oldest - 1, -1)]
    length, _, at = min(((-m, behind, at) for m, behind, at in own), default=(0, 0, 0))
    best = -length
    found = [text[at + 1 + step % (len(text) - 1 - at)] if best else NONE for step in range(COUNT)]
    others = [(-2 * match(reference, at, text) - (at == place), at) for at in range(len(reference))]
    score, at = min(others, default=(0, 0))
    if -score // 2 >= max(best, shortest) and reference[at] != NONE:
        there = [*reference[at + 1 :], *[NONE] * COUNT][:COUNT]
        cut = there.index(NONE) if NONE in there else COUNT
        return [*there[:cut], *[NONE] * (COUNT - cut)]
    return found if best >= shortest else [NONE] * COUNT


@share(2)
@given(texts=st.lists(TOKENS, min_size=3, max_size=3), others=st.data(), shortest=st.integers(1, LONGEST))
def test_what_followed_the_last_tokens_is_found(texts: list[list[int]], others: st.DataObject, shortest: int) -> None:
    """In rings that texts have gone around, behind wrong drafts, and in references of several texts."""
    references = [others.draw(st.lists(st.integers(-1, 3), max_size=REFERENCE)) for _ in texts]
    places = [others.draw(st.integers(0, REFERENCE)) for _ in texts]
    state = init_texts(4, HISTORY, REFERENCE)
    # The first part of a text comes from the host, the rest from steps, with wrong drafts behind each of these.
    known = [others.draw(st.integers(0, len(text) - 1)) for text in texts]
    rows = [
        RowText(row, np.array(text[:count], np.int32), np.array(reference, np.int32), place - (len(text) - 1))
        for row, (text, count, reference, place) in enumerate(zip(texts, known, references, places, strict=True))
    ]
    for batch in text_batches(rows, HISTORY, REFERENCE, 4):
        state = set_texts(state, jnp.asarray(batch))
    for row, (text, count) in enumerate(zip(texts, known, strict=True)):
        for at in range(count, len(text)):
            wrong = [] if at == len(text) - 1 else [9] * PROGRAMS[-1]
            run = np.array([text[at], *wrong, *[0] * 7], np.int32)[:8]
            rows_of = np.where(np.arange(8) <= len(wrong), row, 4).astype(np.int32)
            state = _note(state, rows_of, np.arange(at, at + 8, dtype=np.int32), run)
    ends = jnp.array([len(text) - 1 for text in texts], jnp.int32)
    _, found = _look_up(state, jnp.arange(3, dtype=jnp.int32), ends, COUNT, LONGEST, shortest)
    for text, reference, place, drafts in zip(texts, references, places, found.tolist(), strict=True):
        assert drafts == expected(text, reference, place, shortest)


def test_rows_of_no_launch_keep_their_texts() -> None:
    """A refreshed reference leaves the ring alone, and padding changes no row."""
    state = init_texts(2, HISTORY, REFERENCE)
    for batch in text_batches(
        [RowText(0, np.arange(9, dtype=np.int32), np.arange(3, dtype=np.int32), 5)], HISTORY, REFERENCE, 2
    ):
        state = set_texts(state, jnp.asarray(batch))
    refreshed = RowText(0, None, np.array([7], np.int32), -2)
    (batch,) = text_batches([refreshed], HISTORY, REFERENCE, 2)
    after = set_texts(state, jnp.asarray(batch))
    np.testing.assert_array_equal(after["history"], state["history"])
    assert after["history"][0, :9].tolist() == list(range(9))
    assert after["reference"] is not None
    assert after["reference"][0].tolist() == [7, *[NONE] * (REFERENCE - 1)]
    assert after["offset"] is not None
    assert after["offset"].tolist() == [-2, 0]

"""Masks of many matchers at once, filled outside of Python's lock in several threads.

A native fill cannot be interrupted, and the threads are not timed one by one. If a batch takes longer than a slow mask
and many ordinary ones, its matchers are watched: each fills its next masks by itself, and the slow one fails.
"""

import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jswa.grammar.matching.llg import THREADS, Matcher, executor
from jswa.grammar.size.limits import MAX_MASK_SECONDS

_ORDINARY = 1e-4  # seconds that a mask of a batch may take; 0.02 to 0.1 ms were measured, of one thread


def fill_all(
    matchers: Sequence[Matcher], out: Int[np.ndarray, "R W"], rows: Sequence[int], *, threads: int = THREADS
) -> None:
    """Write the masks of matchers to the given rows of an array, as `Matcher.fill` does, in several threads.

    Args:
        out: C-contiguous; other rows stay as they are.
        rows: the row of each matcher, each once.
    """
    if not matchers:
        return
    assert out.flags.c_contiguous
    assert out.dtype == np.int32
    assert len(set(rows)) == len(rows) == len(matchers)
    words = matchers[0].grammar.vocabulary.words
    target = out if out.shape[1] == words else np.empty((len(out), words), np.int32)
    # A thread takes neighbours: those of one lane would wait for each other.
    order = sorted(range(len(matchers)), key=lambda i: matchers[i].lane)
    computed = [i for i in order if not matchers[i].run and not matchers[i].failed]
    together = [i for i in computed if len(computed) > 1 and not matchers[i].watched]
    if together:
        begin = time.monotonic()
        asked = [(matchers[i].inner, rows[i]) for i in together]
        executor(threads).unsafe_compute_mask_ptr(asked, target.ctypes.data, words * 4, len(target))
        watch_if_late([matchers[i] for i in together], 1, begin)
    done = set(together)
    for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
        (matcher.finish if i in done else matcher.fill)(target[row])
        if target is not out:
            out[row] = target[row, : out.shape[1]]


def fill_behind(
    matchers: Sequence[Matcher], drafts: Sequence[list[int]], out: Int[np.ndarray, "R K W"], *, threads: int = THREADS
) -> None:
    """Write the masks behind the first 1 … K drafts of each matcher, whose own text stays as it is, in several threads.

    The mask behind the first n drafts is at n - 1. A mask is empty, and no token is drawn there, behind a wrong draft,
    behind one that completes the text, where only an end token may follow, where a matcher has fewer drafts, and while
    it is watched. `fill_all` writes the masks in front of the drafts, and is called before.

    Args:
        drafts: K or fewer of each matcher.
        out: C-contiguous.
    """
    out[:] = 0
    if not any(drafts):
        return
    assert out.flags.c_contiguous
    assert out.dtype == np.int32
    vocabulary = matchers[0].grammar.vocabulary
    words, places = vocabulary.words, 1 + out.shape[1]
    filled = np.zeros((len(matchers), places, words), np.int32)
    order = sorted(range(len(matchers)), key=lambda i: matchers[i].lane)
    computed = [i for i in order if drafts[i] and not (matchers[i].run or matchers[i].failed or matchers[i].watched)]
    if computed:
        begin = time.monotonic()
        asked = [(matchers[i].inner, places * i, drafts[i]) for i in computed]
        lines = places * len(matchers)
        executor(threads).unsafe_compute_mask_ptr_with_draft_token(asked, filled.ctypes.data, words * 4, lines)
        watch_if_late([matchers[i] for i in computed], places, begin)
    for i, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
        if matcher.failed:
            filled[i] = 0
        for place, token in enumerate(reversed(matcher.run[-places:-1]) if tokens else (), 1):
            if tokens[:place] == matcher.run[: -place - 1 : -1]:
                filled[i, place].view(np.uint32)[token // 32] = 1 << token % 32
    ends = np.zeros(words, np.int32)
    for token in vocabulary.end_ids:
        ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    behind = filled[:, 1:, : out.shape[2]]
    out[:] = np.where((behind & ~ends[: out.shape[2]]).any(axis=2, keepdims=True), behind, 0)


def watch_if_late(matchers: Sequence[Matcher], masks: int, begin: float) -> None:
    """Watch the matchers of a batch, each with so many masks, if it took long since `begin` (of `time.monotonic`)."""
    if time.monotonic() - begin > MAX_MASK_SECONDS + _ORDINARY * masks * len(matchers):
        for matcher in matchers:
            matcher.watch()


def single_tokens(masks: Int[np.ndarray, "R K W"]) -> Bool[np.ndarray, "R K"]:
    """Return which masks have a single token."""
    single: Bool[np.ndarray, "R K"] = np.count_nonzero(masks, axis=2) == 1
    single[single] = np.bitwise_count(masks[single].view(np.uint32)).sum(axis=1) == 1
    return single

"""A new grammar is tried along random texts, in a process that can be killed, before an engine uses it."""

import time

import numpy as np
from jaxtyping import Int

from jswa.grammar.matching.llg import COSTLY, Grammar, Vocabulary
from jswa.grammar.size.limits import MAX_MASK_SECONDS

_MASKS = 200
_LENGTH = 50  # tokens of a text, before another one begins
_CLOSING = '"}]),:'  # what ends the parts of a text: random strings would hardly end


def costly(grammar: Grammar) -> str | None:
    """Return why a grammar costs too much where texts follow it; None if it does not.

    What counts is the time of this thread to fill a mask and to take a token. The texts are the same each time.
    """
    rng, closing = np.random.default_rng(0), _closing(grammar.vocabulary)
    mask = np.zeros(grammar.vocabulary.words, np.int32)
    matcher, length = grammar.matcher(), 0
    for _ in range(_MASKS):
        begin = time.thread_time()
        matcher.fill(mask)
        token = _one_of(mask & closing, rng) if rng.random() < 0.5 else None
        token = _one_of(mask, rng) if token is None else token
        if token is not None:
            matcher.accept([token])
        if grammar.is_costly or time.thread_time() - begin > 2 * MAX_MASK_SECONDS:
            return COSTLY
        length += 1
        if token is None or length == _LENGTH or matcher.finished or matcher.failed:
            matcher, length = grammar.matcher(), 0
    return None


def _closing(vocabulary: Vocabulary) -> Int[np.ndarray, " W"]:
    """Return the mask of the tokens that end a part of a text, or the text."""
    found = np.zeros(32 * vocabulary.words, np.uint8)
    found[[token for text in _CLOSING for token in vocabulary.inner.tokenize_str(text)]] = 1
    found[list(vocabulary.end_ids)] = 1
    return np.packbits(found, bitorder="little").view(np.int32)


def _one_of(mask: Int[np.ndarray, " W"], rng: np.random.Generator) -> int | None:
    """Return a token of a mask: of a random word the first one from a random place on. None of an empty mask."""
    words = np.flatnonzero(mask)
    if not len(words):
        return None
    chance = rng.random()
    word = int(words[int(chance * len(words))])
    bits = int(mask[word]) & 0xFFFF_FFFF
    place = int(chance * 2**20) % 32
    found = bits >> place << place or bits
    return 32 * word + (found & -found).bit_length() - 1

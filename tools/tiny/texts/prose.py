"""The book that `tiny` is trained on: alice.txt, in the public domain."""

import functools
from pathlib import Path

ALICE = Path(__file__).parent / "alice.txt"
HELD_OUT_PARAGRAPHS = 5  # every fifth paragraph is held out: not trained on


@functools.cache
def alice(*, held_out: bool) -> tuple[str, ...]:
    """Return the held-out or the training paragraphs of the book, without chapter titles."""
    paragraphs = [line for line in ALICE.read_text(encoding="utf-8").splitlines() if len(line) > 40]
    return tuple(text for i, text in enumerate(paragraphs) if (i % HELD_OUT_PARAGRAPHS == 0) == held_out)

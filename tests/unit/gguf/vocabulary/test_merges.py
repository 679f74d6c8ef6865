"""Merges: those that a file lists, and those that scores imply."""

import time
from typing import Any

import pytest

from jswa.errors import CheckpointError
from jswa.gguf.vocabulary.merges import listed_merges, scored_merges
from jswa.gguf.vocabulary.tokens import read_tokens
from tests.support.text.gguf import byte_level, sentencepiece


def scored(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges that scores imply."""
    return scored_merges(metadata, read_tokens(metadata, spaces_are_marks=True))


def test_scores_order_merges_and_then_the_lengths_of_their_parts() -> None:
    words = {"a": -9.0, "b": -9.0, "ab": -2.0, "abab": -3.0, "aba": -2.0, "ba": -1.0}
    assert scored(sentencepiece(words)) == [
        ("b", "a"), ("ab", "a"), ("a", "ba"), ("a", "b"), ("aba", "b"), ("ab", "ab"),
    ]  # fmt: skip


def test_only_runs_of_spaces_of_what_users_define_are_merged() -> None:
    words = {"▁": -9.0, "a": -9.0, "b": -9.0, "▁a": -1.0}
    merges = scored(sentencepiece(words, users=("ab", "  ", "   ")))
    assert merges == [("▁▁", "▁"), ("▁", "▁▁"), ("▁", "▁"), ("▁", "a")]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (sentencepiece({"a": 1.0}, scores=None), r"scores = None: must be there if there are no merges"),
        (sentencepiece({"a": float("nan")}), r"scores\[259\] = nan: must be a number"),
        (sentencepiece({"a": -1.0, "aa": -1.0, "aaa": -1.0}), r"scores = .*: -1 for all merged tokens: must tell"),
        (sentencepiece({"a" * 20_000: 1.0}), r"tokens\[259\] = .*: squares of lengths must add up to at most"),
    ],
)
def test_scores_that_order_nothing_are_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        scored(metadata)


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (None, r"merges = None: must be a list"),
        ([1], r"merges\[0\] = 1: must be a text"),
        (["ab"], r"merges\[0\] = 'ab': must be two texts with a space between them"),
        ([" b"], r"must be two texts"),
        (["a "], r"must be two texts"),
        (["a b c"], r"must be two texts"),
        (["h e", "a b"], r"merges\[1\] = 'a b': 'ab' must be a token"),
        (["€ e"], r"merges\[0\] = '€ e': '€' must be a token"),
        (["h e", "h e"], r"merges\[1\] = 'h e': must occur only once"),
    ],
)
def test_listed_merges_name_tokens(merges: list[object] | None, message: str) -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.merges"] = merges
    with pytest.raises(CheckpointError, match=message):
        listed_merges(metadata, read_tokens(metadata, spaces_are_marks=False))


def test_vocabularies_beyond_all_measure_are_refused_at_once() -> None:
    began = time.monotonic()
    for metadata in (
        byte_level(tokens=["a"] * (2**20 + 1)),
        byte_level(tokens=["a" * 2**24, "b"], token_type=None),
        byte_level(merges=["h e"]) | {"tokenizer.ggml.merges": ["h e"] * (2**20 + 1)},
        byte_level() | {"tokenizer.ggml.merges": ["h" * 2**25, "h e"]},
    ):
        with pytest.raises(CheckpointError, match="must have at most"):
            listed_merges(metadata, read_tokens(metadata, spaces_are_marks=False))
    assert time.monotonic() - began < 20

"""The vocabulary as llguidance reads it: a description of the tokenizer in which every delimiter is a special token."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from jswa.text.tokenizer import Tokenizer

_END = "<|end of the grammar|>"  # stands for the end where a model has no end tokens


class Description(NamedTuple):
    """A tokenizer for llguidance.

    Attributes:
        text: a tokenizer.json.
        size: number of its ids, at least the model's.
        end_ids: ids of the tokens that end a text, at least one; one that the model lacks if it has none.
        special: ids of the special tokens by their text; they are no part of any text.
    """

    text: str
    size: int
    end_ids: tuple[int, ...]
    special: Mapping[str, int]


def describe(
    tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int], delimiters: Collection[int] = ()
) -> Description:
    """Return the description of a tokenizer for a model of `vocab_size` ids.

    llguidance takes added tokens for special ones if they are marked so or look like `<this>`. Here the special ones
    are those that are marked so, the end tokens and the `delimiters` of an answer; any other added token is text.
    """
    known = json.loads(tokenizer.backend.to_str())
    added: list[dict[str, Any]] = known.get("added_tokens", [])
    special = {*delimiters, *end_ids}
    for token in added:
        token["special"] = token["special"] or token["id"] in special
    # As a token of the model it is text, and has the same id.
    texts = [token for token in added if not token["special"] and _looks_special(token["content"])]
    if texts and _make_plain(known, texts, added):
        known["added_tokens"] = added = [token for token in added if token not in texts]
    size = tokenizer.vocab_size
    ends = tuple(sorted({token for token in end_ids if token < size}))
    if not ends:
        added.append(_special(size, _END))
        ends, size = (size,), size + 1
    named = {token["content"]: token["id"] for token in added if token["special"] or _looks_special(token["content"])}
    return Description(json.dumps(known, ensure_ascii=False), max(size, vocab_size), ends, named)


def _looks_special(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def _make_plain(known: dict[str, Any], tokens: list[dict[str, Any]], added: list[dict[str, Any]]) -> bool:
    """Put added tokens among those of the model, if it lists them by text; return whether it does.

    The other `added` tokens are put there as well, since without an entry they would be numbered anew.
    """
    vocabulary = known["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        return False
    byte_level = '"ByteLevel"' in json.dumps(known.get("decoder"))
    for token in tokens:
        text = token["content"]
        vocabulary.setdefault(_in_letters(text) if byte_level else text, token["id"])
    for token in added:
        if token not in tokens:
            vocabulary.setdefault(token["content"], token["id"])
    return True


def _in_letters(text: str) -> str:
    """Return a text as byte-level tokenizers write it: a character for each byte."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in letters]
    return "".join(chr(byte) if byte in letters else chr(256 + others.index(byte)) for byte in text.encode())


def _special(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": True}

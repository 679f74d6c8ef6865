"""The tokens of a GGUF file by id, with their kinds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jswa.gguf.vocabulary.fields import Metadata, id_of, numbers_of, refused, texts_of

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's numbers
_MOST = 2**20  # tokens: four times what the largest known vocabularies have
_MOST_CHARACTERS = 2**24
# Keys of special tokens by the name that chat templates use. "seperator" is the format's own spelling.
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class Tokens(NamedTuple):
    """The tokens that belong to the tokenizer. Rows of the embedding that no token has are left out.

    Attributes:
        texts: all texts by id, also those that are left out.
        kinds: the kind of each.
        ids: the id of each text that belongs to the tokenizer.
        named: ids of special tokens by the name that chat templates use.
    """

    texts: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]
    named: Mapping[str, int]

    def has(self, token_id: int) -> bool:
        """Whether a token belongs to the tokenizer."""
        return self.ids.get(self.texts[token_id]) == token_id


def read_tokens(metadata: Metadata, *, spaces_are_marks: bool) -> Tokens:
    """Return the tokens.

    Args:
        spaces_are_marks: runs of spaces are written as spaces if users defined them, as the converter does, and mean
            runs of U+2581.

    Raises CheckpointError if lists disagree in length, an id is out of range, or two tokens have one text.
    """
    texts = texts_of(metadata, TOKENS, _MOST, _MOST_CHARACTERS)
    if not texts:
        raise refused(TOKENS, texts, "must have at least one token")
    kinds = _kinds(metadata, len(texts))
    if spaces_are_marks:
        texts = [
            "\u2581" * len(text) if kind == USER_DEFINED and text and not text.strip(" ") else text
            for text, kind in zip(texts, kinds, strict=True)
        ]
        if "\t" not in texts:  # a byte in SentencePiece's file; transformers gives the text of its id to the tab
            texts = ["\t" if text == "<0x09>" else text for text in texts]
    named = {name: id_of(metadata, f"tokenizer.ggml.{key}", len(texts)) for name, key in _NAMED.items()}
    found = {name: token_id for name, token_id in named.items() if token_id is not None}
    unknown = (at for at, kind in enumerate(kinds) if kind == UNKNOWN and not _fills(texts[at], kind, at))
    if "unk_token" not in found and (token_id := next(unknown, None)) is not None:
        found["unk_token"] = token_id
    return Tokens(texts, kinds, _ids(texts, kinds, frozenset(found.values())), found)


def _kinds(metadata: Metadata, count: int) -> list[int]:
    kinds = numbers_of(metadata, TYPES, count) or [NORMAL] * count
    for at, kind in enumerate(kinds):
        if kind not in range(7):
            raise refused(f"{TYPES}[{at}]", kind, "must be a whole number from 0 to 6")
    return [int(kind) for kind in kinds]


def _ids(texts: Sequence[str], kinds: Sequence[int], named: frozenset[int]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if token_id not in named and (not text or _fills(text, kind, token_id)):
            continue
        if text in ids:
            raise refused(f"{TOKENS}[{token_id}]", text, f"must differ from token {ids[text]}")
        ids[text] = token_id
    return ids


def _fills(text: str, kind: int, token_id: int) -> bool:
    """Whether a token only fills a row of the embedding. The kind that converters give these has changed twice."""
    return kind in (UNUSED, USER_DEFINED, UNKNOWN) and text == f"[PAD{token_id}]"

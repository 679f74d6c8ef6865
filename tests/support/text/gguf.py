"""Metadata of small vocabularies as GGUF files have it."""

from typing import Any

from tokenizers import pre_tokenizers

from jswa.gguf.vocabulary.tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ hello"]


def byte_level(pre: str | None = "gpt-2", merges: list[str] = MERGES, **changes: Any) -> dict[str, Any]:
    """Return a vocabulary of bytes and of what the merges make, with `<s>`, `<e>`, a mark of users, and two fillers.

    Args:
        changes: other values by the end of their key; None leaves the key out.
    """
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges)]
    added = ["<s>", "<e>", "<think>", f"[PAD{len(tokens) + 3}]", f"[PAD{len(tokens) + 4}]"]
    return _changed(
        changes,
        model="gpt2",
        pre=pre,
        tokens=[*tokens, *added],
        token_type=[NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED, UNUSED, USER_DEFINED],
        merges=merges,
        bos_token_id=len(tokens),
        eos_token_id=len(tokens) + 1,
    )


def sentencepiece(words: dict[str, float], users: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """Return a vocabulary of `<unk>`, `<s>`, `</s>`, all bytes, words with their scores, and what users defined."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *users]
    return _changed(
        changes,
        model="llama",
        pre="default",
        tokens=tokens,
        scores=[0.0] * 259 + list(words.values()) + [-1000.0] * len(users),
        token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words) + [USER_DEFINED] * len(users),
        bos_token_id=1,
        eos_token_id=2,
    )


def _changed(changes: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}

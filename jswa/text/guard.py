"""Keep special tokens that stand in a user's text from becoming tokens.

A rendered conversation is tokenized as a whole, so `<|channel|>` in a user's text would become the token. In messages
of users and tools, a GUARD behind its first character splits it before the text is tokenized. The token of an image is
split in all messages: only an image itself may bring one.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.text.tokenizer import Tokenizer

GUARD = "\udfff"  # half of a surrogate pair: no text that can be tokenized contains it
_ROLES = ("user", "tool", "function")  # whose text others than the operator and the model have written


def guard(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, image: str | None = None
) -> list[Mapping[str, Any]]:
    """Return messages with a GUARD in each special token that a user's or a tool's text contains.

    Args:
        image: the token of an image, in which texts of all roles get one.
    """
    pattern, always = _special(tokenizer), re.compile(re.escape(image) if image else r"(?!)")
    return [_guarded(one, pattern if one.get("role") in _ROLES else always) for one in messages]


def encode_guarded(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> Int[np.ndarray, " T"]:
    """Return the token ids of a rendered conversation, with special tokens in guarded texts as ordinary ones.

    Raises InvalidPrompt if it cannot be tokenized.
    """
    first, *others = text.split(GUARD)
    parts = [tokenizer.encode(first, add_special_tokens=add_special_tokens)]
    parts += [tokenizer.encode(part, add_special_tokens=False) for part in others]
    return np.concatenate(parts)


@lru_cache(maxsize=8)
def _special(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern that finds the special tokens of a vocabulary, and other added tokens that look like them."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    texts = {
        one.content for one in added if len(one.content) > 1 and (one.special or one.content.startswith(("<", "[")))
    }
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _guarded(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + GUARD + found[0][1:], value)
    if isinstance(value, Mapping):
        return {key: _guarded(one, pattern) for key, one in value.items()}
    return [_guarded(one, pattern) for one in value] if isinstance(value, list) else value

"""Texts of tokens that cannot begin a delimiter of an answer, so that no parser needs to look at them."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_TEXTS = 2**15  # that are kept for a template: the texts of tokens recur
_LONGEST = 64  # characters of a text that is looked at
# Patterns whose matches depend on the text before them.
_CONTEXT = re.compile(r"\(\?<[=!]|\\[bBGK]")


@lru_cache(maxsize=16)
def plain_texts(patterns: Sequence[Any]) -> Callable[[str], bool] | None:
    """Return a function that tells whether a text neither has nor begins a match of any of the patterns.

    None if that depends on the text before it.

    Args:
        patterns: of the module `regex`, as a tuple.
    """
    if any(_CONTEXT.search(pattern.pattern) for pattern in patterns):
        return None

    @lru_cache(maxsize=_TEXTS)
    def is_plain(text: str) -> bool:
        if len(text) > _LONGEST:
            return False
        found = (pattern.search(text, partial=True) for pattern in patterns)
        return all(match is None or match.start() == len(text) for match in found)

    return is_plain


def patterns_of(compiled: Any) -> tuple[Any, ...]:
    """Return the patterns of all delimiters of transformers' compiled template."""
    fields = compiled.fields.values()
    return tuple(one for field in fields for one in (field.open_re, field.close_re) if one is not None)

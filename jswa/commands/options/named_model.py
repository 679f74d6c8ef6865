"""Which model the first word of `jswa chat` and `jswa generate` names; the other words are messages or prompts."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jswa.errors import ConfigError
from jswa.storage.hub import names_model

DEFAULT = "tiny"
_BEGINNING = re.compile(r"(~|\.{0,2})[/\\]|[A-Za-z]:[/\\]")  # of a path, whatever follows
_FILE = re.compile(r"\S+\.(gguf|safetensors|json|bin|pt|pth|ckpt)")


class Asked(NamedTuple):
    """A model, None if no word names one, and the texts for it."""

    model: str | None
    texts: Sequence[str]


def asked(words: Sequence[str], model: str | None, served: Collection[str] | None = None) -> Asked:
    """Return the model that the words or `--model` name, and the words that are texts.

    The first word is the model if it is a folder or file, OWNER/NAME or built in, or one of the models that a server
    serves. Any other first word is a text, unless it looks like a path.

    Args:
        words: the arguments without options, in order.
        model: the value of `--model`; then every word is a text.
        served: the names of a server's models, which are then the only ones.

    Raises ConfigError.
    """
    if model is not None or not words:
        return Asked(model, words)
    first = words[0]
    if first in served if served is not None else names_model(first):
        return Asked(first, words[1:])
    if looks_like_path(first):
        there = "there is no such file or folder" if served is None else f"the server serves {', '.join(served)}"
        limit = f"{there}; to send it as a text, name the model first, as in jswa chat MODEL TEXT"
        raise ConfigError("model", first, limit)
    return Asked(None, words)


def looks_like_path(word: str) -> bool:
    """Return whether a word is more likely a path or a name of a model than a text that somebody writes."""
    return bool(
        _BEGINNING.match(word) or _FILE.fullmatch(word) or (re.search(r"[/\\]", word) and not re.search(r"\s", word))
    )

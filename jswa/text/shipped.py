"""Chat templates that ship with jswa, for families whose own have no place for tools: `--chat-template NAME`."""

from functools import lru_cache
from pathlib import Path

from jswa.storage.checkpoint_files import read_file

FOLDER = Path(__file__).parents[1] / "assets" / "chat_templates"
_MOST_BYTES = 2**16  # of a template
# By its name, what the templates have that it can stand in for.
REPLACES = {"gemma3_tools": ("<start_of_turn>",), "chatml_tools": ("<|im_start|>",)}


@lru_cache
def shipped_template(name: str) -> str:
    """Return the source of a chat template. Raises KeyError for a name that is none of REPLACES."""
    if name not in REPLACES:
        raise KeyError(name)
    return read_file(FOLDER / f"{name}.jinja", _MOST_BYTES).decode()


def instead_of(source: str) -> str | None:
    """Return the name of a chat template with a place for tools, where one without can be replaced; else None."""
    return next((name for name, marks in REPLACES.items() if all(mark in source for mark in marks)), None)

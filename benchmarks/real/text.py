"""The text of which `make real` computes perplexity: the Python language reference of the standard library."""

import hashlib
import platform
from pydoc_data import topics
from typing import Any


def reference(size: int) -> str:
    """Return the first `size` bytes of the reference, its topics in the order of their names; it is almost ASCII."""
    whole = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return whole.encode()[:size].decode(errors="ignore")


def about(text: str) -> dict[str, Any]:
    """Return what names a text in a result file; another release of Python has another text."""
    return {
        "text": f"pydoc_data/topics.py of Python {platform.python_version()} (PSF licence)",
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def windows(ids: list[int], length: int) -> list[list[int]]:
    """Return the ids in windows of `length` that do not overlap; a rest that is shorter is left out."""
    return [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]

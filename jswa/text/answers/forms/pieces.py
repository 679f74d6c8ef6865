"""What readers of tool calls find, piece by piece."""

from typing import Literal

# ("call", name) where a call begins, ("arguments", text) with the next characters of its arguments in JSON, ("end", "")
# at its end, and ("content", text) for text that is no call, so that none is lost.
Piece = tuple[Literal["call", "arguments", "end", "content"], str]
NO_ARGUMENTS = "{}"


class Trimmed:
    """Text without white space at both ends, as it streams."""

    def __init__(self) -> None:
        self.begun = False
        self._spaces: list[str] = []

    def add(self, text: str) -> str:
        """Return the text that can be shown after more of it: white space at its end is held back."""
        if not self.begun:
            text = text.lstrip()
        shown = text.rstrip()
        held, spaces = self._spaces, text[len(shown) :]
        if not shown:
            if spaces:
                held.append(spaces)
            return ""
        self.begun = True
        self._spaces = [spaces] if spaces else []
        return "".join([*held, shown]) if held else shown

    def forget(self) -> None:
        """Drop white space that was held back."""
        self._spaces = []

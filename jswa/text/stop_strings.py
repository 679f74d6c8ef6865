"""Find stop strings in streamed text, and hold back text that may still become a stop string."""


class StopStrings:
    """Cuts the text of one sequence at the first complete stop string. `stopped`: that string, or None so far."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self.stopped: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece of text and return the text that is safe to show. After a stop string: ""."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The stop string that ends first wins; of two that end together, the longer one.
            at, self.stopped = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[: at + len(self.stopped)] if self._include else text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

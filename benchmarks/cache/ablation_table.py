"""A table of a reproduction: what was published, and the same figures here, the seed's idea on and off."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """One comparison. The rows' first two cells say where and what; then published, on, off.

    Attributes:
        on, off: what the two variants are.
        notes: what a reader must know to compare, one paragraph each.
    """

    title: str
    on: str
    off: str
    rows: Sequence[tuple[str, str, str, str, str]]
    notes: Sequence[str]

    def markdown(self) -> str:
        """With a heading; figures to the right."""
        header = ("setting", "figure", "published", f"on: {self.on}", f"off: {self.off}")
        lines = [header, ("---", "---", "---", "---:", "---:"), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n\n" + "\n\n".join(self.notes) + "\n"


def spread(figures: Sequence[float], digits: int = 0) -> str:
    """Median, and least to most where they differ."""
    ordered = sorted(figures)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    if ordered[0] == ordered[-1]:
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} ({ordered[0]:,.{digits}f} to {ordered[-1]:,.{digits}f})"

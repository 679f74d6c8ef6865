"""Table of an ablation: a published figure beside jswa's with the idea on and with the idea off."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """One comparison.

    Attributes:
        on, off: descriptions of the two variants.
        rows: (setting, figure, published, on, off) each.
        notes: paragraphs under the table, which a reader needs for the comparison.
    """

    title: str
    on: str
    off: str
    rows: Sequence[tuple[str, str, str, str, str]]
    notes: Sequence[str]

    def markdown(self) -> str:
        """Return the table in Markdown, with a heading; figures are aligned to the right."""
        header = ("setting", "figure", "published", f"on: {self.on}", f"off: {self.off}")
        lines = [header, ("---", "---", "---", "---:", "---:"), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n\n" + "\n\n".join(self.notes) + "\n"


def spread(figures: Sequence[float], digits: int = 0) -> str:
    """Format the median, and the range if the figures differ."""
    ordered = sorted(figures)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    if ordered[0] == ordered[-1]:
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} ({ordered[0]:,.{digits}f} to {ordered[-1]:,.{digits}f})"

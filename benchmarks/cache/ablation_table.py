"""Table of an ablation: a published figure beside jswa's with the idea on and with the idea off."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Row = tuple[str, str, str, str, str, str]  # setting, figure, published, on, off, by how much on loses


@dataclass(frozen=True)
class Table:
    """One comparison.

    Attributes:
        on, off: descriptions of the two variants.
        rows: the last cell is what `loss` returns.
        notes: paragraphs under the table, which a reader needs for the comparison.
    """

    title: str
    on: str
    off: str
    rows: Sequence[Row]
    notes: Sequence[str]

    def markdown(self) -> str:
        """Return the table in Markdown, with a heading; figures are aligned to the right."""
        header = ("setting", "figure", "published", f"on: {self.on}", f"off: {self.off}", "on loses by")
        lines = [header, ("---", "---", "---", "---:", "---:", "---:"), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n\n" + "\n\n".join(self.notes) + "\n"


def spread(figures: Sequence[float], digits: int = 0) -> str:
    """Format the median, and the range if the figures differ."""
    low, high = min(figures), max(figures)
    if low == high:
        return f"{low:,.{digits}f}"
    return f"{median(figures):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def loss(
    on: Sequence[float], off: Sequence[float], better: Literal["more", "fewer"], unit: Literal["%", "points"] = "%"
) -> str:
    """Return by how much the median of `on` is worse than that of `off`, or nothing if it is not worse.

    `unit` is % of the median of `off`, or points where the figures are percentages themselves.
    """
    behind = median(off) - median(on) if better == "more" else median(on) - median(off)
    share = behind if unit == "points" or not behind else 100 * behind / median(off)
    if round(share, 1) <= 0:
        return ""
    several = len(on) > 1 or len(off) > 1
    overlap = "; ranges overlap" if several and min(on) <= max(off) and min(off) <= max(on) else ""
    return f"{share:.1f} {unit}{overlap}"

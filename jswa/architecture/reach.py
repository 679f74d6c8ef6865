"""What a query of a local layer sees. All that frees, finds, masks or counts keys asks `Reach`. Imports no jax."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reach:
    """Keys that a query at position q of a local layer attends to, its own included.

    Sliding: k > q - size. Chunked: k ≥ (⌊q / size⌋ - lookback) · size, which are the keys of the query's chunk and of
    `lookback` chunks before it. Positions may be NumPy or JAX arrays, except in `first_visible`.
    """

    size: int
    chunked: bool = False
    lookback: int = 0

    def __post_init__(self) -> None:
        assert self.chunked or not self.lookback, "only chunks look back"

    @property
    def span(self) -> int:
        """Keys that a query sees at most."""
        return self.size * (1 + self.lookback)

    def oldest(self, position: Any, layers: int = 1) -> Any:
        """Return `first_visible`, but a number below 0 for a query whose reach begins before the text."""
        if not self.chunked:
            return position - layers * (self.size - 1)
        chunk = position // self.size
        return (chunk - layers * self.lookback if self.lookback else chunk) * self.size

    def first_visible(self, position: int, layers: int = 1) -> int:
        """Return the oldest position that a query at `position`, or any later query, sees.

        With `layers`: through so many local layers, one upon the other, each of which sees this far.
        """
        return max(0, int(self.oldest(position, layers)))

    def hidden_from(self, position: Any) -> Any:
        """Return the first query position that no longer sees `position`."""
        return (position // self.size + 1 + self.lookback) * self.size if self.chunked else position + self.size

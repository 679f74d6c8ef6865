"""The pages one sequence holds.

position  0        local.start·p                    end·p
full      [ every page from 0 ……………………………………………… full.end )
local               [ the window, page aligned …… local.end )
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

NEVER = 2**62


@dataclass(eq=False)
class PageRun:
    """Pages at the absolute page positions [start, end); `ids` elsewhere are stale, as in the device's tables.

    The device's table agrees below `sent`; pages from there on go out with the next plan.
    """

    ids: Int[np.ndarray, " width"]
    start: int = 0
    end: int = 0
    sent: int = 0

    @property
    def held(self) -> Int[np.ndarray, " n"]:
        """Ids of the pages held, in order."""
        return self.ids[self.start : self.end]

    def extend(self, ids: Int[np.ndarray, " n"]) -> None:
        """Hold these pages next."""
        self.ids[self.end : self.end + len(ids)] = ids
        self.end += len(ids)

    def take_unsent(self) -> tuple[range, Int[np.ndarray, " n"]]:
        """Page positions and ids that the device does not have yet; they count as sent from now on."""
        positions = range(self.sent, self.end)
        self.sent = self.end
        return positions, self.ids[positions.start : positions.stop]


@dataclass(eq=False)
class Lease:
    """Pages of one sequence; the manager alone changes it.

    Attributes:
        width: of the page tables.
        covered: positions below this have pages.
        slides_at: launched length at which the next local page leaves.
    """

    width: int
    covered: int = 0
    slides_at: int = NEVER
    full: PageRun = field(init=False)
    local: PageRun = field(init=False)

    def __post_init__(self) -> None:
        self.full = PageRun(np.zeros(self.width, np.int32))
        self.local = PageRun(np.zeros(self.width, np.int32))

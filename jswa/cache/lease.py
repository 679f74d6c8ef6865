"""The pages one sequence holds.

position  0           exact_from    local.kept·p     local.start·p          end·p
full      [ every page from 0, at first those of the prefix cache ……………… full.end )
local                               [ slid, unpublished )[ the window ………… local.end )
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.radix import Cursor

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
        kept: local pages in [kept, local.start) have left the window and wait to be published; the manager takes
            them back when memory is short.
        full_lo: positions below this have their full KV from the cache: the row must not write it again.
        local_lo: first position whose local KV the row can see.
        exact_from: first position whose local KV is that of a cold run; older local pages are never shared.
        salt: of the request; prefixes are shared within one salt only.
        cursor: how far the row's text is in the prefix tree.
        boundaries: positions, ascending, whose windows stay in the cache once the row has published them; the last is
            the end of what it knew when it started.
        branch: the one of them at which texts part; 0: none.
    """

    width: int
    covered: int = 0
    slides_at: int = NEVER
    kept: int = 0
    full_lo: int = 0
    local_lo: int = 0
    exact_from: int = 0
    salt: str = ""
    cursor: Cursor = field(default_factory=Cursor)
    boundaries: list[int] = field(default_factory=list)
    branch: int = 0
    full: PageRun = field(init=False)
    local: PageRun = field(init=False)

    def __post_init__(self) -> None:
        self.full = PageRun(np.zeros(self.width, np.int32))
        self.local = PageRun(np.zeros(self.width, np.int32))

    @property
    def slid(self) -> Int[np.ndarray, " n"]:
        """Ids of the local pages that have left the window and wait to be published."""
        return self.local.ids[self.kept : self.local.start]

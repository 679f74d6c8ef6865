"""The pages that one sequence holds.

page      0           exact_from    unpublished_from      local.start            end
full      [ every page from 0, at first those of the prefix cache ……………… full.end )
local                               [ slid, unpublished )[ the window ………… local.end )
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jswa.architecture import AttentionKind
from jswa.cache.pool import PagePool
from jswa.cache.prefix.radix import Cursor

NEVER = 2**62


@dataclass(eq=False, slots=True)
class PageRun:
    """Page ids of the page positions [start, end). Entries of `ids` outside of that range are stale.

    The device's page table has the entries below `sent`; the next plan uploads the others.
    """

    ids: Int[np.ndarray, " width"]
    start: int = 0
    end: int = 0
    sent: int = 0

    @property
    def held(self) -> Int[np.ndarray, " n"]:
        """Ids of the pages held, in order of position."""
        return self.ids[self.start : self.end]

    def extend(self, ids: Int[np.ndarray, " n"]) -> None:
        """Append pages to the run."""
        self.ids[self.end : self.end + len(ids)] = ids
        self.end += len(ids)

    def pop_unsent(self) -> tuple[range, Int[np.ndarray, " n"]]:
        """Return positions and ids of the pages that the device does not have yet, and mark them as sent."""
        positions = range(self.sent, self.end)
        self.sent = self.end
        return positions, self.ids[positions.start : positions.stop]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lease:
    """Pages of one sequence. Only the cache manager changes it.

    Attributes:
        tables: room for the ids of full and local pages by page position; what it contains is stale.
        covered: the lease has pages for every position below this one.
        next_slide: launched length at which the next local page leaves the window.
        unpublished_from: local pages in [unpublished_from, local.start) have left the window and wait to be published.
            The manager takes them back when memory is short.
        full_write_from: first position whose full KV the row writes. The KV of earlier positions is shared with the
            prefix cache.
        local_visible_from: first position whose local KV the row may read.
        exact_from: first position whose local KV equals that of a cold run. Earlier local pages are never shared.
        salt: key of the request's tree (`root_key`); prefixes are shared within one tree only.
        cursor: how far the row's text is in the prefix tree.
        window_ends: ascending positions whose windows the cache keeps once the row has published them. The last one is
            the end of the tokens that were known when the row started; an empty list means that it has been reached.
        branch_at: the window end at which the row's text diverges from cached text; 0 if it does not.
    """

    tables: Int[np.ndarray, "2 width"]
    covered: int = 0
    next_slide: int = NEVER
    unpublished_from: int = 0
    full_write_from: int = 0
    local_visible_from: int = 0
    exact_from: int = 0
    salt: str = ""
    cursor: Cursor = field(default_factory=Cursor)
    window_ends: list[int] = field(default_factory=list)
    branch_at: int = 0
    full: PageRun = field(init=False)
    local: PageRun = field(init=False)

    def __post_init__(self) -> None:
        self.full, self.local = PageRun(self.tables[0]), PageRun(self.tables[1])

    def run(self, kind: AttentionKind) -> PageRun:
        """Return the pages of a kind."""
        return self.full if kind == "full" else self.local

    @property
    def slid(self) -> Int[np.ndarray, " n"]:
        """Ids of the local pages that have left the window and wait to be published."""
        return self.local.ids[self.unpublished_from : self.local.start]


def held(lease: Lease, kind: str) -> Int[np.ndarray, " n"]:
    """Return the pages of a kind that a lease owns, with local ones that wait to be published."""
    run: PageRun = getattr(lease, kind)
    return run.ids[lease.unpublished_from : run.end] if kind == "local" else run.held


def owners_without(pool: PagePool, kind: str, closed: Collection[Lease]) -> Int[np.ndarray, " pages"]:
    """Return the owners of each page of a kind, if leases were closed."""
    owners: Int[np.ndarray, " pages"] = getattr(pool, f"{kind}_owners")
    if closed:
        owners = owners.copy()
        for lease in closed:
            owners[held(lease, kind)] -= 1
    return owners


def pop_last(runs: Sequence[PageRun]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return positions and ids of the last pages of runs, and mark them as sent: `pop_unsent` of runs that grew by one.

    The device has all other pages of the runs.
    """
    positions = [run.end - 1 for run in runs]
    ids = [run.ids[at] for run, at in zip(runs, positions, strict=True)]
    for run in runs:
        run.sent = run.end
    return np.array(positions, np.int32), np.array(ids, np.int32)

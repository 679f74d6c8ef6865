"""The one start rule: where a row starts that finds part of its text in the cache (docs/design.md §4).

Full KV is there for [0, n). Of the local KV there are pages, with holes. A boundary b ≤ n is *live* where local pages
cover all that a query at b sees. The row starts at the largest of

* the last live boundary;
* max(0, n - J·(W - 1)), J local layers: the *revival*. Running [start, n) against the cached KV of the full layers
  makes local layer j exact from start + (j - 1)(W - 1) on, so all of them are in [n - (W - 1), n);
* with chunked layers ⌊n / C⌋·C, which needs no local page and is live without any.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout


class Resume(NamedTuple):
    """Where a row starts.

    Attributes:
        full_to: n; full KV below comes from the cache, and is not written by the row.
        start: first position that the row runs.
        local_lo: first position that its local layers may see.
        exact_from: first position from which its local KV is that of a cold run.
        live_to: b; local pages [first visible of b, b) come from the cache. Equal to `local_lo` where there are none.
    """

    full_to: int
    start: int
    local_lo: int
    exact_from: int
    live_to: int


COLD = Resume(0, 0, 0, 0, 0)


def replay_length(layout: KVLayout) -> int:
    """Tokens whose replay makes the window of the last of them exact in every local layer: J·(W - 1)."""
    if layout.reach is None or layout.local is None:
        return 0
    return layout.local.num_layers * (layout.reach.size - 1)


def resume(layout: KVLayout, full_to: int, live: Bool[np.ndarray, " pages"]) -> Resume:
    """Apply the rule; `live` says which local pages there are, by page position, ⌈full_to / p⌉ of them at least."""
    if layout.reach is None or layout.local is None:
        return Resume(full_to, full_to, full_to, 0, full_to)
    boundary = last_live_boundary(layout.reach, layout.page_size, full_to, live)
    revived = 0 if layout.reach.chunked else max(0, full_to - replay_length(layout))
    if boundary >= revived:
        first = layout.reach.first_visible(boundary)
        # Pages of the cache are exact as a whole, so from the start of the first of them.
        return Resume(full_to, boundary, first, first // layout.page_size * layout.page_size, boundary)
    exact_from = revived + (layout.local.num_layers - 1) * (layout.reach.size - 1)
    return Resume(full_to, revived, revived, exact_from, revived)


def last_live_boundary(reach: Reach, page_size: int, length: int, live: Bool[np.ndarray, " pages"]) -> int:
    """Largest boundary ≤ `length` whose window is there; 0 always is."""
    missing = np.flatnonzero(~live[: -(-length // page_size)])
    end = length
    while len(missing):
        first = reach.first_visible(end) // page_size
        missing = missing[: np.searchsorted(missing, -(-end // page_size))]
        if not len(missing) or missing[-1] < first:
            break
        # No later boundary: each would see the missing page. It must itself end where that page begins.
        end = int(missing[-1]) * page_size
    return end

"""The start rule: where a row starts if the cache has part of its text (docs/design/prefix-cache.md).

The cache has full KV for [0, n), and local KV with holes. A boundary b ≤ n is *live* if its local pages cover every
position that a query at b sees. The row starts at the largest of

* the last live boundary;
* the oldest position that a query at n sees through all J local layers, one upon the other: the *revival*. Running
  [start, n) against the cached KV of the full layers makes a local layer exact from the oldest position that the layer
  above needs, so all of them are exact in what a query at n sees. With windows it starts at max(0, n - J·(W - 1)); with
  chunks, L of them seen beside the own one, at max(0, ⌊n / C⌋ - J·L) · C, which for L = 0 is live without local pages.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout


class Resume(NamedTuple):
    """Where a row starts.

    Attributes:
        full_to: n, the end of the full KV hit. The row does not write full KV below it.
        start: first position that the row runs.
        local_visible_from: first position that its local layers may read.
        exact_from: first position whose local KV equals that of a cold run.
        boundary: b; the local pages of [local_visible_from, b) come from the cache. Equal to `local_visible_from` if
            none do.
    """

    full_to: int
    start: int
    local_visible_from: int
    exact_from: int
    boundary: int


COLD = Resume(0, 0, 0, 0, 0)


def replay_start(layout: KVLayout, end: int) -> int:
    """Return where a replay up to `end` starts that makes the window of a query there exact in all local layers."""
    if layout.reach is None or layout.local is None:
        return end
    return layout.reach.first_visible(end, layout.local.num_layers)


def resume(layout: KVLayout, full_to: int, live: Bool[np.ndarray, " pages"]) -> Resume:
    """Apply the start rule. `live[i]`: the cache has the local page at page position i, for at least ⌈full_to / p⌉."""
    if layout.reach is None or layout.local is None:
        return Resume(full_to, full_to, full_to, 0, full_to)
    boundary = last_live_boundary(layout.reach, layout.page_size, full_to, live)
    revived = replay_start(layout, full_to)
    if boundary >= revived:
        first = layout.reach.first_visible(boundary)
        # A cached page is exact from its first token on.
        return Resume(full_to, boundary, first, first // layout.page_size * layout.page_size, boundary)
    return Resume(full_to, revived, revived, layout.reach.first_visible(full_to), revived)


def last_live_boundary(reach: Reach, page_size: int, length: int, live: Bool[np.ndarray, " pages"]) -> int:
    """Return the largest boundary ≤ `length` whose window is cached; 0 is always live."""
    missing = (~live[: -(-length // page_size)]).nonzero()[0]
    end = length
    while len(missing):
        first = reach.first_visible(end) // page_size
        missing = missing[: np.searchsorted(missing, -(-end // page_size))]
        if not len(missing) or missing[-1] < first:
            break
        # Any later boundary would see the missing page, so the boundary is at most the start of that page.
        end = int(missing[-1]) * page_size
    return end

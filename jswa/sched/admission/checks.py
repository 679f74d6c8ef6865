"""Checks before a waiting request starts: its cached prefix, the requests that go first, and the room for its pages."""

import bisect
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import NEVER, Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixMatch
from jswa.cache.prefix.radix import common_prefix
from jswa.sched.batch import Batch, lease_of
from jswa.sched.sequence import Sequence
from jswa.types import MissReason, PrefixHit

_SURE = 4  # tokens of an image that must be equal before it counts as the same image: their ids have 31 bits each


def match_of(cache: CacheManager, sequence: Sequence, most: int = NEVER) -> PrefixMatch:
    """Match at most `most` tokens of a waiting row. Its last token must run."""
    tokens = sequence.tokens
    last = len(tokens) - 1 if sequence.reads_cache else 0
    salt = sequence.request.cache_salt
    match = cache.match(salt, tokens, last if last < most else most)
    for image in sequence.request.images:
        if 0 < match.resume.full_to - image.start < min(_SURE, len(image.rows)):
            return cache.match(salt, tokens, image.start)
    return match


class Writers:
    """Running rows that will publish a prompt, by salt and first page; requests with that prefix wait for them."""

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._rows: dict[tuple[str, bytes], dict[Sequence, None]] = {}

    def add(self, sequence: Sequence, tokens: Int[np.ndarray, " T"]) -> None:
        """Enter a row that has begun, with its known tokens."""
        if len(tokens) >= self._page and lease_of(sequence).window_ends:
            self._rows.setdefault((sequence.request.cache_salt, tokens[: self._page].tobytes()), {})[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """Remove a row that has published its prompt, or ends."""
        rows = self._rows.get(key := self._key(sequence)) if self._rows else None
        if rows is not None:
            rows.pop(sequence, None)
            if not rows:
                del self._rows[key]

    def find(self, sequence: Sequence, match: PrefixMatch) -> Sequence | None:
        """Return a running row that is about to publish more of a waiting text than the cache has now."""
        if not self._rows or not sequence.reads_cache:
            return None
        tokens, found = sequence.tokens[:-1], match.resume.full_to
        for other in self._rows.get(self._key(sequence), ()):
            lease = lease_of(other)
            if lease.window_ends and not lease.cursor.detached:
                common = common_prefix(tokens, other.tokens[: lease.window_ends[-1]])
                if common - common % self._page > found:
                    return other
        return None

    def check(self, running: Items[Sequence]) -> None:
        """Assert that these are exactly the running rows that are about to publish a prompt of at least one page."""
        found = {row for rows in self._rows.values() for row in rows}
        publish = {row for row in running if lease_of(row).window_ends}
        assert found == {row for row in publish if lease_of(row).window_ends[-1] >= self._page}, "a writer is missing"

    def _key(self, sequence: Sequence) -> tuple[str, bytes]:
        return sequence.request.cache_salt, sequence.tokens[: self._page].tobytes()


def open_lease(
    cache: CacheManager, sequence: Sequence, match: PrefixMatch, length: int
) -> tuple[Lease, PrefixMatch] | None:
    """Open the lease of a waiting row of `length` tokens at its match, or at the page before; None: no room."""
    salt = sequence.request.cache_salt
    lease = cache.open_at(match, salt, length)
    if lease is None:  # a partial page and its copy do not both fit
        page = cache.layout.page_size
        match = match_of(cache, sequence, match.resume.full_to // page * page)
        lease = cache.open_at(match, salt, length)
    return None if lease is None else (lease, match)


def is_passed(
    batch: Batch, sequence: Sequence, match: PrefixMatch, writer: Sequence | None, long: int, *, behind: bool = False
) -> bool:
    """Return whether short prompts may overtake a long one that waits: the rest of a prompt before it is long too.

    Before it are the `writer` of its prefix, and running prompts of the same or a higher priority that have at most as
    many tokens left to prefill.

    Args:
        long: a prompt with more tokens than this to prefill is long.
        behind: whether another long prompt has begun in this step, and others wait. Long prompts, each shorter than the
            one before, would otherwise take all of a step's tokens, one share each.
    """
    need, priority = sequence.num_known - match.resume.start, sequence.request.options.priority
    if behind:
        return True
    for other, left in batch.left.items():
        first = other is writer or (left <= need and other.request.options.priority <= priority)
        if first and left > long:
            return True
    return False


def fewest(most: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest number of rows, at least one, that is enough; 0 if not even `most` are."""
    if not most or not enough(most):
        return 0
    return 1 + bisect.bisect_left(range(1, most), True, key=enough)


def note_admission(sequence: Sequence, match: PrefixMatch, *, prefix_cache: bool) -> None:
    """Record when the row was first scheduled and its prefix cache hit, for the first token's event."""
    length, at = len(sequence.request.prompt), match.resume
    if sequence.prefix is not None or sequence.run_to > length:
        return
    sequence.first_scheduled_time = sequence.first_scheduled_time or time.monotonic()
    reason: MissReason = match.reason
    if prefix_cache and not sequence.reads_cache:
        reason = "not finite" if sequence.failed_to else sequence.needs.recompute or "skipped"
    if not at.full_to:
        sequence.prefix = PrefixHit(length, 0, 0, 0, reason)
        return
    replayed, revived = at.full_to - at.start, 0 < at.start < at.exact_from
    host = 0 if sequence.recalled_from is None else max(0, at.start - sequence.recalled_from)
    disk = min(host, max(0, min(at.start, sequence.disk_gain[1]) - sequence.disk_gain[0]))
    sequence.prefix = PrefixHit(length, at.start, at.full_to, replayed, reason, revived, host, disk)

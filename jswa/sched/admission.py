"""Checks before a waiting request starts: its cached prefix, the requests that go first, and the room for its pages."""

import bisect
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows

from jswa.cache.capacity import peak_slots
from jswa.cache.lease import NEVER, Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import Match
from jswa.cache.prefix.radix import common_prefix
from jswa.config import Limits
from jswa.sched.draft import Draft, lease_of
from jswa.sched.sequence import Sequence
from jswa.types import MissReason, PrefixHit


def match_of(cache: CacheManager, sequence: Sequence, most: int = NEVER) -> Match:
    """Match at most `most` tokens of a waiting row. Its last token must run."""
    limit = min(most, sequence.num_known - 1) if sequence.reads_cache else 0
    return cache.match(sequence.request.cache_salt, sequence.tokens[: sequence.num_known], limit)


def prefix_writer(running: Rows[Sequence], sequence: Sequence, match: Match, page_size: int) -> Sequence | None:
    """Return a running row that is about to publish more of this text than the cache has now."""
    if not sequence.reads_cache:
        return None
    tokens, found = sequence.tokens[: sequence.num_known - 1], match.resume.full_to
    for other in running:
        lease = lease_of(other)
        if lease.window_ends and not lease.cursor.detached and lease.salt == sequence.request.cache_salt:
            common = common_prefix(tokens, other.tokens[: lease.window_ends[-1]])
            if common - common % page_size > found:
                return other
    return None


def open_lease(cache: CacheManager, sequence: Sequence, match: Match) -> tuple[Lease, Match] | None:
    """Open the lease of a waiting row at its match, or at the page before; None if there is no room."""
    salt, length = sequence.request.cache_salt, sequence.num_known
    lease = cache.open_at(match, salt, length)
    if lease is None:  # a partial page and its copy do not both fit
        page = cache.layout.page_size
        match = match_of(cache, sequence, match.resume.full_to // page * page)
        lease = cache.open_at(match, salt, length)
    return None if lease is None else (lease, match)


def is_passed(
    draft: Draft, sequence: Sequence, match: Match, writer: Sequence | None, long: int, *, behind: bool = False
) -> bool:
    """Return whether short prompts may overtake a waiting one: it is long, and so is the rest of a prompt before it.

    Before it are the `writer` of its prefix, and running prompts of the same or a higher priority that have at most as
    many tokens left to prefill.

    Args:
        long: a prompt with more tokens than this to prefill is long.
        behind: whether another long prompt has begun in this step, and others wait. Long prompts, each shorter than the
            one before, would otherwise take all of a step's tokens, one share each.
    """
    need = sequence.num_known - match.resume.start
    if need <= long:
        return False
    if behind:
        return True
    for other in draft.prompts:
        first = other is writer or (draft.left(other) <= need and other.request.priority <= sequence.request.priority)
        if first and draft.left(other) > long:
            return True
    return False


def admissible(
    cache: CacheManager,
    limits: Limits,
    running: Rows[Sequence],
    sequence: Sequence,
    match: Match,
    spare: int = 0,
    victims: Rows[Sequence] = (),
) -> bool:
    """Return whether resident(prompt + 1) + the step's reserve fits unclaimed memory (docs/design.md §3).

    Args:
        spare: slots that must be left besides.
        victims: running rows that would be preempted first.
    """
    layout, closed, gone = cache.layout, [lease_of(row) for row in victims], set(victims)
    claimed = prefill_rows = 0
    for other in running:
        if other in gone:
            continue
        held = cache.held_slots(lease_of(other))
        claimed += max(0, layout.resident_slots(max(other.launched, other.num_known + 1)) - held)
        prefill_rows += other.launched < other.num_known
    reserve = layout.step_reserve_slots(limits.max_tokens, prefill_rows + 1) if prefill_rows else 0
    need = layout.resident_slots(sequence.num_known + 1)
    alone = peak_slots(layout, limits.max_tokens, sequence.num_known + 1)
    available = cache.available_without(closed) if closed else cache.available_slots
    return max(need + reserve, alone) - cache.leased_slots(match, closed) + claimed <= available - spare


def fewest(most: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest number of rows, at least one, that is enough; 0 if not even `most` are."""
    if not most or not enough(most):
        return 0
    return 1 + bisect.bisect_left(range(1, most), True, key=enough)


def note_admission(sequence: Sequence, match: Match, *, prefix_cache: bool) -> None:
    """Record when the row was first scheduled and its prefix cache hit, for the first token's event."""
    length, at = len(sequence.request.prompt), match.resume
    if sequence.prefix is not None or sequence.num_known > length:
        return
    sequence.first_scheduled_time = sequence.first_scheduled_time or time.monotonic()
    reason: MissReason = match.reason
    if prefix_cache and not sequence.reads_cache:
        reason = "not finite" if sequence.failed_to else "prompt logprobs"
    replayed, revived = at.full_to - at.start, 0 < at.start < at.exact_from
    sequence.prefix = PrefixHit(length, at.start, at.full_to, replayed, reason, revived=revived)

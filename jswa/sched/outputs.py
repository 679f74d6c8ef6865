"""What comes back from a step besides its tokens: finite KV, and the hit of a first token."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from jswa.cache.manager import CacheManager
from jswa.cache.pool import PagePool
from jswa.plan import StepEvents, StepPlan, StepResults, TokenEvent
from jswa.ribs.rib import Landed, RibRows
from jswa.sched.sequence import Sequence


@dataclass(frozen=True)
class SchedulerStats:
    """Rows and memory at one moment.

    Attributes:
        full_pages, local_pages: pages that rows hold.
        cached_slots: slots of pages that only the prefix cache holds; they can be evicted.
    """

    running: int
    waiting: int
    full_pages: int
    local_pages: int
    cached_slots: int
    free_slots: int
    total_slots: int
    preemptions: int

    @staticmethod
    def of(pool: PagePool, running: int, waiting: int, preemptions: int) -> "SchedulerStats":
        """Return the figures of a pool and of so many sequences."""
        return SchedulerStats(
            running=running,
            waiting=waiting,
            full_pages=pool.num_full - pool.evictable_full,
            local_pages=pool.num_local - pool.evictable_local,
            cached_slots=pool.evictable_slots,
            free_slots=pool.free_slots,
            total_slots=pool.total_slots,
            preemptions=preemptions,
        )


def confirm(cache: CacheManager, sequence: Sequence, end: int) -> None:
    """Publish what a row has computed up to `end`: the step that ran it was finite."""
    lease = sequence.lease
    if lease is None:
        return  # it was preempted since
    if not sequence.hit_counted:
        count_hit(cache, sequence)
    if sequence.failed_to and end >= sequence.failed_to and sequence.cache_epoch == cache.epoch:
        # What failed behind cached KV is finite without it: the fault is in the cache.
        cache.withdraw(lease.salt, sequence.tokens[: sequence.cached_to])
    if lease.window_ends:
        cache.publish(lease, sequence.tokens, end)


def count_hit(cache: CacheManager, sequence: Sequence) -> None:
    """Count the row's prefix cache hit, once."""
    if sequence.prefix is not None and not sequence.hit_counted:
        cache.hits.count(sequence.prefix)
    sequence.hit_counted = True


def with_timing(event: TokenEvent, sequence: Sequence) -> TokenEvent:
    """Return the event; that of a first token with its timing and its hit."""
    if sequence.first_scheduled_time is not None:
        event = event._replace(first_scheduled_time=sequence.first_scheduled_time, prefix=sequence.prefix)
        sequence.first_scheduled_time = None
    return event


def landed_of(sequence: Sequence, plan: StepPlan, row: int, place: int) -> Landed:
    """Return a row that has come back, as ribs see it. Arguments as of `Landed`."""
    request = sequence.request
    return Landed(request, sequence.notes, plan, row, place, sequence.num_known - len(request.prompt))


def with_results(
    events: list[TokenEvent], ribs: Items[RibRows], landed: Landed, results: StepResults | None
) -> list[TokenEvent]:
    """Return a row's events with what ribs add to them."""
    for rib in ribs:
        events = rib.applied(landed, results, events)
    return events


def joined(parts: Items[StepEvents], others: list[TokenEvent]) -> StepEvents:
    """Return one step's events of rows that got several tokens: `parts[i]` has the tokens at place i of each row.

    All tokens of a request that ends are events, in their order.
    """
    names = np.concatenate([part.request_ids for part in parts])
    tokens = np.concatenate([part.tokens for part in parts])
    last = [event for part in parts for event in part.others]
    if last:
        ended = {event.request_id for event in last}
        goes_on = np.array([name not in ended for name in names.tolist()], bool)
        before = zip(names[~goes_on].tolist(), tokens[~goes_on].tolist(), strict=True)
        others = [*others, *(TokenEvent(name, token) for name, token in before), *last]
        names, tokens = names[goes_on], tokens[goes_on]
    return StepEvents(names, tokens, tuple(others))

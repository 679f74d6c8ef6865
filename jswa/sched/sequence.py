"""The scheduler's state of one request. While the request runs, its counters are in `Rows`."""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import Lease
from jswa.grammar.matching.llg import Matcher
from jswa.plan import Request
from jswa.ribs.table import needs_of
from jswa.sched.rows import RECENT, Rows, Slots, record_of
from jswa.types import DraftCounts, PrefixHit

Rank = tuple[int, int]  # priority and arrival


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # its pages are free, but a token is in flight: it waits again once that has come
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request in the scheduler.

    Attributes:
        rank: its place, by priority and arrival; preemption does not change it.
        limit: prompt and generated tokens at most. The last token is sampled but never run, so launched < limit.
        rows, row_id, lease: what it has while it runs; None and -1 otherwise.
        returning: steps in flight that run a row which the sequence has left.
        discard: the tokens of this many of them are ignored, because the sequence starts again.
        run_to: the number of tokens that it must run before it samples one that is not known: those that were known
            when it last began to run, and those that its grammar has foretold.
        cached_to: end of the full KV that it started from.
        cache_epoch: `CacheManager.epoch` when it started there.
        failed_to: end of the step that was not finite and may have read cached KV that is not. The row runs without
            the cache since then; 0: it may use the cache.
        passed_by: tokens of the others' prompts that began while this sequence waited for memory.
        blocked: `Requests.state` when the sequence last found no room.
        slots: those of `Requests.slots_of`, for the length that it had.
        matcher: follows the text in the request's grammar, if it has one. Before the mask of a next token is filled, it
            has accepted all generated tokens.
        foretold_from: position of the token that the step in flight samples first, if it is known already, since the
            grammar forces it; otherwise 0.
        accepted, rejected: drafts that were right or not, in the rows that it has left.
        hit_counted: whether the cache's counters have its hit.
        first_scheduled_time, prefix: reported with the first token.
        needs, notes: what the request needs of ribs, and what these keep of it, by name.
    """

    request: Request
    rank: Rank
    limit: int
    status: Status = Status.WAITING
    rows: Rows | None = None
    row_id: int = -1
    lease: Lease | None = None
    returning: int = 0
    preemptions: int = 0
    discard: int = 0
    run_to: int = 0
    cached_to: int = 0
    cache_epoch: int = 0
    failed_to: int = 0
    passed_by: int = 0
    recalled_from: int | None = None
    disk_until: float | None = None
    disk_gain: tuple[int, int] = (0, 0)
    blocked: tuple[int, ...] | None = None
    slots: Slots | None = None
    foretold_from: int = 0
    accepted: int = 0
    rejected: int = 0
    hit_counted: bool = False
    first_scheduled_time: float | None = None
    prefix: PrefixHit | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.matcher: Matcher | None = None if self.request.grammar is None else self.request.grammar.matcher()
        self.needs = needs_of(self.request.params, images=bool(self.request.images))
        self.record = record_of(self.request, self.limit)
        self._text = self.request.prompt
        self._length = len(self._text)
        self._finite_to = 0

    @property
    def launched(self) -> int:
        """The positions that were handed to the device or found in the cache; 0 while the sequence does not run."""
        return 0 if self.rows is None else int(self.rows.launched[self.row_id])

    @property
    def ahead(self) -> int:
        """The positions behind these that the device may have run, drafts that may be wrong (`Rows`)."""
        return 0 if self.rows is None else int(self.rows.ahead[self.row_id])

    @property
    def num_known(self) -> int:
        """The number of tokens that the host knows: the prompt, and those that have come back."""
        return self._length if self.rows is None else int(self.rows.known[self.row_id])

    @property
    def finite_to(self) -> int:
        """End of the positions that the row has run since it started, in steps that came back finite; 0 before one has.

        The KV of earlier positions is known to be finite. KV from there on is not published.
        """
        if self.rows is None:
            return self._finite_to
        return self.num_known - 1 if self.rows.plain[self.row_id] else int(self.rows.finite_to[self.row_id])

    @property
    def in_flight(self) -> int:
        """Steps on the device that run this row, or the row that the sequence has left."""
        return self.returning if self.rows is None else self.rows.in_flight(self.row_id)

    @property
    def drafts(self) -> DraftCounts:
        """The drafts so far."""
        if self.rows is None:
            return DraftCounts(self.accepted, self.rejected)
        accepted, rejected = self.rows.accepted[self.row_id], self.rows.rejected[self.row_id]
        return DraftCounts(self.accepted + int(accepted), self.rejected + int(rejected))

    @property
    def tokens(self) -> Int[np.ndarray, " T"]:
        """The known tokens. The array is valid until the next token is known."""
        self.copy_recent()
        return self._text[: self._length]

    @property
    def reads_cache(self) -> bool:
        """Whether the row may start from cached KV."""
        skips = self.request.params.skip_reading_prefix_cache
        return not (self.failed_to or skips) and self.needs.recompute is None

    @property
    def needs_one(self) -> bool:
        """Whether a running row has one token to run: the last that was sampled, or the last of a known text."""
        return self.num_known - 1 <= self.launched < self.limit - 1

    @property
    def is_plain(self) -> bool:
        """Whether a token of a running row needs no more than the arrays of `Rows`: see `Rows.plain`."""
        assert self.lease is not None
        reported = self.hit_counted and self.first_scheduled_time is None and not self.failed_to
        wants_more = self.needs.watched or self.foretold_from
        launched = self.launched >= self.run_to
        return reported and launched and not wants_more and not self.lease.window_ends

    def copy_recent(self) -> None:
        """Copy the tokens that `Rows` has got since the last call. It has room for `RECENT` of them."""
        if self.rows is not None and self.rows.known[self.row_id] > self._length:
            self._extend(self.rows.recent(self.row_id, self._length))
            self.rows.copied(self.row_id)

    def append(self, token: int) -> None:
        """Append a token that came back."""
        if self.rows is None:
            self._extend(np.array([token], np.int32))
        elif self.rows.append_one(self.row_id, token):
            self.copy_recent()

    def extend(self, tokens: Int[np.ndarray, " n"]) -> None:
        """Append any number of tokens."""
        self.copy_recent()
        self._extend(tokens)
        if self.rows is not None:
            self.rows.set_known(self.row_id, self.tokens)

    def untold(self, tokens: list[int]) -> list[int]:
        """Return those of the tokens that a step has sampled that the sequence's grammar has not foretold."""
        begin, self.foretold_from = self.foretold_from, 0
        if not begin:
            return tokens
        told = self.tokens[begin:].tolist()
        assert tokens[: len(told)] == told[: len(tokens)], "a grammar has forced another token"
        if self.rows is not None:
            self.rows.settle_at(self.row_id, begin - 1 + len(tokens))
        return tokens[len(told) :]

    def leave(self) -> None:
        """Release the row id. The pages are free already; tokens of steps in flight may still arrive."""
        assert self.rows is not None
        self.copy_recent()
        self.returning, self._finite_to = self.in_flight, self.finite_to
        self.accepted += int(self.rows.accepted[self.row_id])
        self.rejected += int(self.rows.rejected[self.row_id])
        self.rows.release(self.row_id, self.request, self.needs)
        self.rows, self.row_id, self.lease = None, -1, None

    def check(self, steps: int) -> None:
        """Assert the laws of an unfinished sequence, with so many steps in flight; for tests."""
        assert self.status is not Status.FINISHED
        running = self.status is Status.RUNNING
        assert (self.lease is not None) == (self.rows is not None) == (self.row_id >= 0) == running
        assert 0 <= self.in_flight <= steps
        assert self.num_known <= self.limit
        assert self.launched + self.ahead <= self.limit - 1
        assert self.launched <= self.num_known + self.in_flight
        assert 0 <= self.ahead <= self.in_flight * (0 if self.rows is None else self.rows.speculative[self.row_id])
        assert self.num_known - self._length < RECENT, "tokens are lost before they are copied"
        if self.matcher is not None:
            generated = self.num_known - len(self.request.prompt)
            assert self.matcher.accepted <= generated, "the grammar has accepted a token that the text lacks"
        assert 0 <= self.foretold_from < self.num_known
        assert self.in_flight or not self.foretold_from

    def _extend(self, tokens: Int[np.ndarray, " n"]) -> None:
        end = self._length + len(tokens)
        if end > len(self._text) or self._text is self.request.prompt:
            room = np.empty(end + max(RECENT, end // 4), np.int32)
            room[: self._length] = self._text[: self._length]
            self._text = room
        self._text[self._length : end] = tokens
        self._length = end

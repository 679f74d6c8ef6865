"""The scheduler's state of one request.

    position  0 ………………………………… launched ………………… limit
    tokens    [ known to the host ……… num_known )            launched ≤ num_known + 1 - 1 step in flight

`launched` positions have been handed to the device or found in the cache. The host knows `num_known` token ids: the
prompt, and the tokens that have come back. A row with launched < num_known runs known tokens (a prompt, or a preempted
text again). Any other row runs the token that the device sampled last, which the host need not know.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import Lease
from jswa.plan import PromptLogprobs, Request
from jswa.types import PrefixHit

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
        row_id: index in the device's tables while it runs; -1 otherwise.
        in_flight: steps on the device that run this row.
        discard: the tokens of this many steps in flight are ignored, because the row was restarted.
        finite_to: end of the positions that the row has run since it started, in steps that came back finite; 0 before
            the first of them. Earlier KV is known to be finite, and nothing from there on is published.
        cached_to: end of the full KV that it started from.
        cache_epoch: `CacheManager.epoch` when it started there.
        failed_to: end of the step that was not finite and may have read cached KV that is not. The row runs without
            the cache since then; 0: it may use the cache.
        passed_by: tokens of the others' prompts that began while this sequence waited for memory.
        hit_counted: whether the cache's counters have its hit.
        first_scheduled_time, prefix: reported with the first token.
    """

    request: Request
    rank: Rank
    limit: int
    status: Status = Status.WAITING
    row_id: int = -1
    lease: Lease | None = None
    launched: int = 0
    in_flight: int = 0
    preemptions: int = 0
    discard: int = 0
    finite_to: int = 0
    cached_to: int = 0
    cache_epoch: int = 0
    failed_to: int = 0
    passed_by: int = 0
    hit_counted: bool = False
    first_scheduled_time: float | None = None
    prefix: PrefixHit | None = None
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    waits_for_tokens: bool = field(init=False)
    num_known: int = field(init=False)
    tokens: Int[np.ndarray, " capacity"] = field(init=False)

    def __post_init__(self) -> None:
        self.waits_for_tokens = self.request.waits_for_tokens
        self.num_known = len(self.request.prompt)
        self.tokens = np.empty(self.num_known + 64, np.int32)
        self.tokens[: self.num_known] = self.request.prompt

    @property
    def reads_cache(self) -> bool:
        """Whether the row may start from cached KV."""
        return not self.failed_to and self.request.params.prompt_logprobs is None

    def append(self, token: int) -> None:
        """Append a token that came back from the device."""
        if self.num_known == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(len(self.tokens), np.int32)])
        self.tokens[self.num_known] = token
        self.num_known += 1

    def check(self, steps: int) -> None:
        """Assert the laws of an unfinished sequence, with so many steps in flight; for tests."""
        assert self.status is not Status.FINISHED
        assert (self.lease is not None) == (self.status is Status.RUNNING)
        assert 0 <= self.in_flight <= steps
        assert self.num_known <= self.limit
        assert self.launched <= self.limit - 1
        assert self.launched <= self.num_known + self.in_flight

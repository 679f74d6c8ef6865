"""The one mutable object per request.

    position  0 ………………………………… launched ………………… limit
    tokens    [ known to the host ……… num_known )            launched ≤ num_known + 1 - 1 step in flight

`launched` positions have been handed to the device, or found in the cache; `num_known` token ids have come back or
came with the prompt. A row with launched < num_known runs known tokens (a prompt, or a preempted text again); otherwise
its next token is the one the device sampled last, and the host need not know it.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import NEVER, Lease
from jswa.plan import ChoiceLogprobs, Request
from jswa.types import PrefixHit


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # pages gone, a token still in flight: waits again once that has come
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """State of one request in the scheduler. `rank` is its turn, by priority and arrival, kept through preemption;
    `limit` is prompt + generated tokens at most; the last of them is sampled but never run, so launched < limit;
    `first_scheduled_time` and `prefix` wait here until the first token's event takes them along; `computed_from` is the
    first position that it has ever computed itself; tokens of the next `discard` steps in flight are not its own."""

    request: Request
    rank: tuple[int, int]
    limit: int
    status: Status = Status.WAITING
    row_id: int = -1
    extras_id: int = -1
    lease: Lease | None = None
    launched: int = 0
    in_flight: int = 0
    discard: int = 0
    computed_from: int = NEVER
    first_scheduled_time: float | None = None
    prefix: PrefixHit | None = None
    prompt_logprobs: list[ChoiceLogprobs] = field(default_factory=list)
    waits_for_tokens: bool = field(init=False)
    num_known: int = field(init=False)
    tokens: Int[np.ndarray, " capacity"] = field(init=False)

    def __post_init__(self) -> None:
        self.waits_for_tokens = self.request.waits_for_tokens
        self.num_known = len(self.request.prompt)
        self.tokens = np.empty(self.num_known + 64, np.int32)
        self.tokens[: self.num_known] = self.request.prompt

    def append(self, token: int) -> None:
        """Add a token that came back from the device."""
        if self.num_known == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(len(self.tokens), np.int32)])
        self.tokens[self.num_known] = token
        self.num_known += 1

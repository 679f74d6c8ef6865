"""What passes between the engine's parts: requests in, step plans down, tokens up. Ints and numpy only.

A `Request` goes to the scheduler, a `StepPlan` from the scheduler to the device side, tokens and log probabilities
back, and a `TokenEvent` for each of them to the caller.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.types import FinishReason, PrefixHit, SamplingParams

FROM_DEVICE = -1  # in StepPlan.tokens: the token that the previous step sampled for this row
NOT_FINITE = -1  # in the tokens of a step: logits held NaN or infinity, or nothing was allowed


class Constraint(NamedTuple):
    """What a request with penalties, biases or forbidden tokens needs. Masks are bits, 1 = allowed, 32 tokens a word.

    Attributes:
        bias: added to the logits, [V] float32.
        mask: tokens allowed from `min_length` tokens on, [⌈V/32⌉] int32.
        early_mask: tokens allowed before, without stop tokens.
        bad_words: token sequences whose last token is forbidden where the text ends in the others.
    """

    bias: Float[np.ndarray, " V"]
    mask: Int[np.ndarray, " words"]
    early_mask: Int[np.ndarray, " words"]
    min_length: int
    bad_words: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt on its way into the engine, already validated.

    Attributes:
        stop_ids: tokens that end it, the model's end tokens included unless it ignores them.
        key: the random key of the request, the two halves of its 64-bit seed.
        max_length: prompt + generated tokens at most.
        priority: lower runs first; arrival decides between equals.
        constraint: None where the logits are used as they are.
        cache_salt: prefixes are shared with requests of the same salt only; it is of the adapter too.
        adapter: index of the LoRA adapter; 0: none.
    """

    request_id: str
    prompt: Int[np.ndarray, " P"]
    params: SamplingParams
    stop_ids: frozenset[int]
    key: tuple[int, int]
    max_length: int
    priority: int = 0
    constraint: Constraint | None = None
    cache_salt: str = ""
    adapter: int = 0

    @property
    def waits_for_tokens(self) -> bool:
        """Whether each step needs all earlier tokens on the host: the row runs in every second step only."""
        return self.constraint is not None and bool(self.constraint.bad_words)


class ChoiceLogprobs(NamedTuple):
    """Log probabilities at one position: of the token that stands there, its rank, and the most likely tokens."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEvent(NamedTuple):
    """One token of one request, or its end. `token` is None where the request ended without one.

    With the first token come `prompt_logprobs`, one entry per prompt token but the first, `first_scheduled_time`,
    when the request's first step was planned, in seconds of `time.monotonic`, and what the prefix cache had for it.
    """

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: ChoiceLogprobs | None = None
    prompt_logprobs: list[ChoiceLogprobs] | None = None
    first_scheduled_time: float | None = None
    prefix: PrefixHit | None = None


class LogprobTable(NamedTuple):
    """Log probabilities of N choices as they come from the device; see `exec.sampling.LogprobRows`."""

    chosen: Float[np.ndarray, " N"]
    rank: Int[np.ndarray, " N"]
    ids: Int[np.ndarray, "N top"]
    values: Float[np.ndarray, "N top"]

    def row(self, index: int, token: int) -> ChoiceLogprobs:
        """One of them, for the token that was chosen."""
        ids, values = self.ids[index].tolist(), self.values[index].tolist()
        return ChoiceLogprobs(token, float(self.chosen[index]), int(self.rank[index]), ids, values)


class StepLogprobs(NamedTuple):
    """Log probabilities of one step: of each row's sampled token, and of each token's successor in its prompt."""

    sampled: LogprobTable
    prompt: LogprobTable | None


class ExtrasEntry(NamedTuple):
    """New contents of one place in the extras tables. `bias` None: the mask alone changes, counts stay.

    `skipped`: the tokens that the row will not run because their KV is cached, prompt first.
    """

    extras_id: int
    mask: Int[np.ndarray, " words"]
    bias: Float[np.ndarray, " V"] | None = None
    skipped: Int[np.ndarray, " S"] = np.zeros(0, np.int32)
    prompt_length: int = 0


class TableRow(NamedTuple):
    """The pages of a row that starts on cached ones: ids from page position 0, and from `first_local`."""

    row_id: int
    full: Int[np.ndarray, " F"]
    first_local: int
    local: Int[np.ndarray, " L"]


SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency",
    "key_high", "key_low", "extras", "prompt_length",
)  # fmt: skip
Logprobs = Literal["none", "sampled", "prompt"]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: which rows run which positions. All that the device side gets to know, and it can be printed.

    R rows, T tokens. Row i runs positions [starts[i], starts[i] + counts[i]); its tokens follow those of row i - 1.

    Attributes:
        row_ids: the row's place in the device state (page tables, last token), held for the row's life.
        full_write_from: first position whose full KV the row writes; that of positions before comes from the cache.
        local_visible_from: first position that the row's local layers may see.
        samples: whether the row's last position yields a token (a chunk inside a prompt does not).
        tokens: ids to run; FROM_DEVICE for a row whose token the previous step sampled.
        sampling: sampling parameters by row, columns `SAMPLING`, floats as their bits.
        extras: what to enter in the tables of counts, biases and masks before the step.
        full_pages, local_pages: new page-table entries (slot, page position, page id).
        moves: slots of 1/m block to copy (source, destination, whether to rename in the full table), in order, before
            the step: full pages that compaction moves, and copies of cached pages that a row will write to.
        table_rows: whole rows to enter in the page tables after the moves.
        logprobs: whether any row wants log probabilities of its sampled token, or also of its prompt; then `targets`
            holds the token that follows each token of the step (0 where none does).
        adapters: index of the row's LoRA adapter; 0: none.
    """

    row_ids: Int[np.ndarray, " R"]
    starts: Int[np.ndarray, " R"]
    counts: Int[np.ndarray, " R"]
    full_write_from: Int[np.ndarray, " R"]
    local_visible_from: Int[np.ndarray, " R"]
    samples: Int[np.ndarray, " R"]
    tokens: Int[np.ndarray, " T"]
    sampling: Int[np.ndarray, "R C"]
    full_pages: Int[np.ndarray, "F 3"]
    local_pages: Int[np.ndarray, "L 3"]
    moves: Int[np.ndarray, "M 3"]
    table_rows: tuple[TableRow, ...] = ()
    extras: tuple[ExtrasEntry, ...] = ()
    logprobs: Logprobs = "none"
    targets: Int[np.ndarray, " T0"] = field(default_factory=lambda: np.zeros(0, np.int32))
    adapters: Int[np.ndarray, " R0"] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.tokens)

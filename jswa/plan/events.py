"""What a step yields for the requests: tokens, their ends, and log probabilities."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from jswa.errors import GenerationError
from jswa.types import DraftCounts, FinishReason, PrefixHit

# In the tokens of a step, of rows that sample a token and of those that do not:
NOT_FINITE = -1  # KV or logits of the row's tokens held NaN or infinity
NOTHING_ALLOWED = -2  # the row's constraint forbids every token
PAST_LIMIT = -4  # the row ran nothing: drafts that were right had taken it to its limit before the step


class ChoiceLogprobs(NamedTuple):
    """Log probabilities at one position: the token there with its rank, and the most likely tokens.

    Tuples of numbers, which the garbage collector does not look at again: thousands of these wait for a slow client.
    `drawn` and `experts` as in `LogprobTable`, the latter as the bytes of int16.
    """

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    drawn: float | None = None
    experts: bytes | None = None


class PromptLogprobs:
    """Log probabilities of the prompt's tokens, from the second on, as arrays; iteration makes entries one by one.

    To free millions of entries, or to search them for reference cycles, would hold the GIL for 0.1 s and more.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Int[np.ndarray, " n"], LogprobTable]] = []
        self._length = 0

    def add(self, tokens: Int[np.ndarray, " n"], table: "LogprobTable") -> None:
        """Append positions; `table` has a row for each token."""
        self._parts.append((tokens, table))
        self._length += len(tokens)

    @property
    def parts(self) -> Sequence[tuple[Int[np.ndarray, " n"], "LogprobTable"]]:
        """What was added, in its order."""
        return self._parts

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ChoiceLogprobs]:
        for tokens, table in self._parts:
            for row, token in enumerate(tokens.tolist()):
                yield table.row(row, token)


class TokenEvent(NamedTuple):
    """One token of one request, or its end. `token` is None if the request ended without one.

    The event of the first token also has `prompt_logprobs` (an entry for each prompt token but the first),
    `first_scheduled_time` (when its first step was planned, in seconds of `time.monotonic`) and its prefix cache hit.
    `pooled` comes with the token of a request that asks for its pooled hidden state, and is that. `sampling_mask`: the
    ids of the tokens from which the token was drawn, ascending, if the request asks for them; none if they were more
    than `MAX_SAMPLING_MASK`.
    `error` says why there is no token if `finish_reason` is "error". `drafts` counts those so far: it comes with the
    end, and with each token of a step with drafts if a stop string may end the text.
    An event with a `version` has nothing else: the request's next tokens come from weights of that version.
    """

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: ChoiceLogprobs | None = None
    prompt_logprobs: Collection[ChoiceLogprobs] | PromptLogprobs | None = None
    first_scheduled_time: float | None = None
    prefix: PrefixHit | None = None
    error: GenerationError | None = None
    version: int | None = None
    pooled: Float[np.ndarray, " M"] | None = None
    sampling_mask: Int[np.ndarray, " n"] | None = None
    drafts: DraftCounts | None = None

    @property
    def is_stop_token(self) -> bool:
        """Whether the token ends the text and is no part of it."""
        return self.token is not None and self.finish_reason == "stop"


@dataclass(frozen=True, eq=False)
class StepEvents:
    """The results of one step. A token of a request that goes on is an entry of two arrays; all else is a `TokenEvent`.

    Tokens that a grammar forces, and the end of its text, may follow in `others`. Iteration yields all in their order.

    Attributes:
        request_ids, tokens: the requests that got a token and nothing else, and that token.
        others: first and last tokens of requests, tokens with log probabilities, and ends without a token.
    """

    request_ids: Shaped[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, object))
    tokens: Int[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, np.int32))
    others: tuple[TokenEvent, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens) + len(self.others)

    def __iter__(self) -> Iterator[TokenEvent]:
        for request_id, token in zip(self.request_ids.tolist(), self.tokens.tolist(), strict=True):
            yield TokenEvent(request_id, token)
        yield from self.others


class LogprobTable(NamedTuple):
    """Log probabilities of N choices, as `ribs.logprobs.traced.LogprobRows` has them on the device.

    `drawn`: of the chosen token in the distribution that it was drawn from; None for tokens of prompts.
    `experts`: those of the token before, in each layer with experts; None if the engine does not return them.
    """

    chosen: Float[np.ndarray, " N"]
    rank: Int[np.ndarray, " N"]
    ids: Int[np.ndarray, "N top"]
    values: Float[np.ndarray, "N top"]
    drawn: Float[np.ndarray, " N"] | None = None
    experts: Int[np.ndarray, "N L k"] | None = None

    def rows(self, first: int, end: int) -> "LogprobTable":
        """Return a copy of some rows."""
        return LogprobTable(*(None if array is None else array[first:end].copy() for array in self))  # type: ignore[arg-type]

    def row(self, index: int, token: int) -> ChoiceLogprobs:
        """Return the entry of one choice; `token` is the token that was chosen."""
        ids, values = tuple(self.ids[index].tolist()), tuple(self.values[index].tolist())
        drawn = None if self.drawn is None else float(self.drawn[index])
        experts = None if self.experts is None else self.experts[index].tobytes()
        return ChoiceLogprobs(token, float(self.chosen[index]), int(self.rank[index]), ids, values, drawn, experts)


class StepResults(NamedTuple):
    """What a step that is not plain gives besides tokens, as the hooks of its rib return it, in arrays of numpy.

    Attributes:
        drawn: of each token drawn, in the order of the step's rows, by the rib's name.
        forwarded: of each token or row of the step, by the rib's name; empty unless the variant has `every`.
        experts, prompt_experts: those of the token before each one drawn, and of each token of the step, in each layer
            with experts; None if the engine does not return them.
    """

    drawn: Mapping[str, Any] = {}
    forwarded: Mapping[str, Any] = {}
    experts: Int[np.ndarray, "N L k"] | None = None
    prompt_experts: Int[np.ndarray, "T L k"] | None = None

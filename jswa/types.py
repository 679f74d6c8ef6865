"""What crosses the seams of the engine: requests in, step plans down, tokens up, outputs out. Ints and numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from jswa.errors import GenerationError, InvalidSampling

FinishReason = Literal["stop", "length", "abort", "error"]

FROM_DEVICE = -1  # in StepPlan.tokens: the token that the previous step sampled for this row
NOT_FINITE = -1  # in the tokens of a step: the row's logits held NaN or infinity


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; vLLM's names.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the fewest most likely tokens that reach this probability; 1 keeps all.
        top_k: keep this many most likely tokens (ties with the last one stay); 0 or -1 keeps all.
        max_tokens: most tokens to generate; None: until a stop token or max_model_len.
        seed: the draw at a position depends on it, the position and the logits alone, never on other requests.
            None: derived from the engine's seed and the number of the request.
        stop_token_ids: stop after any of these, besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, _is_real(self.temperature, 0.0, 100.0), "a number in [0, 100]")
        _check("top_p", self.top_p, _is_real(self.top_p, 0.0, 1.0) and self.top_p > 0, "a number in (0, 1]")
        _check("top_k", self.top_k, _is_int(self.top_k, -1, 2**31 - 1), "a whole number, -1 or 0 for all")
        limit = self.max_tokens is None or _is_int(self.max_tokens, 1, 2**31 - 1)
        _check("max_tokens", self.max_tokens, limit, "None or a whole number of at least 1")
        seed = self.seed is None or _is_int(self.seed, 0, 2**64 - 1)
        _check("seed", self.seed, seed, "None or a whole number in [0, 2^64)")
        stops = isinstance(self.stop_token_ids, Sequence) and not isinstance(self.stop_token_ids, str)
        stops = stops and all(_is_int(t, 0, 2**31 - 1) for t in self.stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, stops, "a list of token ids, each at least 0")
        for name in ("ignore_eos", "skip_special_tokens"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt on its way into the engine, already validated.

    Attributes:
        stop_ids: tokens that end it, the model's end tokens included unless it ignores them.
        key: the random key of the request, the two halves of its 64-bit seed.
        max_length: prompt + generated tokens at most.
    """

    request_id: str
    prompt: Int[np.ndarray, " P"]
    params: SamplingParams
    stop_ids: frozenset[int]
    key: tuple[int, int]
    max_length: int


class TokenEvent(NamedTuple):
    """One token of one request, or its end. `token` is None where the request ended without one."""

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: which rows run which positions. All that the device side gets to know, and it can be printed.

    R rows, T tokens. Row i runs positions [starts[i], starts[i] + counts[i]); its tokens follow those of row i - 1.

    Attributes:
        slots: the row's place in the device state (page tables, last token), held for the row's life.
        local_lo: first position that the row's local layers may see.
        samples: whether the row's last position yields a token (a chunk inside a prompt does not).
        tokens: ids to run; FROM_DEVICE for a row whose token the previous step sampled.
        temperature, top_k, top_p, keys: sampling parameters by row; top_k 0 is off.
        full_pages, local_pages: new page-table entries (slot, page position, page id).
        moves: full pages to copy (source, destination) in order, and to rename in the tables, before the step.
    """

    slots: Int[np.ndarray, " R"]
    starts: Int[np.ndarray, " R"]
    counts: Int[np.ndarray, " R"]
    local_lo: Int[np.ndarray, " R"]
    samples: Int[np.ndarray, " R"]
    tokens: Int[np.ndarray, " T"]
    temperature: Float[np.ndarray, " R"]
    top_k: Int[np.ndarray, " R"]
    top_p: Float[np.ndarray, " R"]
    keys: UInt[np.ndarray, "R 2"]
    full_pages: Int[np.ndarray, "F 3"]
    local_pages: Int[np.ndarray, "L 3"]
    moves: Int[np.ndarray, "M 2"]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.tokens)


@dataclass
class RequestMetrics:
    """When what happened to a request, in seconds of `time.monotonic`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass
class CompletionOutput:
    """One generated text. In a stream, `text` and `token_ids` are what is new since the last item."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class RequestOutput:
    """The result of one prompt; vLLM's names. `error` is set where the request failed after it had been accepted."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: GenerationError | None = field(default=None)


def _check(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise InvalidSampling(name, value, f"must be {accepted}")


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= high


def _is_real(value: object, low: float, high: float) -> bool:
    if not isinstance(value, int | float | np.floating | np.integer) or isinstance(value, bool):
        return False
    return bool(low <= value <= high)  # NaN compares false with everything

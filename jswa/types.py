"""What crosses the seams of the engine: requests in, step plans down, tokens up, outputs out. Ints and numpy only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.errors import GenerationError, InvalidSampling

FinishReason = Literal["stop", "length", "abort", "error"]
MissReason = Literal["cold", "evicted", "window lost", "salt", "too short", "prompt logprobs"]

FROM_DEVICE = -1  # in StepPlan.tokens: the token that the previous step sampled for this row
MAX_LOGPROBS = 20  # log probabilities of most likely tokens, at most
NOT_FINITE = -1  # in the tokens of a step: logits held NaN or infinity, or nothing was allowed


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; vLLM's names.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the fewest most likely tokens that reach this probability; 1 keeps all.
        top_k: keep this many most likely tokens (ties with the last one stay); 0 or -1 keeps all.
        min_p: keep tokens at least this likely, relative to the most likely one; 0 keeps all. Comes first.
        repetition_penalty: logits of tokens seen in prompt or text are divided by it (multiplied, where negative).
        presence_penalty: taken off the logits of tokens in the text so far.
        frequency_penalty: the same, times how often.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: nothing else is generated.
        bad_words: strings that are never generated, as far as their own tokenization goes.
        n: texts per prompt; text i of a seeded request has the seed + i.
        max_tokens: most tokens to generate; None: until a stop token or max_model_len.
        min_tokens: no stop token is generated before these many tokens.
        seed: the draw at a position depends on it, the position and the logits alone, never on other requests.
            None: derived from the engine's seed and the number of the request.
        stop: stop before any of these strings.
        include_stop_str_in_output: leave the string that stopped it at the end of the text.
        stop_token_ids: stop after any of these, besides the model's own end tokens.
        logprobs: log probabilities of the chosen token and of this many most likely ones, before any of the above.
        prompt_logprobs: the same for the tokens of the prompt.
        ignore_eos: go on after the model's end tokens.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _REAL_RANGES:
            _check(
                name, getattr(self, name), _is_real(getattr(self, name), low, high), f"a number in [{low:g}, {high:g}]"
            )
        for name in ("top_p", "repetition_penalty"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name, low, high, optional in _WHOLE_RANGES:
            value = getattr(self, name)
            accepted = f"{'None or ' if optional else ''}a whole number in [{low}, {high}]"
            _check(name, value, (optional and value is None) or _is_int(value, low, high), accepted)
        if self.max_tokens is not None:
            _check(
                "min_tokens",
                self.min_tokens,
                self.min_tokens <= self.max_tokens,
                f"at most max_tokens = {self.max_tokens}",
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            empty = ids is None and name == "allowed_token_ids"
            _check(
                name, ids, empty or _all(ids, lambda t: _is_int(t, 0, _INT32)), "a list of token ids, each at least 0"
            )
        _check(
            "allowed_token_ids",
            self.allowed_token_ids,
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "not empty",
        )
        _check(
            "stop", self.stop, all(isinstance(x, str) and x for x in self.stop_strings()), "strings, none of them empty"
        )
        words = self.bad_words is None or _all(self.bad_words, lambda w: isinstance(w, str) and w.strip() != "")
        _check("bad_words", self.bad_words, words, "a list of strings, none of them blank")
        bias = self.logit_bias is None or (
            isinstance(self.logit_bias, Mapping)
            and all(_is_int(t, 0, _INT32) and _is_real(b, -100, 100) for t, b in self.logit_bias.items())
        )
        _check("logit_bias", self.logit_bias, bias, "a mapping of token ids to numbers in [-100, 100]")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities of text or prompt are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


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


class PrefixHit(NamedTuple):
    """What the prefix cache had of a prompt, in tokens.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: of those, the ones that no layer computed.
        full_hit_tokens: the ones whose full-attention KV was there.
        replayed_tokens: full_hit_tokens - cached_tokens: run again because the local KV had been given up.
        revived: whether these end in a window that the replay has rebuilt; else they start from one that was kept.
        reason: why the others were not found: text never seen ("cold"), or seen and "evicted", under another "salt",
            "too short" to be worth a copy, or not looked for because their log probabilities were asked for.
            "salt" tells what another tenant has asked: it is for operators, not for clients.
    """

    prompt_tokens: int
    cached_tokens: int
    full_hit_tokens: int
    replayed_tokens: int
    reason: MissReason
    revived: bool = False

    def missed(self) -> dict[MissReason, int]:
        """Tokens that were computed, by reason; the last token of a prompt always is."""
        lost: dict[MissReason, int] = {"window lost": self.replayed_tokens} if self.replayed_tokens else {}
        return {**lost, self.reason: self.prompt_tokens - self.full_hit_tokens}


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

    place: int
    mask: Int[np.ndarray, " words"]
    bias: Float[np.ndarray, " V"] | None = None
    skipped: Int[np.ndarray, " S"] = np.zeros(0, np.int32)
    prompt_length: int = 0


class TableRow(NamedTuple):
    """The pages of a row that starts on cached ones: ids from page position 0, and from `first_local`."""

    slot: int
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
        slots: the row's place in the device state (page tables, last token), held for the row's life.
        full_lo: first position whose full KV the row writes; that of positions before comes from the cache.
        local_lo: first position that the row's local layers may see.
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

    slots: Int[np.ndarray, " R"]
    starts: Int[np.ndarray, " R"]
    counts: Int[np.ndarray, " R"]
    full_lo: Int[np.ndarray, " R"]
    local_lo: Int[np.ndarray, " R"]
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


@dataclass(frozen=True)
class Logprob:
    """Log probability of one token at one position; vLLM's names. `rank` is 1 for the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated text. In a stream, `text` and `token_ids` are what is new since the last item."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The result of one prompt; vLLM's names. `error` is set where the request failed after it had been accepted.

    `prefix` says what the prefix cache had of the prompt (of the first text's, where n > 1).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    prefix: PrefixHit | None = None
    metrics: RequestMetrics | None = None
    error: GenerationError | None = field(default=None)


_INT32 = 2**31 - 1
_REAL_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_WHOLE_RANGES = (
    ("top_k", -1, _INT32, False),
    ("n", 1, 1024, False),
    ("max_tokens", 1, _INT32, True),
    ("min_tokens", 0, _INT32, False),
    ("seed", 0, 2**64 - 1, True),
    ("logprobs", 0, MAX_LOGPROBS, True),
    ("prompt_logprobs", 0, MAX_LOGPROBS, True),
)


def _all(values: object, ok: Callable[[Any], bool]) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes) and all(ok(value) for value in values)


def _check(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise InvalidSampling(name, value, f"must be {accepted}")


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= high


def _is_real(value: object, low: float, high: float) -> bool:
    if not isinstance(value, int | float | np.floating | np.integer) or isinstance(value, bool):
        return False
    return bool(low <= value <= high)  # NaN compares false with everything

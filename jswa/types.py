"""The public types: sampling parameters in, outputs and their metrics out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from jswa.errors import GenerationError, InvalidSampling

FinishReason = Literal["stop", "length", "abort", "error"]
MissReason = Literal[
    "cold", "evicted", "window lost", "salt", "too short", "prompt logprobs", "mean pooling", "skipped",
    "not finite", "disabled",
]  # fmt: skip
Pooling = Literal["last", "mean"]

MAX_LOGPROBS = 20  # most likely tokens with log probabilities, at most
MAX_SAMPLING_MASK = 1_024  # tokens of a sampling mask, at most
MAX_LOGIT_BIAS = 1_024  # entries of a logit_bias, at most
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")  # of StructuredOutputsParams


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that the whole generated text must have, with vLLM's names. Exactly one of the first six is given.

    Attributes:
        json: a JSON Schema, as an object or as JSON text.
        json_object: True: any JSON object.
        regex: a regular expression that the whole text matches, in the syntax of Rust's crate `regex`.
        choice: the texts to choose from.
        grammar: a context-free grammar in llguidance's variant of Lark, or in GBNF.
        structural_tag: free text with regions that have a schema each: vLLM's object with `structures` (each has
            `begin`, `schema`, `end`) and `triggers`, as an object or as JSON text.
        disable_any_whitespace: JSON has no white space between its parts; by default a space may follow "," and ":".
        whitespace_pattern: regular expression of the white space that JSON may have between its parts.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        forms = [name for name in FORMS if getattr(self, name) is not None]
        limit = f"exactly one of {', '.join(FORMS)}"
        _check("structured_outputs", ", ".join(forms) or "nothing", len(forms) == 1, limit)
        _check("structured_outputs.json_object", self.json_object, self.json_object in (None, True), "None or True")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            accepted = value is None or isinstance(value, str | Mapping)
            _check(f"structured_outputs.{name}", value, accepted, "an object, or a string of JSON")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            _check(f"structured_outputs.{name}", value, value is None or _is_text(value), "a string that is not empty")
        choice = self.choice is None or (_all(self.choice, _is_text) and len(self.choice) > 0)
        _check("structured_outputs.choice", self.choice, choice, "a list of strings, none of them empty")
        blank = self.disable_any_whitespace
        _check("structured_outputs.disable_any_whitespace", blank, isinstance(blank, bool), "True or False")
        both = blank and self.whitespace_pattern is not None
        _check("structured_outputs.whitespace_pattern", self.whitespace_pattern, not both, "None without white space")

    @property
    def form(self) -> str:
        """The name of the attribute that is given, one of FORMS."""
        return next(name for name in FORMS if getattr(self, name) is not None)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the fewest most likely tokens that reach this probability; 1 keeps all.
        top_k: keep this many most likely tokens (ties with the last one stay); 0 or -1 keeps all.
        min_p: keep tokens that are at least this likely, relative to the most likely one; 0 keeps all. Applied before
            top_k and top_p.
        top_n_sigma: keep tokens whose logits are at most this many standard deviations of all logits below the largest
            (Tang et al. 2024; llama.cpp's name); 0 or -1 keeps all. Applied together with min_p. The temperature does
            not change which tokens it keeps.
        repetition_penalty: divides positive logits of tokens that prompt or text contain, and multiplies negative ones.
        presence_penalty: subtracted from the logits of tokens that were generated before.
        frequency_penalty: subtracted from a token's logit once for each time that the token was generated.
        logit_bias: added to the logits of these token ids, at most 1,024.
        allowed_token_ids: only these tokens are generated.
        bad_words: strings whose tokenizations are never generated.
        n: texts per prompt; with a seed, text i uses seed + i.
        max_tokens: maximum number of generated tokens; None: until a stop token or max_model_len.
        min_tokens: no stop token is generated before this many tokens.
        seed: a draw depends on the seed, the position and the logits alone, never on other requests. None: the seed is
            derived from the engine's seed and the number of the request.
        stop: stop before any of these strings.
        include_stop_str_in_output: keep the stop string at the end of the text.
        stop_token_ids: stop after any of these tokens, besides the model's own end tokens.
        logprobs: return log probabilities of the chosen token and of this many most likely tokens, as the model gives
            them: before temperature, penalties and masks.
        prompt_logprobs: return the same for the tokens of the prompt.
        return_sampling_mask: return the ids of the tokens from which each token was drawn, after penalties, masks and
            limits (`CompletionOutput.sampling_mask`). Its size is bounded: temperature 0, or a top_k of 1 to 1,024.
        pooling: return the final hidden state of the prompt's last token ("last"), or the mean over all its tokens
            ("mean"), as `RequestOutput.pooled`. It needs max_tokens = 1; the token means nothing.
        ignore_eos: continue after the model's end tokens.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form that the text has. The text ends where the form allows nothing more.
        skip_reading_prefix_cache: compute the whole prompt, even if its KV is cached. Others may use it afterwards.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
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
    return_sampling_mask: bool = False
    pooling: Pooling | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    skip_reading_prefix_cache: bool = False

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
            _check(name, ids, empty or _are_ids(ids), "a list of token ids, each at least 0")
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
        entries = len(self.logit_bias or ())
        _check("logit_bias", f"{entries} entries", entries <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        for name in _SWITCHES:
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        bounded = not self.return_sampling_mask or self.temperature == 0 or 1 <= self.top_k <= MAX_SAMPLING_MASK
        _check("top_k", self.top_k, bounded, f"from 1 to {MAX_SAMPLING_MASK:,} with return_sampling_mask")
        pooling = self.pooling
        _check("pooling", pooling, pooling in (None, *get_args(Pooling)), "None, 'last' or 'mean'")
        _check("max_tokens", self.max_tokens, pooling is None or self.max_tokens == 1, "1 with pooling")
        form = self.structured_outputs
        known = form is None or isinstance(form, StructuredOutputsParams)
        _check("structured_outputs", form, known, "None or a StructuredOutputsParams")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities of text or prompt were requested."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def masks_follow_text(self) -> bool:
        """Whether the tokens that may be generated depend on those before them."""
        return bool(self.bad_words) or self.structured_outputs is not None

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class PrefixHit(NamedTuple):
    """The prefix cache hit of one prompt, in tokens.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that no layer computed.
        full_hit_tokens: prompt tokens whose full-attention KV was cached.
        replayed_tokens: full_hit_tokens - cached_tokens, computed again because their local KV had been evicted.
        revived: whether the replay rebuilt the window at the end of the hit, instead of starting from a cached window.
        reason: why the other tokens missed the cache: text never seen ("cold"), "evicted", seen under another "salt"
            only, "too short" to be worth a copy, computed for their log probabilities ("prompt logprobs") or for the
            mean of their hidden states ("mean pooling"), "skipped" as the request asked, computed again because logits
            behind cached tokens were not finite ("not finite"), or an engine without prefix cache ("disabled"). "salt"
            reveals prompts of other tenants: show it to operators, not to clients.
        host_tokens: cached tokens that would have been computed without the pages from host memory.
        disk_tokens: the part of host_tokens that came to host memory from the disk.
    """

    prompt_tokens: int
    cached_tokens: int
    full_hit_tokens: int
    replayed_tokens: int
    reason: MissReason
    revived: bool = False
    host_tokens: int = 0
    disk_tokens: int = 0

    def missed(self) -> dict[MissReason, int]:
        """Return the prompt tokens that were computed, by reason. The last token always is."""
        lost: dict[MissReason, int] = {"window lost": self.replayed_tokens} if self.replayed_tokens else {}
        return {**lost, self.reason: self.prompt_tokens - self.full_hit_tokens}


class DraftCounts(NamedTuple):
    """Drafted tokens of one text: accepted ones saved a step each, rejected ones cost work."""

    accepted: int
    rejected: int


@dataclass
class RequestMetrics:
    """Times of a request, in seconds of `time.monotonic`."""

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


class AnswerEvent(NamedTuple):
    """A new part of an answer.

    Attributes:
        kind: "content" and "reasoning" add text; "call" begins a tool call, "arguments" adds text to it, "end" ends it.
        text: the new text; of a "call", the name of the function.
        call: index of the tool call in the answer; -1 for text.
    """

    kind: Literal["content", "reasoning", "call", "arguments", "end"]
    text: str
    call: int = -1


@dataclass
class CompletionOutput:
    """One generated text. In a stream, `text` and `token_ids` are new since the last item.

    Attributes:
        events: what the new text of an `LLM.chat` adds to the answer: reasoning, content, tool calls.
        message: in the last item of an `LLM.chat`, the whole answer in OpenAI's form: role, content, reasoning_content
            and tool_calls, whose arguments are JSON in a string.
        sampling_mask: of each token of `token_ids` the ids from which it was drawn (`return_sampling_mask`).
        versions: the version of the weights that each token of `token_ids` was sampled with (`LLM.update_weights`).
        drafts: at the end of a text, what speculative decoding has drafted of it; None without, and if a stop string
            has ended the text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    sampling_mask: list[Int[np.ndarray, " n"]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[AnswerEvent] = field(default_factory=list)
    message: dict[str, Any] | None = None
    versions: list[int] = field(default_factory=list)
    drafts: DraftCounts | None = None


@dataclass
class RequestOutput:
    """The result of one prompt; vLLM's names. `error` is set if the request failed after it had been accepted.

    `prefix` is the prefix cache hit of the prompt (of its first text, if n > 1). `pooled`: the hidden state [M] that
    `SamplingParams.pooling` asks for.
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
    pooled: Float[np.ndarray, " M"] | None = None


_INT32 = 2**31 - 1
_SWITCHES = (
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "skip_reading_prefix_cache",
    "return_sampling_mask",
)  # fmt: skip
_REAL_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("top_n_sigma", -1.0, 100.0),
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


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_ids(values: object) -> bool:
    """Whether these are token ids. Loops in C look at them: there may be as many as in a vocabulary."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return False
    kinds = set(map(type, values))
    if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        return False
    return not kinds or bool(min(values) >= 0 and max(values) <= _INT32)


def _check(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise InvalidSampling(name, value, f"must be {accepted}")


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= high


def _is_real(value: object, low: float, high: float) -> bool:
    if not isinstance(value, int | float | np.floating | np.integer) or isinstance(value, bool):
        return False
    return bool(low <= value <= high)  # NaN compares false

"""From the fields of a request to what the engine takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from jswa.errors import InvalidSampling
from jswa.types import SamplingParams

from ..http import limits
from ..http.errors import ApiError, invalid, unsupported
from .schemas import Generation

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids", "bad_words", "n", "min_tokens", "stop", "include_stop_str_in_output", "stop_token_ids",
    "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def sampling_params(
    body: Generation,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The request's sampling; behind what it leaves out stand the checkpoint's defaults. Raises ApiError."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if body.seed is not None:
        given["seed"] = body.seed % 2**64
    behind = {name: value for name, value in defaults.items() if name != "max_tokens"}
    own = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    try:
        return SamplingParams(**{**behind, **given, **own})
    except InvalidSampling as error:
        raise ApiError.of(error) from error


def refuse_unsupported(body: Generation) -> None:
    """Refuse, by name, what the server does not do. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "is not supported beyond n")
    if body.use_beam_search:
        raise unsupported("use_beam_search", "beam search is not supported")
    if body.structured_outputs is not None:
        raise unsupported("structured_outputs", "constrained output is not supported")
    kind = body.response_format.get("type") if isinstance(body.response_format, dict) else body.response_format
    if kind not in (None, "text"):
        raise unsupported("response_format", 'only {"type": "text"} is supported')
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is for stream = true only")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "is not supported with stream = true")


def check_texts(prompts: int, n: int) -> None:
    """Refuse requests for too many texts. Raises ApiError."""
    if prompts * n > limits.MAX_TEXTS:
        raise invalid("n", f"{prompts} prompts x n = {n}: at most {limits.MAX_TEXTS} texts in one request")


def check_prompt_logprobs(tokens: int, params: SamplingParams) -> None:
    """Refuse more log probabilities of prompts than memory should hold; `tokens`: of all texts. Raises ApiError."""
    wanted = params.prompt_logprobs
    if wanted is not None and tokens * (wanted + 4) > limits.MAX_PROMPT_LOGPROBS:
        most = limits.MAX_PROMPT_LOGPROBS // (wanted + 4)
        raise invalid(
            "logprobs", f"{wanted} of each of {tokens} prompt tokens: send at most {most} tokens in one request"
        )


def check_generated_logprobs(lengths: Sequence[int], params: SamplingParams, longest: int) -> None:
    """Refuse more log probabilities of generated tokens than memory should hold until the end. Raises ApiError.

    Args:
        lengths: prompt tokens of each text.
        longest: tokens of prompt and generated text at most.
    """
    if params.logprobs is None:
        return
    most_each = longest if params.max_tokens is None else params.max_tokens
    tokens = sum(min(most_each, longest - length) for length in lengths)
    most = limits.MAX_GENERATED_LOGPROBS // (params.logprobs + 4)
    if tokens > most:
        raise invalid(
            "logprobs",
            f"{params.logprobs} of each of up to {tokens} generated tokens: ask for at most {most} tokens"
            " (max_tokens x texts) in one request, or for a stream",
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise invalid("logit_bias", f"{key[:20]!r} must be a token id")
    return int(key)

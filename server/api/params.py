"""Conversion of a request's fields to the engine's sampling parameters, and limits of their combinations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jswa.errors import InvalidSampling
from jswa.types import SamplingParams, StructuredOutputsParams

from ..core.off_loop import made
from ..http import limits
from ..http.errors import ApiError, invalid, unsupported
from ..text.prompts import token_ids
from .schemas import Generation

# Fields of a body that are converted; others that SamplingParams has too are its own.
_CONVERTED = {
    "allowed_token_ids",
    "logit_bias",
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
}
_SAME = sorted((SamplingParams.__dataclass_fields__.keys() & Generation.model_fields.keys()) - _CONVERTED)


async def sampling_params(
    body: Generation,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Return a request's sampling parameters, with the checkpoint's defaults for absent fields. Raises ApiError.

    Args:
        form: the form of the texts.
    """
    own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    own["structured_outputs"] = form

    def work() -> SamplingParams:
        given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        if body.allowed_token_ids is not None:
            given["allowed_token_ids"] = _allowed(body.allowed_token_ids)
        if body.logit_bias is not None:
            given["logit_bias"] = _biases(body.logit_bias)
        if body.seed is not None:
            given["seed"] = body.seed % 2**64
        behind = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return SamplingParams(**{**behind, **given, **own})

    try:
        return await made(work, len(body.allowed_token_ids) if _sized(body.allowed_token_ids) else 0)
    except InvalidSampling as error:
        raise ApiError.of(error) from error


def refuse_unsupported(body: Generation) -> None:
    """Refuse a field that asks for a feature that the server does not have. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "is supported only if it equals n")
    if body.use_beam_search:
        raise unsupported("use_beam_search", "beam search is not supported")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream = true")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "is not supported with stream = true")


def check_texts(prompts: int, n: int) -> None:
    """Refuse a request for too many texts. Raises ApiError."""
    if prompts * n > limits.MAX_TEXTS:
        raise invalid("n", f"{prompts} prompts x n = {n}: at most {limits.MAX_TEXTS} texts in one request")


def check_prompt_logprobs(tokens: int, params: SamplingParams) -> None:
    """Refuse more log probabilities of prompts than memory should hold. Raises ApiError.

    Args:
        tokens: prompt tokens of all texts together.
    """
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
        longest: largest number of prompt and generated tokens of a text.
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


def check_token_lists(texts: int, params: SamplingParams) -> None:
    """Refuse a request whose lists of tokens are too long for the number of its texts. Raises ApiError."""
    sizes = {"allowed_token_ids": len(params.allowed_token_ids or ()), "logit_bias": len(params.logit_bias or ())}
    listed = sum(sizes.values())
    if listed * texts > limits.MAX_LISTED:
        raise invalid(
            max(sizes, key=sizes.__getitem__),
            f"{listed} tokens (allowed_token_ids and logit_bias) for each of {texts} texts: tokens x texts must be at "
            f"most {limits.MAX_LISTED} in one request",
        )


def _allowed(value: Any) -> list[int]:
    if _sized(value) and not 1 <= len(value) <= limits.MAX_ALLOWED_IDS:
        raise invalid("allowed_token_ids", f"has {len(value)} token ids, must have 1 to {limits.MAX_ALLOWED_IDS}")
    ids: list[int] = token_ids(value, "allowed_token_ids").tolist()
    return ids


def _biases(value: Any) -> dict[int, float]:
    """Return `logit_bias` by token id. Check the number of entries first, and stop at the first wrong entry."""
    if not isinstance(value, dict):
        raise invalid("logit_bias", "must be an object of numbers by token id")
    if len(value) > limits.MAX_BIASES:
        raise invalid("logit_bias", f"has {len(value)} entries, at most {limits.MAX_BIASES} are allowed")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"{key[:20]!r} must be a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"logit_bias.{key}", "must be a number in [-100, 100]")
        found[int(key)] = bias
    return found


def _sized(value: Any) -> bool:
    """Return whether a value is a list, or the array that stands for a list in a large body."""
    return isinstance(value, list | np.ndarray)

"""Turns sampling parameters into a bias per token and masks of allowed tokens."""

import numpy as np
from jaxtyping import Bool, Int

from jswa.errors import InvalidSampling, NothingAllowed
from jswa.plan import Constraint, Request
from jswa.types import SamplingParams


def make_constraint(
    params: SamplingParams,
    vocab_size: int,
    prompt_length: int,
    stop_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...],
) -> Constraint | None:
    """Return the constraint of one request, or None. Raises InvalidSampling for ids outside of the vocabulary.

    Bad words with tokens that the model does not have are left out: they cannot be generated.
    """
    bad_words = tuple(word for word in bad_words if max(word) < vocab_size)
    penalized = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    limited = params.logit_bias or params.allowed_token_ids is not None or params.min_tokens or bad_words
    if not penalized and not limited:
        return None
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[_known("logit_bias", token, vocab_size)] = value
    allowed = np.ones(vocab_size, bool)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[[_known("allowed_token_ids", token, vocab_size) for token in params.allowed_token_ids]] = True
    allowed[[word[0] for word in bad_words if len(word) == 1]] = False
    early = allowed.copy()
    if params.min_tokens:
        early[[token for token in stop_ids if token < vocab_size]] = False
    for name, mask in (("allowed_token_ids", allowed), ("min_tokens", early)):
        if not mask.any():
            raise InvalidSampling(name, getattr(params, name), "leaves no token that may be generated")
    return Constraint(
        bias,
        mask=_pack_bits(allowed),
        early_mask=_pack_bits(early),
        min_length=prompt_length + params.min_tokens,
        bad_words=tuple(word for word in bad_words if len(word) > 1),
    )


def nothing_allowed(request: Request, length: int) -> NothingAllowed:
    """Return the error of a request whose constraint forbids every token behind a text of `length` tokens."""
    params, constraint = request.params, request.constraint
    early = constraint is not None and length < constraint.min_length
    named = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        f"min_tokens = {params.min_tokens} (no stop token before)": early,
    }
    at = length - len(request.prompt)
    by = " and ".join(name for name, applies in named.items() if applies)
    return NothingAllowed(f"after {at} generated tokens no token is allowed: {by} forbid all of them")


def _known(field: str, token: int, vocab_size: int) -> int:
    if token >= vocab_size:
        raise InvalidSampling(field, token, f"must be in [0, {vocab_size})")
    return token


def _pack_bits(mask: Bool[np.ndarray, " V"]) -> Int[np.ndarray, " words"]:
    """32 tokens a word, the first in the lowest bit."""
    padded = np.zeros(-(-len(mask) // 32) * 32, bool)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little").view(np.int32)

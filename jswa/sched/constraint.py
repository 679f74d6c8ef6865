"""Turns sampling parameters into biases of tokens and masks of allowed tokens."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Int

from jswa.errors import InvalidSampling, NothingAllowed
from jswa.plan import Constraint, Request, bits_of
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
    bias, ids = params.logit_bias or {}, params.allowed_token_ids
    constraint = Constraint(
        bias_ids=_known("logit_bias", bias, vocab_size),
        bias=np.fromiter(bias.values(), np.float32, len(bias)),
        allowed=None if ids is None else bits_of(_known("allowed_token_ids", ids, vocab_size), vocab_size),
        forbidden=tuple({word[0] for word in bad_words if len(word) == 1}),
        early=tuple(token for token in stop_ids if token < vocab_size) if params.min_tokens else (),
        min_length=prompt_length + params.min_tokens,
        bad_words=tuple(word for word in bad_words if len(word) > 1),
    )
    for name, banned in (
        ("allowed_token_ids", constraint.forbidden),
        ("min_tokens", constraint.forbidden + constraint.early),
    ):
        if not _any_left(constraint.allowed, banned, vocab_size):
            raise InvalidSampling(name, getattr(params, name), "leaves no token that may be generated")
    return constraint


def banned_at(constraint: Constraint, text: Int[np.ndarray, " n"], position: int) -> tuple[int, ...]:
    """Return the tokens that may not be sampled at `position`, behind the generated `text`."""
    banned = constraint.forbidden + (constraint.early if position < constraint.min_length else ())
    return banned + tuple(
        word[-1]
        for word in constraint.bad_words
        if len(word) - 1 <= len(text) and tuple(text[len(text) - len(word) + 1 :].tolist()) == word[:-1]
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


def _any_left(allowed: Int[np.ndarray, " words"] | None, banned: tuple[int, ...], vocab_size: int) -> bool:
    """Return whether anything is allowed; `allowed` alone allows something."""
    if not banned or allowed is None:
        return len(set(banned)) < vocab_size
    return bool((allowed & ~bits_of(np.array(banned), vocab_size)).any())


def _known(field: str, ids: Collection[int], vocab_size: int) -> Int[np.ndarray, " N"]:
    """Return token ids as an array. Raises InvalidSampling for one outside of the vocabulary."""
    found = np.fromiter(ids, np.int64, len(ids))
    if len(found) and found.max() >= vocab_size:
        raise InvalidSampling(field, int(found[found >= vocab_size][0]), f"must be in [0, {vocab_size})")
    return found.astype(np.int32)

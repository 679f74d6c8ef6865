"""Biases and masks made of sampling parameters (jswa/sched/constraint.py)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool

from jswa.errors import InvalidSampling
from jswa.plan import ANY_TOKEN, BAN_TOKENS, Constraint, Mask, Words, bits_of
from jswa.sched.constraint import banned_at, make_constraint, mask_words, words_of
from jswa.types import SamplingParams

PROMPT = 5


def constraint_of(
    vocab: int, *, stop_ids: frozenset[int] = frozenset(), bad_words: tuple[tuple[int, ...], ...] = (), **params: Any
) -> Constraint:
    """Return the constraint of a request that has one."""
    found = make_constraint(SamplingParams(**params), vocab, PROMPT, stop_ids, bad_words)
    assert found is not None
    return found


def arrays_of(parts: Any) -> list[np.ndarray]:
    """Return the arrays of a constraint."""
    if isinstance(parts, np.ndarray):
        return [parts]
    return [array for part in parts for array in arrays_of(part)] if isinstance(parts, tuple) else []


def allowed_by(found: Constraint, text: list[int], vocab: int) -> Bool[np.ndarray, " V"]:
    """Return the tokens that a constraint allows behind a generated text, its bits read one by one."""
    number = -(-vocab // 32)
    bits = found.allowed.words(np.arange(number)).tolist()
    banned = banned_at(found, np.array(text, np.int32))
    changed = mask_words(found, banned, early=PROMPT + len(text) < found.min_length)
    assert changed.at.tolist() == sorted(set(changed.at.tolist()))
    for at, word in zip(changed.at.tolist(), changed.bits.tolist(), strict=True):
        bits[at] = word
    return np.array([bool(bits[token // 32] & 0xFFFFFFFF & (1 << (token % 32))) for token in range(vocab)])


def test_a_request_without_logits_state_has_no_constraint() -> None:
    """Temperature, its limits, stop tokens and log probabilities need no logits state."""
    params = SamplingParams(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, stop_token_ids=[3], logprobs=2)
    assert make_constraint(params, 40, PROMPT, frozenset({3}), ()) is None
    assert make_constraint(SamplingParams(logit_bias={}), 40, PROMPT, frozenset(), ()) is None


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}],
)
def test_a_penalty_or_a_bias_alone_allows_every_token(params: dict[str, Any]) -> None:
    """The request has a constraint without a mask."""
    found = constraint_of(33, stop_ids=frozenset({2}), **params)
    assert allowed_by(found, [], 33).all()
    assert found.bad_words == ()
    assert found.bias_ids.tolist() == list(params.get("logit_bias", ()))


def test_a_waiting_request_holds_at_most_64_kb_beside_its_prompt() -> None:
    """With a vocabulary of 262,144 tokens: bits for allowed_token_ids only, and biases by token."""
    bias = dict.fromkeys(range(1_024), 1.0)
    params: dict[str, Any] = {"repetition_penalty": 1.1, "min_tokens": 3, "logit_bias": bias}
    for more in ({}, {"allowed_token_ids": range(100_000)}):
        found = constraint_of(262_144, stop_ids=frozenset({2}), bad_words=((3,), (4, 5)), **params, **more)
        assert sum(array.nbytes for array in arrays_of(found)) <= 2**16
        assert (found.allowed.at is None) == bool(more)


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 40_000])
def test_bits_are_those_of_the_tokens(count: int) -> None:
    """For few and for many ids, with repetitions."""
    ids = np.random.default_rng(count).integers(0, 20_001, count).astype(np.int32)
    bits = bits_of(ids, 20_001)
    assert bits.dtype == np.int32
    assert len(bits) == 626
    found = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert np.flatnonzero(found).tolist() == np.unique(ids).tolist()
    words = words_of(ids)
    assert words.at.tolist() == np.flatnonzero(bits).tolist()
    assert words.bits.tolist() == bits[words.at].tolist()
    assert words.bits.dtype == np.int32


def test_words_of_a_mask_are_those_that_it_lists_and_its_fill() -> None:
    """Also of a mask that lists none, or all."""
    at, bits = np.array([2, 5], np.int32), np.array([7, 9], np.int32)
    assert Mask(-1, at, bits).words(np.array([0, 2, 4, 5, 6])).tolist() == [-1, 7, -1, 9, -1]
    assert Mask(0, *Words(at[:0], bits[:0])).words(at).tolist() == [0, 0]
    assert Mask(0, None, np.arange(6, dtype=np.int32)).words(at).tolist() == [2, 5]


@given(st.data())
def test_masks_contain_allowed_tokens_without_bad_words_and_early_stop_tokens(data: st.DataObject) -> None:
    """Bit by bit, for vocabularies around the size of a word; bad words of several tokens are not in the mask."""
    vocab = data.draw(st.integers(1, 70))
    ids = st.integers(0, vocab - 1)
    allowed = data.draw(st.none() | st.lists(ids, min_size=1))
    words = tuple(data.draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4)))
    stops = frozenset(data.draw(st.lists(st.integers(0, vocab + 40), max_size=3)))
    minimum = data.draw(st.integers(0, 3))
    bias = data.draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=3))
    banned = {word[0] for word in words if len(word) == 1}
    late = {token for token in range(vocab) if allowed is None or token in allowed} - banned
    early = late - stops if minimum else late
    params = SamplingParams(
        presence_penalty=0.5, allowed_token_ids=allowed, min_tokens=minimum, logit_bias=bias, bad_words=["unused"]
    )
    if not late or not early:
        with pytest.raises(InvalidSampling) as caught:
            make_constraint(params, vocab, PROMPT, stops, words)
        assert caught.value.field == ("min_tokens" if late else "bad_words" if allowed is None else "allowed_token_ids")
        return
    found = make_constraint(params, vocab, PROMPT, stops, words)
    assert found is not None
    assert set(np.flatnonzero(allowed_by(found, [vocab] * minimum, vocab)).tolist()) == late
    if minimum:
        assert set(np.flatnonzero(allowed_by(found, [vocab] * (minimum - 1), vocab)).tolist()) == early
    assert found.min_length == PROMPT + minimum
    assert found.bad_words == tuple(word for word in words if len(word) > 1)
    assert found.bias_ids.dtype == np.int32
    assert found.bias.dtype == np.float32
    assert dict(zip(found.bias_ids.tolist(), found.bias.tolist(), strict=True)) == bias


@pytest.mark.parametrize("vocab", [31, 32, 33])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_an_id_outside_the_vocabulary_is_refused_by_name(name: str, vocab: int) -> None:
    """The last id is accepted, the one after it is not."""

    def value(token: int) -> Any:
        return {token: 1.0} if name == "logit_bias" else [0, token]

    constraint_of(vocab, **{name: value(vocab - 1)})
    with pytest.raises(InvalidSampling) as caught:
        constraint_of(vocab, **{name: value(vocab)})
    assert (caught.value.field, caught.value.value) == (name, vocab)
    assert str(vocab) in str(caught.value)


def test_a_request_that_allows_no_token_is_refused_by_name() -> None:
    """If bad words forbid every allowed token, or if only stop tokens are allowed before min_tokens."""
    with pytest.raises(InvalidSampling) as caught:
        constraint_of(8, allowed_token_ids=[3, 4], bad_words=((3,), (4,)))
    assert caught.value.field == "allowed_token_ids"
    with pytest.raises(InvalidSampling) as caught:
        constraint_of(8, allowed_token_ids=[3, 4], min_tokens=1, stop_ids=frozenset({3, 4}))
    assert caught.value.field == "min_tokens"
    assert constraint_of(8, allowed_token_ids=[3, 4], stop_ids=frozenset({3, 4})).bad_words == ()


def test_bad_words_outside_the_vocabulary_are_ignored() -> None:
    """A tokenizer may have more ids than the model; the other bad words still count."""
    found = constraint_of(40, bad_words=((3,), (40,), (5, 41), (5, 6)))
    assert np.flatnonzero(~allowed_by(found, [], 40)).tolist() == [3]
    assert found.bad_words == ((5, 6),)
    assert make_constraint(SamplingParams(), 40, PROMPT, frozenset(), ((99,),)) is None


def test_the_device_forbids_stop_tokens_of_short_texts_and_last_tokens_of_bad_words_always() -> None:
    found = constraint_of(40, stop_ids=frozenset({3, 7}), bad_words=((5, 6), (9, 8, 7)), min_tokens=4)
    lines = found.bans().tolist()
    assert sorted(line[-1] for line in lines[:2]) == [3, 7]
    assert all(line[:-1] == [PROMPT + 4] + [ANY_TOKEN] * (BAN_TOKENS - 1) for line in lines[:2])
    always = np.iinfo(np.int32).max
    assert lines[2] == [always, *[ANY_TOKEN] * (BAN_TOKENS - 2), 5, 6]
    assert lines[3] == [always, *[ANY_TOKEN] * (BAN_TOKENS - 3), 9, 8, 7]

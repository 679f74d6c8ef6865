"""Random texts that follow the masks of a schema's grammar are values of the schema."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import Schemas, admits, allowed_by, follow
from tests.support.text.transcripts import tokenizer_of

ENDS = (2, 6)  # of `tiny`
SEEDS = st.integers(0, 2**32)
FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))  # which it checks as their RFCs say
NEAR = ["", '"', "\\\\", '\\"', "\\u0061", "\\n", "{", "}", "[", "]", ":", ", ", *"0129-.eaé"]
EDGES = st.sampled_from(
    [
        sign * edge
        for sign in (1, -1)
        for edge in (2**31, 2**53, 2**53 + 1, 2**60, 2**63, 2**63 - 1, 2**64 - 1, 0.1, 2.5)
    ]
)
BOUNDED = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number", ["integer", "null"], ["string", "number"]])},
    optional={
        **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], EDGES | st.integers(-100, 100)),
        "multipleOf": st.sampled_from([1, 7, 0.5]),
    },
)
FEW = 300  # tokens of a text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(Path(__file__).parents[2] / "jswa/assets/tiny")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, ENDS)


@pytest.fixture(scope="module")
def bytes_alone() -> tuple[Tokenizer, Grammars]:
    """A vocabulary of the 256 bytes and an end token."""
    tokenizer = tokenizer_of(("<|end|>",))
    return tokenizer, Grammars(tokenizer, tokenizer.vocab_size, (tokenizer.vocab_size - 1,))


def check_text(tokenizer: Tokenizer, grammars: Grammars, schema: object, seed: int) -> bool:
    """Follow the masks of a schema once, and assert that a text which ends is a value. Return whether it has ended."""
    try:
        grammar = grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except InvalidSampling as error:
        refused = error.limit
    else:
        refused = ""
    if refused:  # llguidance too merges no schemas that refer to themselves
        reasons = "nsatisfiable", "without an end", "merges more than", "control characters cannot be written"
        assert any(reason in refused for reason in reasons), refused
        return False
    ids = follow(grammar.matcher(), tokenizer, random.Random(seed), most=FEW)
    matcher = grammar.matcher()
    assert matcher.accept(ids)
    if not matcher.finished and not set(allowed_by(matcher)) & set(grammars.vocabulary.end_ids):
        return False
    text = tokenizer.decode(ids, skip_special_tokens=False)
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
    return True


@settings(max_examples=100, deadline=None)
@given(SEEDS)
@example(298530)  # a value with a control character, where texts have no codes of characters
@example(129744782)  # `allOf` of two objects with one property, whose schema refers to itself
def test_texts_that_follow_a_schema_are_values_of_it(tokenizer: Tokenizer, grammars: Grammars, seed: int) -> None:
    check_text(tokenizer, grammars, Schemas(seed).draw(), seed)


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_the_same_with_a_token_for_each_byte(bytes_alone: tuple[Tokenizer, Grammars], seed: int) -> None:
    check_text(*bytes_alone, Schemas(seed).draw(), seed)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_a_text_that_is_nearly_a_value_is_admitted_only_if_it_is_one(
    bytes_alone: tuple[Tokenizer, Grammars], seed: int
) -> None:
    """Characters of a text are left out, put in and replaced."""
    tokenizer, grammars = bytes_alone
    schema, rng = Schemas(seed).draw(), random.Random(seed)
    try:
        grammar = grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except InvalidSampling:
        return
    text = tokenizer.decode(follow(grammar.matcher(), tokenizer, rng, most=150), skip_special_tokens=False)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for _ in range(12):
        place, more = rng.randrange(len(text) + 1), rng.choice(NEAR)
        other = text[:place] + more + text[place + rng.randrange(2) :]
        try:
            value = json.loads(other)
        except ValueError:
            continue
        assert not admits(grammar, tokenizer, other) or valid(value), other


@settings(max_examples=60, deadline=None)
@given(BOUNDED, st.lists(st.one_of(EDGES, st.integers(-200, 200)), min_size=1, max_size=8))
@example({"type": "integer", "exclusiveMinimum": 2**60}, [2**60])
@example({"type": "number", "maximum": 2**60}, [2**60])
def test_a_number_that_is_admitted_is_within_its_bounds(
    bytes_alone: tuple[Tokenizer, Grammars], schema: dict[str, Any], numbers: list[float]
) -> None:
    """Also just beyond what floating point can tell apart."""
    tokenizer, grammars = bytes_alone
    try:
        grammar = grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except InvalidSampling:
        return
    valid = jsonschema.Draft202012Validator(schema).is_valid
    bounds = [bound for bound in schema.values() if isinstance(bound, int | float)]
    for number in (near for one in (*numbers, *bounds) for near in (one - 1, one, one + 1)):
        text = str(number) if isinstance(number, int) else format(number, "f")
        assert not admits(grammar, tokenizer, text) or valid(json.loads(text)), text


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_forced_tokens_are_those_that_the_masks_allow(tokenizer: Tokenizer, grammars: Grammars, seed: int) -> None:
    """One after the other, and behind them a text goes on as one that has sampled them."""
    try:
        grammar = grammars.compile(StructuredOutputsParams(json=Schemas(seed).draw()))
    except InvalidSampling:
        return
    rng, matcher = random.Random(seed), grammar.matcher()
    for _ in range(40):
        forced = matcher.forced()
        stepwise = matcher.copy()
        for token in forced:
            assert allowed_by(stepwise) == [token]
            assert stepwise.accept([token])
        assert matcher.accept(forced)
        mask = allowed_by(matcher)
        assert mask == allowed_by(stepwise)
        assert matcher.finished == stepwise.finished
        token = rng.choice(mask)
        if matcher.finished or token in ENDS:
            break
        assert matcher.accept([token])


def test_most_random_texts_end(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """The tests above would pass if none did."""
    ended = [check_text(tokenizer, grammars, Schemas(seed).draw(), seed) for seed in range(40)]
    assert sum(ended) > 15

"""The masks behind drafts, against matchers that accept the drafts."""

import random

import numpy as np
import pytest
from jaxtyping import Int

from jswa.grammar.compiler import Grammars
from jswa.grammar.matching.llg import Matcher
from jswa.grammar.matching.masks import fill_all, fill_behind
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.unit.grammar.test_matcher import ENDS, TINY

MOST = 5  # drafts
FORCED = "the dog and the cat were very good friends"
SPECS: list[dict[str, object]] = [
    {"json": {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}},
    {"regex": f"(yes|no) {FORCED}[.!]"},
    {"choice": [FORCED, "yes"]},
    {"regex": "[a-c ]*"},  # may end anywhere
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    return Grammars(tokenizer, tokenizer.vocab_size, ENDS)


def mask_of(matcher: Matcher) -> Int[np.ndarray, " W"]:
    out = np.zeros((1, matcher.grammar.vocabulary.words), np.int32)
    fill_all([matcher], out, [0])
    found: Int[np.ndarray, " W"] = out[0]
    return found


def tokens_in(mask: Int[np.ndarray, " W"]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def drawn(matcher: Matcher, chance: random.Random, number: int, wrong: float) -> list[int]:
    """Return tokens that may follow one another behind a matcher's text; some are replaced by others."""
    copy, found = matcher.copy(), list[int]()
    while len(found) < number and not copy.finished:
        token = chance.choice(tokens_in(mask_of(copy)))
        if not copy.accept([token]):
            break
        found.append(token)
    return [chance.randrange(300) if chance.random() < wrong else token for token in found]


def expected(matcher: Matcher, drafts: list[int]) -> Int[np.ndarray, "K W"]:
    """Let copies accept the drafts: behind a text that is complete, or that refuses one, no token is drawn."""
    out = np.zeros((MOST, matcher.grammar.vocabulary.words), np.int32)
    for place in range(1, 1 + len(drafts)):
        copy = matcher.copy()
        if copy.accept(drafts[:place]) and not set(tokens_in(mask := mask_of(copy))) <= set(ENDS):
            out[place - 1] = mask
    return out


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_are_those_of_matchers_that_accept_the_drafts(grammars: Grammars, threads: int) -> None:
    chance, filled, ended = random.Random(threads), 0, 0
    for _ in range(30):
        matchers = [grammars.compile(StructuredOutputsParams(**spec)).matcher() for spec in SPECS]  # type: ignore[arg-type]
        for matcher in matchers:
            for token in drawn(matcher, chance, chance.randrange(6), 0):
                assert matcher.accept([token])
            mask_of(matcher)
        drafts = [drawn(matcher, chance, chance.randrange(1 + MOST), chance.choice([0, 0.3])) for matcher in matchers]
        before = [matcher.accepted for matcher in matchers]
        out = np.full((len(matchers), MOST, grammars.vocabulary.words), 77, np.int32)
        fill_behind(matchers, drafts, out, threads=threads)
        for matcher, tokens, masks in zip(matchers, drafts, out, strict=True):
            np.testing.assert_array_equal(masks, expected(matcher, tokens))
            filled += int(masks.any(axis=1).sum())
            ended += len(tokens) - int(masks.any(axis=1).sum())
        assert [matcher.accepted for matcher in matchers] == before
    assert min(filled, ended) > 20


def test_a_long_forced_text_needs_no_parser(grammars: Grammars) -> None:
    """Its masks are read from the run, and a draft that leaves the run is wrong."""
    schema = {"type": "object", "properties": {"a": {"const": "abc " * 3_000}}, "required": ["a"]}
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = grammars.compile(form).matcher()
    assert matcher.accept(matcher.forced()[:9])
    (first,) = tokens_in(mask_of(matcher))
    assert matcher.run
    right = [first, *matcher.copy().forced()[1:MOST]]
    for drafts in (right, [*right[:2], right[2] + 1, *right[3:]], right[:2], []):
        out = np.full((1, MOST, grammars.vocabulary.words), 77, np.int32)
        fill_behind([matcher], [drafts], out)
        np.testing.assert_array_equal(out[0], expected(matcher, drafts))


def test_a_failed_matcher_allows_nothing(grammars: Grammars) -> None:
    good, bad = (grammars.compile(StructuredOutputsParams(regex="[a-c]+")).matcher() for _ in range(2))
    token = tokens_in(mask_of(good))[0]
    assert not bad.accept([ENDS[0]])
    out = np.full((2, 1, grammars.vocabulary.words), 77, np.int32)
    fill_behind([good, bad], [[token], [token]], out)
    assert out[0].any()
    assert not out[1].any()

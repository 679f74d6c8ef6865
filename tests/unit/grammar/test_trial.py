"""What costs too much where texts follow it: found before a grammar is used, and ended where it is."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.grammar.matching import llg, masks
from jswa.grammar.matching.llg import COSTLY, TOO_SLOW, Grammar, Matcher
from jswa.grammar.matching.masks import fill_all, fill_behind, watch_if_late
from jswa.grammar.matching.trial import costly
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import allowed_by

ROOT = Path(__file__).parents[3]


@pytest.fixture
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(ROOT / "jswa/assets/tiny")
    assert tokenizer is not None
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 6), most_grammars=2)


def compiled(grammars: Grammars, **spec: Any) -> Grammar:
    """The grammar of a form."""
    return grammars.compile(StructuredOutputsParams(**spec))


class Slow:
    """A matcher of llguidance whose masks take time."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds
        self.filled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def unsafe_compute_mask_ptr(self, *arguments: int) -> None:
        """Fill a mask after this thread has computed for a while."""
        self.filled += 1
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.inner.unsafe_compute_mask_ptr(*arguments)


def slow(matcher: Matcher, seconds: float = 0.06) -> Matcher:
    """Make a matcher slow."""
    matcher.inner = Slow(matcher.inner, seconds)
    return matcher


@pytest.mark.parametrize("spec", [{"regex": "(a|b)*c"}, {"json_object": True}, {"choice": ["x", "y"]}])
def test_ordinary_forms_cost_little(grammars: Grammars, spec: dict[str, Any]) -> None:
    assert costly(compiled(grammars, **spec)) is None


def test_a_trial_follows_texts_into_their_parts(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """To their ends, again and again: what is slow only there is found."""
    grammar = compiled(grammars, json={"type": "array", "items": {"type": "array", "items": {"const": True}}})
    begin, accepted = grammar.matcher, list[int]()

    class Watched:
        def __init__(self) -> None:
            self._matcher = begin()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def accept(self, tokens: list[int]) -> bool:
            accepted.extend(tokens)
            return self._matcher.accept(tokens)

    monkeypatch.setattr(grammar, "matcher", Watched)
    assert costly(grammar) is None
    text = grammars.vocabulary.inner.decode_str(accepted)
    assert len(accepted) >= 150
    assert text.count("[[") >= 2
    assert text.count("true") >= 2
    assert text.count("]]") >= 1


def test_a_slow_mask_makes_a_grammar_costly(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled(grammars, regex="[ab]*")
    begin = grammar.matcher
    monkeypatch.setattr(grammar, "matcher", lambda: slow(begin()))
    assert costly(grammar) == COSTLY


def test_a_slow_mask_ends_its_text(grammars: Grammars) -> None:
    """The text has an error, and its grammar is refused from then on, also when it was dropped meanwhile."""
    grammar = compiled(grammars, regex="[ab]*")
    matcher = slow(grammar.matcher())
    assert allowed_by(matcher) == []
    assert matcher.error == matcher.exceeded == TOO_SLOW
    assert not matcher.finished
    assert allowed_by(matcher.copy()) == []
    for _ in range(2):
        with pytest.raises(InvalidSampling, match="more than 50 ms"):
            compiled(grammars, regex="[ab]*")
        with pytest.raises(InvalidSampling, match="more than 50 ms"):
            grammars.find(grammar.text)
        for other in "cde":
            compiled(grammars, regex=other)
    assert len(grammars) == 2


def test_of_a_slow_batch_only_the_slow_text_ends(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is not timed text by text: its texts are watched, and the next slow mask ends the one that has it."""
    quick, culprit = compiled(grammars, regex="[ab]*").matcher(), compiled(grammars, regex="[cd]*").matcher()
    out = np.zeros((2, grammars.vocabulary.words), np.int32)
    with monkeypatch.context() as patched:
        patched.setattr(masks, "MAX_MASK_SECONDS", -1.0)  # any batch is late
        fill_all([quick, culprit], out, [0, 1])
    assert out.any(axis=1).all()
    behind = np.ones((2, 1, grammars.vocabulary.words), np.int32)
    token = allowed_by(quick.copy())[0]
    fill_behind([quick, culprit], [[token], [token]], behind)
    assert not behind.any(), "a text that is watched has no drafts"
    fill_all([quick, slow(culprit)], out, [0, 1])
    assert out[0].any()
    assert not out[1].any()
    assert (quick.error, culprit.error) == (None, TOO_SLOW)
    for _ in range(20):
        fill_all([quick, culprit], out, [0, 1])
    assert not quick.watched
    assert out[0].any()


def test_a_batch_of_many_masks_may_take_longer(grammars: Grammars) -> None:
    """As long as a slow mask and many ordinary ones: else all texts of a large batch would be watched for ever."""
    grammar = compiled(grammars, regex="[ab]*")
    for count, masks_of_each, watched in ((1, 1, True), (1, 2_000, False), (20, 100, False)):
        matchers = [grammar.matcher() for _ in range(count)]
        watch_if_late(matchers, masks_of_each, time.monotonic() - 0.052)
        assert all(bool(matcher.watched) == watched for matcher in matchers)


def test_the_bound_is_of_the_processor(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for the processor is not slow."""
    matcher = compiled(grammars, regex="[ab]*").matcher()
    inner = matcher.inner

    class Waits:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def unsafe_compute_mask_ptr(self, *arguments: int) -> None:
            time.sleep(0.1)
            inner.unsafe_compute_mask_ptr(*arguments)

    matcher.inner = Waits()
    assert allowed_by(matcher)
    assert matcher.error is None
    monkeypatch.setattr(llg, "MAX_MASK_SECONDS", -1.0)
    assert allowed_by(matcher) == []

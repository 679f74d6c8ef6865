"""A text is the same token by token, in parts of several tokens, and whole; it ends by one rule."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jswa.plan import ChoiceLogprobs, TokenEvent
from jswa.text.answers.parser import Answering
from jswa.text.generated import GeneratedText, Part, generated_text
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import DraftCounts, FinishReason, SamplingParams
from tests.support.server.harness import BYTES
from tests.support.text.transcripts import template_of, tokenizer_of

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOKENIZER = tokenizer_of(MARKS)
CHAT = Answering(template_of("hermes", TOKENIZER), (TOOL,), parallel=False)
PIECES = st.sampled_from(["a", "b", "é", "\n", *MARKS, CALL, "<think>why</think>"])


def begin(stop: Sequence[str], answering: Answering | None, interval: int | None) -> GeneratedText:
    """Begin a text."""
    params = SamplingParams(stop=list(stop))
    ids = np.zeros(1, np.int32)
    return generated_text(answering, TOKENIZER, "", ids, params, StopTable(tuple(stop)), interval=interval)


def events_of(tokens: Sequence[int], reason: FinishReason) -> list[TokenEvent]:
    """Return the events of a text: its first has a time, its last the reason."""
    last = len(tokens) - 1
    return [
        TokenEvent("r", token, reason if at == last else None, first_scheduled_time=None if at else 1.0)
        for at, token in enumerate(tokens)
    ]


def run(text: GeneratedText, events: Sequence[TokenEvent], alone: Sequence[bool] = ()) -> list[Part]:
    """Push events until the text ends. `alone`: whether `add` gets the token of an event that has nothing else."""
    parts: list[Part] = []
    for index, event in enumerate(events):
        plain = event[2:] == TokenEvent("", None)[2:] and event.token is not None
        if text.collects:
            text.collect(event)
            part = None if plain else text.push(event)
        elif plain and index < len(alone) and alone[index]:
            assert event.token is not None
            part = text.add(event.token)
        else:
            part = text.push(event)
        parts += [] if part is None else [part]
        if text.finish_reason is not None:
            break
    return parts


def told(text: GeneratedText, parts: Sequence[Part]) -> tuple[object, ...]:
    """Return all that is known of a text at its end, whatever its parts were."""
    shown: dict[tuple[str, int | None], str] = {}
    kinds = [event.kind for part in parts for event in part.events if event.kind in ("call", "end")]
    for event in (event for part in parts for event in part.events):
        shown[event.kind, event.call] = shown.get((event.kind, event.call), "") + event.text
    new = "".join(part.new for part in parts)
    return new, shown, kinds, text.finish_reason, text.stop_reason, text.reasoning_tokens


@given(
    said=st.lists(PIECES, min_size=1, max_size=12).map("".join),
    stop=st.sampled_from([(), ("ab",), ("b",), ("why", "\n")]),
    reason=st.sampled_from(["stop", "length", "abort"]),
    chat=st.booleans(),
    interval=st.integers(2, 7),
    alone=st.lists(st.booleans(), max_size=40),
)
@example("x" + CALL + "x", (), "length", True, 3, [True] * 40)  # the one call that it may have ends the text
@example("ab", ("ab",), "length", False, 2, [True] * 2)  # a stop string that the last token completes
def test_a_text_is_the_same_however_it_is_given(
    said: str, stop: tuple[str, ...], reason: FinishReason, chat: bool, interval: int, alone: list[bool]
) -> None:
    """Also if only some of its tokens come alone."""
    tokens = TOKENIZER.encode(said, add_special_tokens=False).tolist()
    events, answering = events_of(tokens, reason), CHAT if chat else None
    text = begin(stop, answering, 1)
    parts = run(text, events)
    assert text.finish_reason is not None
    expected = told(text, parts)
    for wanted, chosen in ((1, alone), (interval, ()), (interval, alone), (None, ()), (None, alone)):
        other = begin(stop, answering, wanted)
        given_parts = run(other, events, chosen)
        assert told(other, given_parts) == expected
        if wanted is None:
            assert len(given_parts) == 1
            assert other.tokens == list(tokens[: len(parts)])
            assert other.versions == [0] * len(parts)
        elif wanted > 1:
            assert len(given_parts) == 1 + -(-(len(parts) - 1) // wanted), "its first token comes alone"


def test_an_event_with_more_than_a_token_is_not_held() -> None:
    """Log probabilities belong to their part; counts of drafts come with each token."""
    text = begin((), None, 3)
    entry = ChoiceLogprobs(5, -1.0, 1, (), ())
    assert text.push(TokenEvent("r", 5, drafts=DraftCounts(1, 0))) is None
    assert text.push(TokenEvent("r", 5, logprobs=entry)) is not None
    assert text.push(TokenEvent("r", 5, drafts=DraftCounts(2, 1))) is None
    assert text.drafts == (2, 1)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_each_token_has_the_version_of_its_weights(stop: tuple[str, ...]) -> None:
    """They change between tokens, and may change before the first."""
    text = begin(stop, None, None)
    told = [TokenEvent("r", None, version=1), TokenEvent("r", 5), TokenEvent("r", 5), TokenEvent("r", None, version=4)]
    run(text, [*told, TokenEvent("r", 6), TokenEvent("r", None, version=5), TokenEvent("r", None, "abort")])
    assert (text.tokens, text.versions, text.version) == ([5, 5, 6], [1, 1, 4], 5)


def test_a_text_without_tokenizer_is_empty() -> None:
    """Its tokens are kept nevertheless if it is given whole."""
    for interval in (1, None):
        text = generated_text(None, None, "", np.zeros(1, np.int32), SamplingParams(), StopTable(()), interval=interval)
        parts = run(text, [TokenEvent("r", 5), TokenEvent("r", 6, "length")])
        assert "".join(part.new for part in parts) == ""
        assert text.tokens == ([] if interval else [5, 6])


def test_the_decoder_of_a_whole_text_is_that_of_a_stream() -> None:
    """Bytes that are no character become the same marks."""
    tokenizer = Tokenizer.load(BYTES)
    tokens = [byte + 3 for byte in "é".encode()[:1] + b"a" + "日".encode()[:2]]
    texts = []
    for interval in (1, None):
        ids, params = np.zeros(1, np.int32), SamplingParams()
        text = generated_text(None, tokenizer, "", ids, params, StopTable(()), interval=interval)
        texts.append("".join(part.new for part in run(text, events_of(tokens, "length"))))
    assert texts[0] == texts[1] != ""

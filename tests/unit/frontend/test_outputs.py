"""Outputs of a prompt from the engine's events: the same in pieces and whole, whatever the events look like."""

from collections import deque
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.errors import GenerationError
from jswa.frontend.outputs import CallOptions, Joined, PromptTexts, Receiver, distribute
from jswa.plan import StepEvents, TokenEvent
from jswa.text.tokenizer import Tokenizer
from jswa.types import RequestOutput, SamplingParams
from tests.support.server.fake_engine import FakeEngine, count_up
from tests.support.server.harness import BYTES

TOKENIZER = Tokenizer.load(BYTES)


def fail(_: str, error: Exception) -> None:
    """Raise the error of a receiver."""
    raise error


def pieces(engine: FakeEngine, prompt: str, params: SamplingParams, *, whole: bool) -> list[RequestOutput]:
    """Run one prompt to its end."""
    ids = (f"r{n}" for n in count())
    texts = PromptTexts(engine, TOKENIZER, partial(next, ids), prompt, params, CallOptions(whole=whole))
    events: deque[TokenEvent] = deque()
    receivers = {name: texts.receiver(name, events.append) for name in texts.unfinished}
    for request in texts.requests:
        engine.add(request)
    found = []
    while texts.unfinished:
        distribute(engine.step(), receivers, fail)
        while events:
            event = events.popleft()
            if event.request_id in texts.unfinished:
                piece = texts.push(event)
                found += [] if piece is None else [piece]
    return found


def joined(found: list[RequestOutput]) -> RequestOutput:
    """Join the pieces."""
    output = Joined()
    for piece in found:
        output.add(piece)
    return output.whole()


@given(
    prompt=st.text("abcé", min_size=1, max_size=5),
    n=st.integers(1, 3),
    tokens=st.integers(1, 30),
    more=st.sampled_from(
        [{}, {"stop": "jk"}, {"stop_token_ids": [110]}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"stop": "zzz"}]
    ),
)
def test_a_text_is_the_same_in_pieces_and_whole(prompt: str, n: int, tokens: int, more: dict[str, Any]) -> None:
    """With stop strings, stop tokens, log probabilities and several texts."""
    params = SamplingParams(n=n, max_tokens=tokens, **more)
    streamed = joined(pieces(FakeEngine(), prompt, params, whole=False))
    found = pieces(FakeEngine(), prompt, params, whole=True)
    assert joined(found).outputs == streamed.outputs
    assert (joined(found).prefix, joined(found).prompt_logprobs) == (streamed.prefix, streamed.prompt_logprobs)
    if not params.wants_logprobs:
        assert len(found) == n, "a text of which nothing is wanted before its end must be made at once"


def test_times_and_cached_tokens_are_those_of_the_first_and_the_last_token() -> None:
    """Though nothing is made of the tokens between them."""
    engine = FakeEngine()
    engine.delay = 0.01
    output = joined(pieces(engine, "abcd", SamplingParams(max_tokens=8), whole=True))
    times = output.metrics
    assert times is not None
    assert None not in (times.first_scheduled_time, times.first_token_time, times.last_token_time, times.finished_time)
    assert (times.last_token_time or 0) - (times.first_token_time or 0) > 0.06
    assert times.finished_time == times.last_token_time
    assert output.num_cached_tokens == len(output.prompt_token_ids) // 2


def test_a_text_that_fails_keeps_what_it_has_and_its_error() -> None:
    """Also if another text of the prompt ends later, without an error."""
    error = GenerationError("not finite")
    engine = FakeEngine(rule=lambda prompt, k: error if k == 3 else count_up(prompt, k))
    output = joined(pieces(engine, "a", SamplingParams(n=2, max_tokens=8), whole=True))
    assert output.error is error
    assert [(text.text, text.finish_reason) for text in output.outputs] == [("cde", "error")] * 2


def test_the_latest_output_does_not_change_later() -> None:
    """A caller may keep each of a stream's cumulative outputs."""
    output, kept = Joined(), []
    for piece in pieces(FakeEngine(), "a", SamplingParams(max_tokens=5, logprobs=0), whole=False):
        output.add(piece)
        kept.append(output.latest().outputs[0])
    assert [text.text for text in kept] == ["c", "cd", "cde", "cdef", "cdefg"]
    assert [len(text.token_ids) for text in kept] == [1, 2, 3, 4, 5]
    assert [len(text.logprobs or ()) for text in kept] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("plain", [True, False])
def test_events_reach_the_receivers_of_their_requests(plain: bool) -> None:
    """As arrays or as objects; those of requests that were aborted are dropped."""
    tokens: list[int] = []
    events: list[TokenEvent] = []
    last = TokenEvent("a", 9, "length")
    if plain:
        step = StepEvents(np.array(["a", "gone"], object), np.array([5, 6], np.int32), (last, TokenEvent("gone", 1)))
    else:
        step = StepEvents(others=(TokenEvent("a", 5), last, TokenEvent("gone", 1)))
    distribute(step, {"a": Receiver(tokens.append, events.append)}, fail)
    assert (tokens, events) == (([5], [last]) if plain else ([], [TokenEvent("a", 5), last]))

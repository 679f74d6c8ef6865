"""What becomes of rows whose steps are not finite, and of KV that is not (Scheduler, with a device that spreads it)."""

import dataclasses

import numpy as np
import pytest

from jswa.config import Limits
from jswa.errors import GenerationError, NothingAllowed
from jswa.plan import NOT_FINITE, NOTHING_ALLOWED, TokenEvent
from jswa.sched.constraint import make_constraint
from jswa.types import SamplingParams
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

LAYOUTS = {
    "full": make_layout(4, None, num_full=1, num_local=0),
    "hybrid": make_layout(4, 6, num_full=1, num_local=2),
    "local": make_layout(4, 6, num_full=0, num_local=1),
}
MODEL = TextModel(1000, failures=100)


def extended(tokens: list[int], length: int, *, fails: bool = False) -> list[int]:
    """Return the text continued to a length without a history that fails, or with the last one failing."""
    tokens, state = list(tokens), MODEL.fold(0, tokens)
    while len(tokens) < length:
        last = fails and len(tokens) + 1 == length
        token = next(t for t in range(10**4) if (MODEL.next_token(MODEL.fold(state, [t])) == NOT_FINITE) == last)
        tokens.append(token)
        state = MODEL.fold(state, [token])
    return tokens


DOCUMENT = extended([1], 32)  # two chunks
QUESTION = extended([*DOCUMENT, 2], 37)
BAD_QUESTION = extended([*DOCUMENT, 3], 36, fails=True)
BAD_DOCUMENT = extended(extended([1], 24, fails=True), 60)  # the second of four chunks fails


def make_loop(layout: str = "hybrid", *, rows: int = 8) -> Loop:
    """Return a loop with chunks of 16 tokens and memory for all texts."""
    return Loop(LAYOUTS[layout], Limits(64, rows, 16, 4, num_slabs=400), MODEL)


def add(loop: Loop, name: str, prompt: list[int], *, new: int = 3, salt: str = "") -> None:
    """Queue a request for `new` tokens."""
    request = make_request(name, prompt, length=len(prompt) + new)
    loop.scheduler.add(dataclasses.replace(request, cache_salt=salt))


def run(loop: Loop, *, spoiled: bool = False) -> dict[str, list[TokenEvent]]:
    """Run to the end; return the events by request. All KV that the cache has at any time is finite, unless spoiled."""
    events: dict[str, list[TokenEvent]] = {}
    while loop.scheduler.has_work():
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
        loop.scheduler.check()
        if not spoiled:
            loop.runner.check_cached(loop.scheduler.cache)
    return events


def tokens_of(events: list[TokenEvent]) -> list[int | None]:
    """Return the tokens of a request that ended by its length."""
    assert events[-1].finish_reason == "length"
    return [event.token for event in events]


def alone(prompt: list[int], new: int = 3) -> list[int]:
    """Return the tokens of a request that runs alone."""
    tokens, reason = MODEL.generate(prompt, (), len(prompt) + new)
    assert reason == "length"
    return tokens


def cached(loop: Loop, prompt: list[int], salt: str = "") -> int:
    """Return how much of a prompt the cache has."""
    return loop.scheduler.cache.match(salt, np.array(prompt, np.int32), len(prompt)).resume.full_to


def spoil(loop: Loop, layout: str) -> None:
    """Let all cached KV go bad."""
    pool = loop.scheduler.cache.pool
    for page in np.flatnonzero(pool.local_cached if layout == "local" else pool.full_cached).tolist():
        loop.runner.spoil(page, full=layout != "local")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_that_is_not_finite_ends_at_once_and_publishes_what_came_before(layout: str) -> None:
    """The error comes with the second of four chunks, the cache keeps the first."""
    loop = make_loop(layout)
    add(loop, "bad", BAD_DOCUMENT)
    (event,) = run(loop)["bad"]
    assert (event.token, event.finish_reason, type(event.error)) == (None, "error", GenerationError)
    assert loop.runner.launches == 3, "it runs one more chunk, which was launched before the error was seen"
    assert cached(loop, BAD_DOCUMENT) == 16


@pytest.mark.parametrize("end", ["abort", "preempt"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_ends_before_its_step_came_back_publishes_nothing_of_it(layout: str, steps: int, end: str) -> None:
    """Whichever step is in flight when the row ends; the next request with that prefix gets its tokens."""
    loop = make_loop(layout)
    add(loop, "bad", BAD_DOCUMENT)
    for _ in range(steps):
        loop.step()
    if "bad" in loop.scheduler.sequences:
        loop.scheduler.abort("bad") if end == "abort" else loop.scheduler.preempt("bad")
    loop.runner.check_cached(loop.scheduler.cache)
    prompt = extended([*BAD_DOCUMENT[:23], 5], 30)
    add(loop, "good", prompt)
    assert tokens_of(run(loop)["good"]) == alone(prompt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_behind_cached_kv_that_went_bad_runs_again_without_it(layout: str) -> None:
    """It gets its tokens, its hit says why nothing was cached, and the next request finds good KV."""
    loop = make_loop(layout)
    add(loop, "first", QUESTION)
    run(loop)
    spoil(loop, layout)
    add(loop, "second", QUESTION)
    events = run(loop, spoiled=True)["second"]
    assert tokens_of(events) == alone(QUESTION)
    hit = events[0].prefix
    assert hit is not None
    assert (hit.cached_tokens, hit.reason) == (0, "not finite")
    stats = loop.scheduler.cache.stats()
    assert (stats.requests, stats.cached_tokens, stats.missed["not finite"]) == (2, 0, len(QUESTION))
    add(loop, "third", QUESTION)
    (third, *_) = run(loop)["third"]
    assert third.prefix is not None
    assert third.prefix.cached_tokens > 0


def test_a_prompt_whose_every_run_fails_costs_others_nothing() -> None:
    """It fails behind a shared document and without it: the document stays cached, and no other row starts again."""
    loop = make_loop()
    add(loop, "first", QUESTION)
    run(loop)
    shared = cached(loop, DOCUMENT)
    add(loop, "beside", extended([*DOCUMENT, 4], 34), new=20)
    loop.step()
    for number in range(3):
        add(loop, f"bad {number}", BAD_QUESTION)
    events = run(loop)
    for number in range(3):
        assert [(e.token, e.finish_reason) for e in events[f"bad {number}"]] == [(None, "error")]
    assert tokens_of(events["beside"]) == alone(extended([*DOCUMENT, 4], 34), 20)
    assert loop.scheduler.cache.epoch == 0, "something was withdrawn"
    assert cached(loop, DOCUMENT) == shared == len(DOCUMENT)
    assert loop.scheduler.cache.stats().requests == 5


def test_texts_that_share_a_bad_prefix_withdraw_it_once() -> None:
    """Eight rows start from it together; all get their tokens. Another tenant's copy of the same text stays."""
    loop = make_loop()
    for salt in ("", "other"):
        add(loop, f"first {salt}", DOCUMENT, salt=salt)
        run(loop, spoiled=True)
        if not salt:
            spoil(loop, "hybrid")
    prompts = {f"{n}": extended([*DOCUMENT, 10 + n], 36) for n in range(8)}
    for name, prompt in prompts.items():
        add(loop, name, prompt)
    events = run(loop, spoiled=True)
    assert all(tokens_of(events[name]) == alone(prompt) for name, prompt in prompts.items())
    assert loop.scheduler.cache.epoch == 1
    loop.runner.check_cached(loop.scheduler.cache)
    assert cached(loop, DOCUMENT) == cached(loop, DOCUMENT, "other") == len(DOCUMENT)


def test_a_request_whose_prefix_is_coming_from_a_row_that_fails_runs_without_it() -> None:
    """It waits for the row's chunks until one is not finite."""
    loop = make_loop()
    prompt = extended([*BAD_DOCUMENT[:23], 5], 40)
    add(loop, "bad", BAD_DOCUMENT)
    add(loop, "good", prompt)
    events = run(loop)
    assert events["bad"][-1].finish_reason == "error"
    assert tokens_of(events["good"]) == alone(prompt)
    assert events["good"][0].prefix is not None
    assert events["good"][0].prefix.cached_tokens == 16


def test_a_row_that_fails_after_finite_steps_is_not_run_again() -> None:
    """All cached KV that it read is known to be good by then; what it has computed before stays cached."""
    loop = make_loop("full")
    add(loop, "first", DOCUMENT)
    run(loop)
    prompt = next(
        text
        for text in (extended([*DOCUMENT, n], 34) for n in range(999))
        if MODEL.generate(text, (), 60)[1] == "error"
    )
    tokens = MODEL.generate(prompt, (), 60)[0]
    add(loop, "fails", prompt, new=26)
    before = loop.runner.launches
    events = run(loop)["fails"]
    assert [event.token for event in events] == [*tokens, None]
    assert loop.runner.launches - before == len(tokens) + 2
    assert cached(loop, [*prompt, *tokens]) == len(prompt) + len(tokens) - 1


def test_constraints_that_leave_nothing_end_their_request_alone() -> None:
    """The error names them; the KV of the prompt is good and stays cached, and the row beside goes on."""
    loop = make_loop()
    params = SamplingParams(allowed_token_ids=[7], bad_words=["7 7"], max_tokens=3)
    constraint = make_constraint(params, 1000, len(DOCUMENT), frozenset(), ((7, 7),))
    request = make_request("nothing", DOCUMENT, length=40)
    loop.scheduler.add(dataclasses.replace(request, params=params, constraint=constraint))
    while loop.scheduler.sequences["nothing"].num_known == len(DOCUMENT):
        loop.step()
    add(loop, "beside", extended([*DOCUMENT, 4], 34))
    loop.step()
    before, row_id = loop.pending, loop.scheduler.sequences["nothing"].row_id
    assert before is not None
    loop.launch()
    tokens = np.where(before.plan.row_ids == row_id, NOTHING_ALLOWED, before.tokens()).astype(np.int32)
    (event,) = (e for e in loop.scheduler.apply(before.plan, tokens) if e.request_id == "nothing")
    loop.finish()
    assert event.finish_reason == "error"
    assert isinstance(event.error, NothingAllowed)
    assert "allowed_token_ids and bad_words" in str(event.error)
    assert loop.scheduler.cache.epoch == 0
    assert cached(loop, DOCUMENT) == len(DOCUMENT)
    assert tokens_of(run(loop)["beside"])[-1] == alone(extended([*DOCUMENT, 4], 34))[-1]

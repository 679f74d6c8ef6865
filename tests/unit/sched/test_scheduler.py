"""The scheduler in chosen situations (jswa/sched/scheduler.py)."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.cache.moves import Move
from jswa.cache.prefix.edges import BRANCH, PROMPT_END, TEXT_END
from jswa.config import Limits
from jswa.errors import EngineError, PromptTooLong
from jswa.plan import BAN_TOKENS, FROM_DEVICE, NOT_FINITE, TokenEvent
from jswa.sched.constraint import make_constraint
from jswa.sched.scheduler import Scheduler
from jswa.sched.sequence import Sequence, Status
from jswa.types import SamplingParams
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

FULL = make_layout(4, None, num_full=1, num_local=0)
HYBRID = make_layout(4, 6, num_full=1, num_local=2)
MODEL = TextModel(1000)


def make_loop(layout: KVLayout, *, slabs: int, rows: int = 4, tokens: int = 16, length: int = 40) -> Loop:
    """Return a loop on an arena of `slabs` usable slabs."""
    return Loop(layout, Limits(length, rows, tokens, layout.page_size, num_slabs=1 + slabs), MODEL)


def find(loop: Loop, name: str) -> Sequence:
    """Return a sequence by its request id."""
    return loop.scheduler.sequences[name]


def run(loop: Loop) -> list[TokenEvent]:
    """Run to the end; return all events."""
    events = []
    while loop.scheduler.has_work():
        events.extend(loop.step())
        loop.scheduler.check()
    return events


@pytest.mark.parametrize(("layers", "count"), [((1, 2), 4_000), ((0, 1), 1_000)], ids=["hybrid", "local only"])
def test_a_long_generation_never_holds_more_than_the_window(layers: tuple[int, int], count: int) -> None:
    """W = 64, p = 16: at most touch(W) + 1 local pages at every step, and each step reads back its whole window."""
    layout = make_layout(16, 64, num_full=layers[0], num_local=layers[1])
    loop = make_loop(layout, slabs=2000, length=100 + count, tokens=32)
    prompt = list(range(100))
    loop.scheduler.add(make_request("long", prompt, length=100 + count))
    cache = loop.scheduler.cache
    said: list[int | None] = []
    while loop.scheduler.has_work():
        said.extend(event.token for event in loop.step())
        assert sum(len(lease.local.held) for lease in cache.leases) <= layout.touch(64) + 1
        # Besides the window: pages of the prompt that are cached or, in prefill, wait to be published.
        assert cache.pool.num_local <= layout.touch(64) + 1 + layout.touch(100)
    assert said == MODEL.generate(prompt, (), 100 + count)[0]
    assert loop.runner.launches == 4 + count - 1


def test_a_decode_row_gets_a_local_page_before_it_frees_one() -> None:
    """Inside a plan, before it slides, it holds at most touch(W) local pages."""
    layout = make_layout(16, 64, num_full=1, num_local=2)
    pool_of_five = 1 + (layout.touch(64) * 2 + 32) // 2
    loop = Loop(layout, Limits(500, 1, 1, 16, num_slabs=pool_of_five), MODEL)
    assert loop.scheduler.capacity == 500
    loop.scheduler.add(make_request("a", [1], length=500))
    assert len(run(loop)) == 499


def test_rows_that_decode_run_in_each_step_beside_a_prompt_when_none_is_in_flight() -> None:
    """Though their last tokens are known then, as those of a prompt are, and the prompt has a higher priority."""
    loop = make_loop(FULL, slabs=200, length=200)

    def counts() -> list[int]:
        plan = loop.launch()
        loop.apply(loop.pending)
        assert plan is not None
        return [int(plan.counts[plan.row_ids == row].sum()) for row in range(3)]

    for name in "ab":
        loop.scheduler.add(make_request(name, [ord(name)] * 3, length=200))
    assert counts()[:2] == [3, 3]
    loop.scheduler.add(make_request("long", list(range(60)), length=200, priority=-1))
    assert [counts() for _ in range(4)] == [[1, 1, 14]] * 4
    assert counts() == [1, 1, 4]


def test_requests_run_in_order_of_arrival() -> None:
    """With one row at a time, requests finish in order of arrival, whatever their lengths."""
    loop = make_loop(FULL, slabs=40, rows=1)
    for name, length in (("long", 30), ("short", 5), ("middle", 12)):
        loop.scheduler.add(make_request(name, [1, 2], length=length))
    ends = [event.request_id for event in run(loop) if event.finish_reason]
    assert ends == ["long", "short", "middle"]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    """The head of the queue blocks the queue, so that long prompts do not starve."""
    loop = make_loop(FULL, slabs=6)
    for name, prompt, length in (("running", 11, 14), ("big", 13, 14), ("small", 1, 3)):
        loop.scheduler.add(make_request(name, [1] * prompt, length=length))
    assert list(dict.fromkeys(event.request_id for event in run(loop))) == ["running", "big", "small"]


@pytest.mark.parametrize(("slabs", "admitted"), [(10, True), (9, False)])
def test_admission_beside_a_decode_row_follows_the_formula_exactly(slabs: int, admitted: bool) -> None:
    """Claimed: resident(10) = 3 + 2 · 3 slots. Alone a prompt of 9 needs 3 + 2 · touch(10): 20 slots, 10 slabs."""
    loop = make_loop(HYBRID, slabs=slabs, length=20)
    loop.scheduler.add(make_request("a", [1] * 9, length=20))
    loop.step()
    loop.scheduler.add(make_request("b", [2] * 9, length=10))
    loop.step()
    assert find(loop, "b").status is (Status.RUNNING if admitted else Status.WAITING)
    assert {event.request_id for event in run(loop) if event.finish_reason == "length"} == {"a", "b"}


@pytest.mark.parametrize(("slabs", "admitted"), [(16, True), (15, False)])
def test_admission_beside_a_prefill_keeps_the_reserve_of_the_step(slabs: int, admitted: bool) -> None:
    """Claimed: resident(34) = 9 + 2 · 3 slots. A prompt of 3 needs 1 + 2 · 2, the step 2 · (16/4 + 2): 16 slabs."""
    loop = make_loop(HYBRID, slabs=slabs, length=40)
    loop.scheduler.add(make_request("a", [1] * 33, length=40))
    loop.scheduler.add(make_request("b", [2] * 3, length=10))
    loop.step()
    assert find(loop, "b").status is (Status.RUNNING if admitted else Status.WAITING)
    assert {event.request_id for event in run(loop) if event.finish_reason == "length"} == {"a", "b"}


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    """At once, with the field, the value and the limit in the error; a prompt of one token less is accepted."""
    loop = make_loop(FULL, slabs=5)
    assert loop.scheduler.capacity == 20
    with pytest.raises(PromptTooLong) as refused:
        loop.scheduler.add(make_request("a", [1] * 20, length=40))
    assert (refused.value.field, refused.value.value) == ("prompt", "20 tokens")
    assert "at most 19 tokens" in refused.value.limit
    assert not loop.scheduler.has_work()
    loop.scheduler.add(make_request("a", [1] * 19, length=40))
    events = run(loop)
    assert [(event.finish_reason, event.token is None) for event in events] == [("length", False)]


def test_a_row_preempted_in_flight_keeps_its_token() -> None:
    """The token of its step is applied first; then the row waits again, before all later requests."""
    loop = make_loop(FULL, slabs=4)
    for name, prompt in (("old", 3), ("young", 9), ("late", 3)):
        loop.scheduler.add(make_request(name, [ord(name[0]), *range(prompt - 1)], length=prompt + 6))
    young = find(loop, "young")
    while True:
        before = loop.pending
        loop.launch()
        if find(loop, "young").status is Status.PREEMPTED:
            break
        loop.apply(before)
    assert young.in_flight == 1
    assert young.lease is None
    known = young.num_known
    assert find(loop, "late").status is Status.WAITING, "the later request overtook the preempted one"
    events = loop.apply(before)
    assert young.num_known == known + 1
    assert find(loop, "young").status is Status.WAITING
    tokens = MODEL.generate(young.request.prompt.tolist(), (), 15)[0]
    assert [e.token for e in events if e.request_id == "young"] == [tokens[known - 9]]
    rest = run(loop)
    assert [e.token for e in rest if e.request_id == "young"] == tokens[known - 8 :]
    assert [e.request_id for e in rest if e.finish_reason] == ["old", "young", "late"]


def test_a_row_that_may_have_ended_preempts_no_other() -> None:
    """It waits one step for its token in flight: here that token ends it, and no row is preempted."""
    prompt = [1, 2, 3]
    end = MODEL.generate(prompt, (), 5)[0][1]
    loop = make_loop(FULL, slabs=4)
    loop.scheduler.add(make_request("ends", prompt, length=9, stop_ids=[end]))
    loop.scheduler.add(make_request("other", [4] * 9, length=15))
    assert [event.finish_reason for event in run(loop) if event.finish_reason] == ["stop", "length"]
    assert loop.scheduler.preemptions == 0


def test_the_youngest_row_is_preempted() -> None:
    """The last request gives its pages to the first one; the row between them keeps its own."""
    loop = make_loop(FULL, slabs=5)
    for name, prompt, length in (("old", 3, 8), ("middle", 6, 11), ("young", 6, 11)):
        loop.scheduler.add(make_request(name, [1] * prompt, length=length))
    while not loop.scheduler.preemptions:
        loop.step()
    assert find(loop, "middle").status is Status.RUNNING
    assert find(loop, "young").status is not Status.RUNNING
    assert [event.request_id for event in run(loop) if event.finish_reason][-1] == "young"
    assert loop.scheduler.preemptions == 1


def test_a_length_stop_costs_no_step_and_an_end_token_one() -> None:
    """A length stop is known when the step is planned; an end token only after the step."""
    prompt = [5, 6, 7]
    tokens, _ = MODEL.generate(prompt, (), 13)
    for stop_ids, steps in (((), 10), ((tokens[4],), 6)):
        loop = make_loop(HYBRID, slabs=40)
        loop.scheduler.add(make_request("a", prompt, length=13, stop_ids=stop_ids))
        events = run(loop)
        assert loop.runner.launches == steps
        assert [event.token for event in events] == tokens[: 5 if stop_ids else 10]
        assert events[-1].stop_reason == (tokens[4] if stop_ids else None)


def test_an_end_token_of_the_model_gives_no_stop_reason() -> None:
    """As in vLLM: only a stop token that the request asked for is named."""
    token = MODEL.generate([1], (), 2)[0][0]
    request = make_request("a", [1], length=9)
    loop = make_loop(FULL, slabs=40)
    loop.scheduler.add(type(request)(**{**vars(request), "stop_ids": frozenset([token])}))
    assert [event[:4] for event in run(loop)] == [("a", token, "stop", None)]


def test_an_aborted_row_in_flight_gives_no_more_events() -> None:
    """Its pages are free at once, the token in flight is dropped, and the id can be used again."""
    loop = make_loop(HYBRID, slabs=40)
    loop.scheduler.add(make_request("a", [1, 2], length=20))
    loop.step()
    loop.step()
    assert loop.scheduler.abort("a") == TokenEvent("a", None, "abort")
    stats = loop.scheduler.stats()
    assert stats.free_slots + stats.cached_slots == stats.total_slots
    assert loop.scheduler.abort("a") is None
    assert loop.scheduler.has_work(), "a step is in flight"
    loop.scheduler.add(make_request("a", [3], length=3))
    assert [event.token for event in run(loop)] == MODEL.generate([3], (), 3)[0]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    """The other rows of the batch continue."""
    loop = make_loop(HYBRID, slabs=40)
    for name in "ab":
        loop.scheduler.add(make_request(name, [ord(name)], length=4))
    plan = loop.scheduler.plan()
    assert plan is not None
    loop.runner.launch(plan)
    events = loop.scheduler.apply(plan, np.array([NOT_FINITE, 7], np.int32))
    assert [event[:3] for event in events] == [("a", None, "error"), ("b", 7, None)]
    assert loop.scheduler.stats().running == 1


def test_prefill_chunks_and_decode_rows_share_a_step() -> None:
    """Decode rows come first in the token budget; a prompt gets the rest, and samples only at its end."""
    loop = make_loop(FULL, slabs=40, tokens=8)
    loop.scheduler.add(make_request("a", [1, 2], length=20))
    loop.step()
    loop.scheduler.add(make_request("b", list(range(17)), length=20))
    seen = []
    for _ in range(3):
        before = loop.pending
        plan = loop.launch()
        assert plan is not None
        loop.apply(before)
        seen.append((plan.counts.tolist(), plan.samples.tolist()))
        assert plan.tokens[0] == FROM_DEVICE
    assert seen == [([1, 7], [1, 0]), ([1, 7], [1, 0]), ([1, 3], [1, 1])]


def test_each_move_is_in_one_plan_and_in_order() -> None:
    """Also moves of a `plan` that had nothing to run: they are carried out before the next step."""
    scheduler = make_loop(FULL, slabs=40).scheduler
    scheduler.cache.moves = [Move(5, 9, rename=True), Move(9, 3, rename=False)]
    assert scheduler.plan() is None
    scheduler.add(make_request("a", [1], length=5))
    plans = [scheduler.plan(), scheduler.plan()]
    assert [plan.moves.tolist() for plan in plans if plan is not None] == [[[5, 9, 1], [9, 3, 0]], []]


def test_a_request_id_that_runs_cannot_be_added_again() -> None:
    """Events have no other key."""
    loop = make_loop(FULL, slabs=40)
    loop.scheduler.add(make_request("a", [1], length=3))
    with pytest.raises(EngineError, match="'a' is already running"):
        loop.scheduler.add(make_request("a", [1], length=3))


def test_a_step_has_as_many_events_as_it_yields() -> None:
    """Tokens of requests that go on, and the last of one that ends."""
    loop = make_loop(FULL, slabs=40)
    for name, length in (("a", 4), ("b", 9), ("c", 9)):
        loop.scheduler.add(make_request(name, [1], length=length))
    counts = set()
    while loop.scheduler.has_work():
        events = loop.step()
        assert len(events) == len([*events])
        counts.add(len(events))
    assert 3 in counts


def test_the_cache_learns_where_prompts_and_texts_end() -> None:
    """Requests go on from there more often than from elsewhere. A place is what it was last: here a prompt's end."""
    loop = make_loop(HYBRID, slabs=40)
    loop.scheduler.add(make_request("a", list(range(6)), length=11))
    text = [*range(6), *(event.token for event in run(loop) if event.token is not None)]

    def places() -> dict[int, int]:
        path = loop.scheduler.cache.match("", np.array(text, np.int32), len(text)).path
        return {at: kind for node in path for at, kind in node.places.items()}

    assert places() == {6: PROMPT_END, 10: TEXT_END}
    text = text[:10]
    loop.scheduler.add(make_request("b", text, length=20))
    text += [event.token for event in run(loop) if event.token is not None]
    assert places() == {6: PROMPT_END + 2, 9: BRANCH, 10: PROMPT_END, 19: TEXT_END}, "its last token runs anew from 9"


@pytest.mark.parametrize("cached", [0, 4, 12, 20])
def test_the_device_gets_the_last_tokens_before_a_row_with_bad_words(cached: int) -> None:
    """As many as a bad word has, though the row does not run those that the cache had."""
    loop, prompt = make_loop(FULL, slabs=40), list(range(100, 124))
    if cached:
        loop.scheduler.add(make_request("before", prompt[:cached], length=cached + 2))
        run(loop)
    constraint = make_constraint(SamplingParams(), 1000, len(prompt), frozenset(), ((1, 2),))
    loop.scheduler.add(dataclasses.replace(make_request("a", prompt, length=30), constraint=constraint))
    plan = loop.scheduler.plan()
    assert plan is not None
    (entry,) = plan.logits_state
    assert entry.start == cached
    assert entry.recent.tolist() == prompt[max(0, cached - BAN_TOKENS) : cached]


def test_steps_must_be_applied_in_order() -> None:
    """Otherwise every row would get tokens of another step."""
    scheduler: Scheduler = make_loop(FULL, slabs=40).scheduler
    scheduler.add(make_request("a", [1], length=5))
    plans = [scheduler.plan(), scheduler.plan()]
    assert plans[1] is not None
    with pytest.raises(EngineError, match="order"):
        scheduler.apply(plans[1], np.zeros(1, np.int32))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "cold"),
        ({"prompt_logprobs": 1}, "prompt logprobs"),
        ({"skip_reading_prefix_cache": True}, "skipped"),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": True}, "prompt logprobs"),
    ],
)
def test_a_miss_names_why_the_cache_was_not_searched(cache: bool, params: dict[str, Any], reason: str) -> None:
    """What the request asked is named only if it is the reason: without a cache that is "disabled"."""
    loop = Loop(HYBRID, Limits(40, 4, 16, HYBRID.page_size, num_slabs=40, prefix_cache=cache), MODEL)
    request = make_request("a", [1, 2, 3, 4, 5, 6], length=8)
    loop.scheduler.add(dataclasses.replace(request, params=SamplingParams(**params)))
    loop.launch()
    (sequence,) = loop.scheduler.running
    assert sequence.prefix is not None
    loop.apply(loop.pending)
    expected = reason if cache else "disabled"
    assert sequence.prefix.missed() == {expected: 6}
    assert loop.scheduler.cache.stats().missed == {expected: 6}

"""Rows that advance by a number of tokens that only the device knows (jswa/sched/rows.py), in chosen situations.

Random ones are in tests/property/test_scheduler.py.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from jswa.config import Limits
from jswa.plan import BANS, FROM_DEVICE, StepPlan, TokenEvent
from jswa.sched.constraint import make_constraint
from jswa.types import SamplingParams
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

HYBRID = make_layout(4, 6, num_full=1, num_local=2)
MODEL = TextModel(1000)
PROMPT = list(range(9))


def make_loop(advance: Callable[[int], int], *, drafts: int = 3, slabs: int = 60, tokens: int = 16) -> Loop:
    """Return a loop whose rows run so many drafts a step."""
    return Loop(HYBRID, Limits(200, 4, tokens, 4, num_slabs=1 + slabs), MODEL, drafts, advance)


def steps(loop: Loop) -> Iterator[tuple[StepPlan | None, list[TokenEvent]]]:
    """Run to the end; yield each plan and the events of the step before it."""
    while loop.scheduler.has_work():
        before = loop.pending
        plan = loop.launch()
        yield plan, loop.apply(before)
        loop.scheduler.check()


@pytest.mark.parametrize(("advance", "launches"), [(1, 40), (4, 12), (2, 21)])
def test_a_step_brings_as_many_tokens_as_drafts_were_right(advance: int, launches: int) -> None:
    """40 tokens, the first with the prompt; the last step but one is in flight when the text ends."""
    loop = make_loop(partial(min, advance))
    loop.scheduler.add(make_request("a", PROMPT, length=len(PROMPT) + 40))
    said = [event.token for _, events in steps(loop) for event in events]
    assert said == MODEL.generate(PROMPT, (), len(PROMPT) + 40)[0]
    assert loop.runner.launches == pytest.approx(launches, abs=1)


def test_the_host_has_an_interval_only_while_a_step_with_drafts_is_in_flight() -> None:
    """After a plan the length is in [launched, launched + ahead]; the next start is the device's if that is open."""
    loop = make_loop(lambda most: 1)
    loop.scheduler.add(make_request("a", PROMPT, length=len(PROMPT) + 20))
    found = []
    for plan, _ in steps(loop):
        if plan is not None and "a" in loop.scheduler.sequences:
            row = loop.scheduler.sequences["a"]
            found.append((int(plan.starts[0]), int(plan.counts[0]), row.launched, row.ahead))
    # The prompt; from its end, known; then with one draft step in flight, of which at least one position is run.
    assert found[:4] == [(0, 9, 9, 0), (9, 4, 10, 3), (FROM_DEVICE, 4, 11, 3), (FROM_DEVICE, 4, 12, 3)]


def test_tokens_behind_a_stop_token_are_none_of_the_text() -> None:
    """The stop token is in the middle of a step's tokens. All of them are events, in order, and the row is free."""
    text = MODEL.generate(PROMPT, (), len(PROMPT) + 30)[0]
    loop = make_loop(lambda most: most)
    loop.scheduler.add(make_request("a", PROMPT, length=len(PROMPT) + 30, stop_ids=[text[6]]))
    events = [event for _, events in steps(loop) for event in events]
    assert [event.token for event in events] == text[:7]
    assert [event.finish_reason for event in events] == [None] * 6 + ["stop"]
    assert loop.scheduler.stats().running == 0


def test_a_row_runs_no_draft_past_its_limit() -> None:
    """Its last token is sampled and never run; the device does not run what the host could not rule out."""
    for advance in (1, 4):
        loop = make_loop(partial(min, advance))
        loop.scheduler.add(make_request("a", PROMPT, length=len(PROMPT) + 6))
        ends = [(plan.starts + plan.counts).max() for plan, _ in steps(loop) if plan is not None]
        assert max(ends) <= len(PROMPT) + 5


def test_drafts_take_what_prompts_leave_of_a_step() -> None:
    """Two rows and a prompt of 40 in steps of 16: the prompt's chunks are those without drafts."""
    chunks = []
    for drafts in (0, 7):
        loop = (
            make_loop(lambda most: most, drafts=drafts)
            if drafts
            else Loop(HYBRID, Limits(200, 4, 16, 4, num_slabs=61), MODEL)
        )
        for name in "ab":
            loop.scheduler.add(make_request(name, [ord(name)] * 3, length=60))
        loop.step()
        loop.step()
        loop.scheduler.add(make_request("long", PROMPT * 4, length=60))
        plan = loop.launch()
        assert plan is not None
        chunks.append(int(plan.counts[plan.row_ids == 2][0]))
        assert plan.num_tokens <= 16
    assert chunks[0] == chunks[1] == 14


def test_drafts_preempt_no_row() -> None:
    """Where memory is short, rows run fewer: no row is preempted that is not without drafts. No draft is right here."""
    found = []
    for drafts in (0, 7):
        advance = (lambda most: 1) if drafts else None
        loop = Loop(HYBRID, Limits(80, 4, 64, 4, num_slabs=19, prefix_cache=False), MODEL, drafts, advance)
        for number in range(4):
            loop.scheduler.add(make_request(f"{number}", [number] * 5, length=34))
        for _ in steps(loop):
            pass
        found.append(loop.scheduler.preemptions)
    assert found[0] > 0, "memory was never short"
    assert found[1] <= found[0]


MANY = tuple((7, number) for number in range(8, 8 + BANS + 1))  # bad words, one more than the device forbids by itself


@pytest.mark.parametrize(("words", "drafts"), [(MANY, False), (((7, 8),), True), ((), True)])
def test_rows_whose_masks_the_host_makes_run_no_drafts(words: tuple[tuple[int, ...], ...], drafts: bool) -> None:
    """The host makes a mask for one token alone; the device knows the drafts, for penalties and few bad words too."""
    loop = make_loop(lambda most: most)
    plain = make_request("a", PROMPT, length=30)
    params = SamplingParams(presence_penalty=1.0)
    limit = make_constraint(params, 1_000, len(PROMPT), frozenset(), words)
    loop.scheduler.add(dataclasses.replace(plain, params=params, constraint=limit))
    counts = {int(plan.counts[0]) for plan, _ in steps(loop) if plan is not None}
    assert bool(counts - {1, len(PROMPT)}) is drafts

"""Laws of the scheduler under random calls, with a fake device that checks its plans (tests/support/fakes.py)."""

import math
import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jswa.architecture import Reach
from jswa.cache.capacity import peak_slots
from jswa.config import HostMemory, Limits
from jswa.errors import PromptTooLong
from jswa.plan import FROM_DEVICE, StepPlan, TokenEvent
from jswa.sched.sequence import Sequence, Status
from jswa.types import FinishReason
from tests.support.builders import LAYOUTS, make_layout, make_request, share
from tests.support.fakes import Loop
from tests.support.text.model import TextModel

SHAPES = {  # page sizes, and reaches of local layers
    "sliding": [(page, Reach(window)) for page in (1, 4) for window in (1, 3, 6, 9)],
    "chunked": [(page, Reach(chunk, chunked=True)) for page, chunk in ((1, 1), (1, 3), (1, 9), (4, 4), (4, 12))],
}
VOCAB = 13
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@dataclass
class Expected:
    """A request, the tokens that it generates alone, and those that it has generated."""

    prompt: list[int]
    tokens: list[int]
    reason: FinishReason
    steps_alone: int
    said: list[int] = field(default_factory=list)
    finished: FinishReason | None = None


class Conversation:
    """A loop with the expected tokens of its requests: checks every plan and every event."""

    def __init__(self, loop: Loop, model: TextModel) -> None:
        self.loop = loop
        self.model = model
        self.scheduler = loop.scheduler
        self.requests: dict[str, Expected] = {}
        self.spoiled = False

    def spoil(self, choose: int, *, full: bool) -> None:
        """Let a page that only the cache owns go bad: requests still get the tokens that they get alone."""
        pool = self.scheduler.cache.pool
        cached, owners = (pool.full_cached, pool.full_owners) if full else (pool.local_cached, pool.local_owners)
        pages = np.flatnonzero(cached & (owners == 1))
        if len(pages):
            self.loop.runner.spoil(int(pages[choose % len(pages)]), full=full)
            self.spoiled = True

    def check(self) -> None:
        """Assert the laws of the scheduler, and that all KV in the cache is finite, if none went bad there."""
        self.scheduler.check()
        if not self.spoiled:
            self.loop.runner.check_cached(self.scheduler.cache)

    def add(self, prompt: list[int], new: int, stop_ids: set[int], tenant: str = "") -> str | None:
        """Add a request and return its id, or None if it is rightly refused."""
        scheduler, name = self.scheduler, f"r{len(self.requests)}"
        length = min(len(prompt) + new, scheduler.limits.max_model_len)
        weight = 3.0 if tenant == "heavy" else 1.0
        request = make_request(name, prompt, length=length, stop_ids=stop_ids, tenant=tenant, weight=weight)
        if len(prompt) + 1 > scheduler.capacity:
            with pytest.raises(PromptTooLong):
                scheduler.add(request)
            return None
        scheduler.add(request)
        tokens, reason = self.model.generate(prompt, stop_ids, min(length, scheduler.capacity))
        chunks = math.ceil((len(prompt) + len(tokens)) / scheduler.limits.max_tokens)
        self.requests[name] = Expected(prompt, tokens, reason, chunks + len(tokens))
        return name

    def abort(self, name: str) -> None:
        """Abort a request: one last event if it was unfinished, else none."""
        expected = self.requests.get(name)
        last = self.scheduler.abort(name)
        if expected is None or expected.finished:
            assert last is None
        else:
            assert last is not None
            assert last._replace(drafts=None) == TokenEvent(name, None, "abort")
            expected.finished = "abort"
            assert expected.said == expected.tokens[: len(expected.said)]

    def step(self) -> StepPlan | None:
        """Run one step of the engine's loop."""
        scheduler, before = self.scheduler, self.loop.pending
        running = set(scheduler.running)
        plan = self.loop.launch()
        self.check()
        if plan is not None:
            self._check_plan(plan)
            self._check_admissions(plan, [s for s in scheduler.running if s not in running], running)
        self._check_events(self.loop.apply(before))
        self.check()
        return plan

    def drain(self) -> None:
        """Run to the end: no request starves, each finishes once, and no page stays held."""
        bound = 10 + 8 * sum(expected.steps_alone for expected in self.requests.values())
        steps = 0
        while self.scheduler.has_work():
            self.step()
            steps += 1
            assert steps <= bound, "starvation"
        assert all(expected.finished for expected in self.requests.values())
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0)
        assert stats.free_slots + stats.cached_slots == stats.total_slots
        self.hits = self.scheduler.cache.stats()
        self.scheduler.cache.flush()
        assert self.scheduler.cache.pool.free_slots == stats.total_slots, "pages are left after a flush"
        self.scheduler.check()
        assert self.loop.launch() is None
        assert self.loop.apply(None) == []

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert 1 <= plan.num_rows <= limits.max_rows
        assert plan.counts.min() >= 1
        assert plan.counts.sum() == plan.num_tokens <= limits.max_tokens
        assert len(set(plan.row_ids.tolist())) == plan.num_rows

    def _check_admissions(self, plan: StepPlan, admitted: list[Sequence], before: Container[Sequence]) -> None:
        """Check that requests are admitted by rank, and fit by the admission formula summed over all rows.

        Short prompts may pass long ones. Rows that ran `before` the plan were not passed: if one of them waits now, it
        was preempted for another tenant, perhaps after a later sequence of its own tenant was admitted.
        """
        if not admitted:
            return
        scheduler, layout = self.scheduler, self.scheduler.layout
        for waiting in scheduler.sequences.values():
            if waiting in before or waiting.status is Status.RUNNING:
                continue
            tenant = waiting.request.tenant
            later = [s for s in admitted if s.request.tenant == tenant and s.rank > waiting.rank]
            assert all(s.num_known <= scheduler.limits.long_prompt < waiting.num_known for s in later), (
                "admitted out of order"
            )
        first = plan.tokens[np.cumsum(plan.counts) - plan.counts]
        counts = np.where((first == FROM_DEVICE) | (plan.starts == FROM_DEVICE), 1, plan.counts)  # without drafts
        ran = dict(zip(plan.row_ids.tolist(), counts.tolist(), strict=True))
        prefills = [s for s in scheduler.running if s.launched - ran.get(s.row_id, 0) < s.num_known]
        *others, last = sorted(scheduler.running, key=lambda s: s in admitted)
        if scheduler.limits.prefix_cache:
            return  # rows share pages: the sum below does not apply
        claimed = sum(layout.resident_slots(max(s.launched, s.num_known + 1)) for s in others)
        need = layout.resident_slots(last.num_known + 1)
        if len(prefills) > 1:
            need += layout.step_reserve_slots(scheduler.limits.max_tokens, len(prefills))
        alone = peak_slots(layout, scheduler.limits.max_tokens, last.num_known + 1)
        assert claimed + max(need, alone) <= scheduler.cache.pool.total_slots, "admitted against the formula"

    def _check_events(self, events: list[TokenEvent]) -> None:
        if not self.scheduler.rows.speculates:
            assert len({e.request_id for e in events}) == len(events), "two events of one request in a step"
        for e in events:
            expected = self.requests[e.request_id]
            assert expected.finished is None, "an event after the end"
            if e.token is not None:
                expected.said.append(e.token)
            assert expected.said == expected.tokens[: len(expected.said)], "the request gets other tokens alone"
            if e.finish_reason is not None:
                assert (expected.said, e.finish_reason) == (expected.tokens, expected.reason)
                assert e.stop_reason == (e.token if e.finish_reason == "stop" else None)
                expected.finished = e.finish_reason


def make_conversation(
    layers: tuple[int, int],
    reach: Reach,
    limits: Limits,
    failures: int = 0,
    speculative: int = 0,
    advance: Callable[[int], int] | None = None,
) -> Conversation:
    """Return a scheduler, a fake device and a text model for numbers of (full, local) layers."""
    layout = make_layout(limits.page_size, reach, num_full=layers[0], num_local=layers[1])
    model = TextModel(VOCAB, failures)
    return Conversation(Loop(layout, limits, model, speculative, advance), model)


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic on an arena so small that rows are preempted and blocks compacted."""

    layers: tuple[int, int]  # numbers of full and local layers; set by a subclass
    shapes: list[tuple[int, Reach]]  # set by a subclass

    @initialize(
        data=st.data(),
        blocks=st.integers(4, 40),
        max_rows=st.integers(1, 6),
        max_tokens=st.integers(6, 24),
        failures=st.sampled_from([0, 0, 0, 50]),
        sharing=st.booleans(),
        interval=st.sampled_from([None, None, 5, 16]),
        host=st.sampled_from([None, None, 4, 12, 60]),
        speculative=st.sampled_from([0, 0, 1, 3, 7]),
        advance=st.sampled_from(["one", "all", "some"]),
        seed=st.integers(0, 999),
    )
    def start(
        self,
        data: st.DataObject,
        blocks: int,
        max_rows: int,
        max_tokens: int,
        failures: int,
        sharing: bool,
        interval: int | None,
        host: int | None,
        speculative: int,
        advance: str,
        seed: int,
    ) -> None:
        page_size, reach = data.draw(st.sampled_from(self.shapes))
        limits = Limits(
            60,
            max_rows,
            max_tokens,
            page_size,
            num_blocks=1 + blocks,
            prefix_cache=sharing,
            prefix_cache_interval=interval,
            host=None if host is None else HostMemory(1 + host, slots_per_step=8, tokens_per_slot=0.1),
        )
        rng = random.Random(seed)
        choices: dict[str, Callable[[int], int]] = {
            "one": lambda most: 1,
            "all": lambda most: most,
            "some": lambda most: rng.randint(1, most),
        }
        chosen = choices[advance] if speculative else None
        self.talk = make_conversation(self.layers, reach, limits, failures, speculative, chosen)
        self.names: list[str] = []

    @rule(
        prompt=PROMPTS,
        new=st.integers(1, 30),
        stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        tenant=st.sampled_from(["", "", "other", "heavy"]),
    )
    def add(self, prompt: list[int], new: int, stop_ids: set[int], tenant: str) -> None:
        name = self.talk.add(prompt, new, stop_ids, tenant)
        if name is not None:
            self.names.append(name)

    @precondition(lambda self: self.talk.requests)
    @rule(
        data=st.data(),
        cut=st.integers(0, 59),
        more=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        new=st.integers(1, 30),
    )
    def go_on(self, data: st.DataObject, cut: int, more: list[int], new: int) -> None:
        """Add a prompt that shares a part of an earlier prompt and answer, and then continues differently."""
        before = self.talk.requests[data.draw(st.sampled_from(sorted(self.talk.requests)))]
        prompt = ([*before.prompt, *before.tokens][: cut + 1] + more)[:59]
        name = self.talk.add(prompt, new, set())
        if name is not None:
            self.names.append(name)

    @rule()
    def flush(self) -> None:
        self.talk.scheduler.cache.flush()

    @rule(choose=st.integers(0, 999), full=st.booleans())
    def spoil(self, choose: int, full: bool) -> None:
        self.talk.spoil(choose, full=full)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.talk.step()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request that waits, runs, is in flight, has finished or was aborted before."""
        self.talk.abort(data.draw(st.sampled_from(self.names)))

    @rule()
    def abort_unknown(self) -> None:
        self.talk.abort("nobody")

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "talk"):
            self.talk.check()

    def teardown(self) -> None:
        if hasattr(self, "talk"):
            self.talk.drain()
            event(f"wrong drafts: {min(self.talk.loop.runner.wrong, 3)}")
            event(f"preempted: {min(self.talk.scheduler.preemptions, 3)}")
            event(f"moved: {min(self.talk.loop.runner.moves, 3)}")
            event(f"copied: {min(self.talk.loop.runner.copies, 3)}")
            event(f"cached: {self.talk.hits.cached_tokens > 0}, replayed: {self.talk.hits.replayed_tokens > 0}")
            event(f"run again without the cache: {'not finite' in self.talk.hits.missed}")
            host = self.talk.scheduler.cache.host
            if host is not None:
                event(f"to the host: {min(host.tier.copied, 3)}, back: {min(host.recalled, 3)}")
                event(f"tokens from the host: {min(self.talk.hits.host_tokens, 3)}")
            event(f"evicted: {min(self.talk.hits.evictions, 3)}")


def test_a_row_is_not_taken_for_a_tenant_that_finds_no_room() -> None:
    """A drawn example: a tenant's second row takes another's; the first is not taken for a third tenant in vain."""
    limits = Limits(60, 4, 12, 1, num_blocks=17, prefix_cache=False, prefix_cache_interval=None)
    talk = make_conversation((0, 1), Reach(size=3, chunked=True), limits)
    for prompt, new, tenant in (
        (1, 1, ""),
        (1, 3, "other"),
        (1, 1, "heavy"),
        (1, 2, ""),
        (12, 1, ""),
        (12, 1, "heavy"),
    ):
        talk.add([0] * prompt, new, set(), tenant)
    talk.drain()
    assert talk.scheduler.preemptions == 1


def test_a_page_moves_when_no_plan_follows() -> None:
    """Compaction may run before a plan that is empty: its moves then wait, and the page is where it was."""
    limits = Limits(60, 4, 6, 1, num_blocks=26, prefix_cache=True, prefix_cache_interval=16)
    talk = make_conversation(LAYOUTS["hybrid, m = 6"], Reach(6), limits, failures=50)
    talk.add([9], 17, {0, 1})
    talk.add([0], 1, {0})
    talk.add([0], 8, set())
    talk.add([0], 13, set())
    talk.abort("r1")
    talk.drain()


@pytest.mark.parametrize(
    ("kind", "shapes"), [(k, "sliding") for k in LAYOUTS] + [(k, "chunked") for k in LAYOUTS if k != "full only"]
)
def test_every_request_finishes_once_with_the_tokens_that_it_gets_alone(kind: str, shapes: str) -> None:
    """Under batching, chunking, preemption, compaction and aborts; no page stays held."""
    machine = type("Machine", (SchedulerMachine,), {"layers": LAYOUTS[kind], "shapes": SHAPES[shapes]})
    run_state_machine_as_test(machine, settings=share(8))


@share(8)
@given(
    layers=st.sampled_from(list(LAYOUTS.values())),
    shape=st.sampled_from(SHAPES["sliding"] + SHAPES["chunked"]),
    blocks=st.integers(6, 30),
    older=st.lists(st.tuples(PROMPTS, st.integers(1, 30)), max_size=4),
    prompt=st.integers(1, 59),
    younger=st.lists(st.tuples(PROMPTS, st.integers(1, 30)), min_size=1, max_size=4),
)
def test_a_request_that_fits_alone_finishes_beside_any_others(
    layers: tuple[int, int],
    shape: tuple[int, Reach],
    blocks: int,
    older: list[tuple[list[int], int]],
    prompt: int,
    younger: list[tuple[list[int], int]],
) -> None:
    """The progress law: a prompt of up to capacity - 1 tokens finishes while new requests never stop arriving."""
    page_size, reach = shape
    talk = make_conversation(layers, reach, Limits(60, 4, 10, page_size, num_blocks=1 + blocks))
    capacity = talk.scheduler.capacity
    if capacity < 2:
        return
    for tokens, new in older:
        talk.add(tokens[: capacity - 1], new, set())
    name = talk.add([1] * min(prompt, capacity - 1), 60, set())
    assert name is not None
    bound = 10 + 4 * sum(expected.steps_alone for expected in talk.requests.values()) + 4 * 60
    while talk.requests[name].finished is None:
        bound -= 1
        assert bound > 0, "starvation"
        tokens, new = younger[bound % len(younger)]
        if talk.scheduler.stats().waiting < 4:
            talk.add(tokens[: capacity - 1], new, set())
        talk.step()
    talk.drain()

"""Requests to a scheduler on a device without jax, with the tokens that each of them gets alone."""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import numpy as np
import pytest

from jswa.architecture import Reach
from jswa.cache.capacity import peak_slots
from jswa.config import Limits
from jswa.errors import PromptTooLong
from jswa.plan import FROM_DEVICE, StepPlan, TokenEvent
from jswa.sched.sequence import Sequence, Status
from jswa.types import FinishReason
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

VOCAB = 13


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
        self.check_every = 1  # steps; the tokens of all steps are checked
        self._steps = 0

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
        self._steps += 1
        checks = self._steps % self.check_every == 0
        plan = self.loop.launch()
        if checks:
            self.check()
        if plan is not None:
            self._check_plan(plan)
            self._check_admissions(plan, [s for s in scheduler.running if s not in running], running)
        self._check_events(self.loop.apply(before))
        if checks:
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
            tenant = waiting.request.options.tenant
            later = [s for s in admitted if s.request.options.tenant == tenant and s.rank > waiting.rank]
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

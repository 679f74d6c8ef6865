"""The loop that runs a scheduler on a device without jax."""

import random
from collections.abc import Callable

import numpy as np
from jaxtyping import Shaped

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.host_pages import HostPages
from jswa.plan import StepEvents, StepPlan, TokenEvent
from jswa.sched.scheduler import Scheduler
from jswa.sched.sequence import Sequence as Row
from tests.support.fakes import FakePending, FakeRunner
from tests.support.text.model import TextModel


class Loop:
    """The loop of `Engine.step` without an engine: one step in flight. `advance`: see `FakeRunner`."""

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        model: TextModel,
        speculative: int = 0,
        advance: Callable[[int], int] | None = None,
    ) -> None:
        self.scheduler = Scheduler(layout, limits, speculative)
        self.runner = FakeRunner(layout, limits, model, self._row_of, advance)
        self.pending: FakePending | None = None
        self.before_launch: Callable[[StepPlan], None] | None = None
        self.host_pages = HostPages(self.runner, self.host_contents())
        self.landing = random.Random(0)  # when pages arrive on the host

    def host_contents(self) -> list[Shaped[np.ndarray, "slots p"]]:
        """Return memory for the second prefix cache, without slots if there is none."""
        host, memory = self.runner.limits.host, self.runner.memory
        slots = 0 if host is None else host.slabs * self.runner.layout.pages_per_slab
        return [np.zeros((slots, lane.shape[1]), lane.dtype) for lane in memory]

    def _row_of(self, slot: int) -> Row:
        return next(s for s in self.scheduler.running if s.row_id == slot)

    def step(self) -> list[TokenEvent]:
        """Launch the next step, then take in the tokens of the one before."""
        before = self.pending
        self.launch()
        return self.apply(before)

    def launch(self) -> StepPlan | None:
        """Do the first half of a step: plan and launch."""
        host = self.scheduler.cache.host
        if host is not None and self.landing.random() < 0.7:
            landed = self.host_pages.land()
            host.land(landed.batches, lost=landed.lost)
        plan = self.scheduler.plan()
        copies = plan or self.scheduler.plan_copies()
        disk = None if host is None else host.disk
        if copies is None and self.pending is None and disk is not None and disk.wanted is not None:
            disk.settle(1.0)
            return None
        assert copies is not None or self.pending is not None or not self.scheduler.has_work(), "stuck"
        if copies is not None and self.before_launch is not None:
            self.before_launch(copies)
        if copies is not None and copies.transfers is not None:
            self.host_pages.before_launch(copies.transfers)
        self.pending = self.runner.launch(plan) if plan is not None else None
        if copies is not None and plan is None:
            self.host_pages.move(copies.moves)
        if copies is not None and copies.transfers is not None:
            self.host_pages.after_launch(copies.transfers)
        self.scheduler.tidy()
        return plan

    def apply(self, before: FakePending | None) -> list[TokenEvent]:
        """Do the second half: apply the step that was pending before `launch`, and finish the one that is now."""
        events = StepEvents()
        if before is not None:
            events = self.scheduler.apply(before.plan, before.tokens(), counts=before.counts)
        self.finish()
        found = list(events)
        assert len(found) == len(events)
        return found

    def finish(self) -> None:
        """Set the late masks of the step in flight, if there are any."""
        if self.pending is not None and self.pending.plan.late:
            masks, _ = self.scheduler.late_masks(self.pending.plan)
            self.pending.finish(masks)

"""Runs the steps of an engine: plans, launches and applies them, with one step in flight."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jswa.env import Switches
from jswa.errors import EngineError
from jswa.exec.host_pages import HostPages
from jswa.plan import RowMask, StepEvents, StepPlan, StepResults, TokenEvent
from jswa.plan.trace import write_step
from jswa.sched.scheduler import Scheduler
from jswa.sched.steplog import StepLog

_LOOK = 0.005  # seconds after which the engine looks for new requests while it waits for the disk


@runtime_checkable
class PendingStep(Protocol):
    """A launched step whose tokens can be waited for."""

    @property
    def plan(self) -> StepPlan:
        """The plan that was launched."""
        ...

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Launch the second half of a step whose plan has late masks."""
        ...

    def tokens(self) -> Int[np.ndarray, " R"] | Int[np.ndarray, "R n"]:
        """The tokens of the plan's rows: one of each, or several, their number, and that of the drafts."""
        ...

    def results(self) -> StepResults | None:
        """What the step gives besides tokens; None of a plain step."""
        ...


@runtime_checkable
class DraftedStep(PendingStep, Protocol):
    """A launched step whose plan has drafts and late masks."""

    def drafts(self) -> Int[np.ndarray, "R K"]:
        """The drafts of the plan's rows, negative behind the last of a row; waits for these, not for the step."""
        ...


@runtime_checkable
class StepRunner(Protocol):
    """The device side as the engine sees it; tests use a fake."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step, or the first half of one whose plan has late masks, and return at once."""
        ...


class Stepping:
    """Drives a scheduler and a runner.

    Args:
        trace: gets each plan and its tokens.
        host_pages: the contents of the second prefix cache, if the scheduler has one.

    Attributes:
        runner: the device side; another one may take its place between two steps.
        before_launch: called with each plan before its launch while the prefix cache is saved or loaded.
        log: counters and times.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        switches: Switches,
        trace: IO[str] | None = None,
        host_pages: HostPages | None = None,
    ) -> None:
        self.runner = runner
        self._host_pages = host_pages
        self._scheduler = scheduler
        self._switches = switches
        self.trace = trace
        self.log = StepLog()
        self.before_launch: Callable[[StepPlan], None] | None = None
        self._pending: PendingStep | None = None
        self._late_masks: tuple[RowMask, ...] = ()  # those of the pending step

    def step(self) -> StepEvents:
        """Launch the next step, then apply the tokens of the previous step while the device works.

        If a mask of the next step depends on those tokens, only the first half of the step is launched before. Raises
        EngineError if requests wait that nothing will ever let run.
        """
        begin = time.perf_counter()
        if self._host_pages is not None:
            self._land(self._host_pages)
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        if plan is not None and self.before_launch is not None:
            self.before_launch(plan)
        launched = self._launch(plan) if plan is not None else None
        copied = plan is None and self.copy_host_pages()
        self.log.launched(begin, planned, time.perf_counter())
        self._scheduler.tidy()
        before, self._pending = self._pending, launched
        idle = launched is None and before is None and not copied and self._scheduler.has_work()
        if idle and not self._wait_for_disk():
            raise EngineError(f"requests wait, nothing runs, and nothing can be planned: {self._scheduler.stats()}")
        if self._switches.overlap:
            events = self._apply(before)
            forced = self._finish(launched)
        else:
            self._pending, forced = None, self._finish(launched)
            events = self._apply(launched)
        if forced:
            events = replace(events, others=(*events.others, *forced))
        if self._switches.check:
            self._scheduler.check()
        return events

    def copy_host_pages(self) -> bool:
        """Carry out the copies between device and host memory that wait, without a step; return whether any did."""
        plan, host_pages = self._scheduler.plan_copies(), self._host_pages
        if plan is None or plan.transfers is None or host_pages is None:
            return False
        if self.before_launch is not None:
            self.before_launch(plan)
        host_pages.before_launch(plan.transfers)
        host_pages.move(plan.moves)
        host_pages.after_launch(plan.transfers)
        return True

    def _land(self, host_pages: HostPages) -> None:
        """Take in the pages that have arrived in host memory."""
        host = self._scheduler.cache.host
        if host is not None:
            landed = host_pages.land()
            host.land(landed.batches, lost=landed.lost)

    def _wait_for_disk(self) -> bool:
        """Wait a moment for a read from the disk, as no step can run; return whether a read is under way."""
        host = self._scheduler.cache.host
        if host is None or host.disk is None or host.disk.wanted is None:
            return False
        host.disk.settle(_LOOK)
        return True

    def _launch(self, plan: StepPlan) -> PendingStep:
        """Launch a plan: before it pages go to host memory, behind it pages come back."""
        if plan.transfers is None or self._host_pages is None:
            return self.runner.launch(plan)
        self._host_pages.before_launch(plan.transfers)
        launched = self.runner.launch(plan)
        self._host_pages.after_launch(plan.transfers)
        return launched

    def _finish(self, launched: PendingStep | None) -> tuple[TokenEvent, ...]:
        """Launch the second half of a step in two halves: the tokens on which its masks depend are known by now.

        Returns the ends of texts that their grammars complete, and the tokens that grammars force.
        """
        if launched is None or not launched.plan.late:
            return ()
        begin = time.perf_counter()
        drafts = None
        if launched.plan.drafts:
            assert isinstance(launched, DraftedStep)
            drafts = launched.drafts()
        self._late_masks, events = self._scheduler.late_masks(launched.plan, drafts)
        filled = time.perf_counter()
        launched.finish(self._late_masks)
        self.log.finished(len(events), begin, filled, time.perf_counter())
        return events

    def drain(self) -> StepEvents:
        """Apply the step in flight, so that none is, and return its events. Raises EngineError if that fails."""
        step, self._pending = self._pending, None
        try:
            return self._apply(step)
        except Exception as error:  # its rows would wait for its tokens for ever
            raise EngineError("the step in flight cannot be applied") from error

    def _apply(self, step: PendingStep | None) -> StepEvents:
        if step is None:
            return StepEvents()
        begin = time.perf_counter()
        tokens = step.tokens()
        there = time.perf_counter()
        if self._scheduler.rows.speculates:
            self._scheduler.drafting.landed(step.plan, there)
        if self.trace is not None:
            whole = replace(step.plan, masks=(*step.plan.masks, *self._late_masks), late=())
            write_step(self.trace, whole, tokens)
        self._late_masks = ()
        counts = drafted = None
        if tokens.ndim > 1:
            tokens, counts, drafted = tokens[:, :-2], tokens[:, -2], tokens[:, -1]
        events = self._scheduler.apply(step.plan, tokens, step.results(), counts, drafted)
        self.log.applied(step.plan, len(events), begin, there, time.perf_counter())
        self.log.log_when_due(self._scheduler)
        return events

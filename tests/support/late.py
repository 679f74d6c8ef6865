"""A device that runs its steps late, and whose free pages are poison: the real `Runner` as a GPU would show it.

On a CPU a step is done before the host plans the next one, so an engine that reads a page too late, or frees it too
early, may go unnoticed. Here the host plans ahead of the device by as much as the engine's protocol allows
(docs/design/scheduler.md): a step runs when its tokens are asked for, or earlier by chance. All work stays in one queue
in the order in which the host sent it, as the order of steps is a data dependence.

Pages are poisoned in that queue: the pages that have no owner between two steps, and the pages that a plan hands out
before the plan's own moves and steps. So a step sees poison wherever it reads a page that its row does not own, does
not own any more, or has not written yet.
"""

import contextlib
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

from jswa.engine import Engine
from jswa.exec import runner as runner_module
from jswa.exec.compile import steps as steps_module
from jswa.exec.compile.program import compile_step
from jswa.exec.launches import Pending
from jswa.exec.programs.state import DeviceState
from jswa.exec.runner import Runner
from jswa.plan import NOT_FINITE, RowMask, StepPlan, StepResults
from tests.support.oracles import quick_compiles


class LateStep:
    """A step in the queue of a late device."""

    def __init__(
        self, plan: StepPlan, run_through: Callable[["LateStep"], None], queue: deque[Callable[[], object]]
    ) -> None:
        self.plan = plan
        self.done: Pending | None = None
        self.whole = not plan.late  # whether the step, or its second half too, has run
        self._run_through = run_through
        self._queue = queue

    def drafts(self) -> Int[np.ndarray, "R K"]:
        """Return the drafts of the plan's rows in a step with late masks, once its first half has run."""
        while self.done is None:
            self._queue.popleft()()
        return self.done.drafts()

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Queue the second half of the step."""
        self._queue.append(partial(self._finish, masks))

    def _finish(self, masks: tuple[RowMask, ...]) -> None:
        assert self.done is not None
        self.done.finish(masks)
        self.whole = True

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Return the tokens of the plan's rows. Raises AssertionError if one is not finite: the step read poison."""
        self._run_through(self)
        assert self.done is not None
        tokens = self.done.tokens()
        stale = (tokens.reshape(len(tokens), -1) == NOT_FINITE).any(axis=1)
        assert not stale.any(), f"the rows {self.plan.row_ids[stale]} read a stale page"
        return tokens

    def results(self) -> StepResults | None:
        """Return what the step gives besides tokens."""
        self._run_through(self)
        assert self.done is not None
        return self.done.results()


class LateRunner:
    """Runs the plans of one engine on a real runner, late. `seed` chooses how late.

    Attributes:
        edit: changes each plan before it runs, to put a fault in.
        most_waiting: the most steps that waited in the queue at once.
    """

    def __init__(self, runner: Runner, seed: int) -> None:
        self.edit: Callable[[StepPlan], StepPlan] = lambda plan: plan
        self.most_waiting = 0
        self._runner = runner
        self._choose = random.Random(seed)
        self._queue: deque[Callable[[], object]] = deque()
        self._poison = _poison_program(runner)
        self._waiting = 0

    def launch(self, plan: StepPlan) -> LateStep:
        """Queue a step."""
        m = self._runner.layout.pages_per_slab
        fresh = np.zeros((self._runner.limits.num_slabs, m), bool)
        fresh.reshape(-1)[plan.full_pages[:, 2]] = True
        fresh[plan.local_pages[:, 2]] = True
        fresh.reshape(-1)[plan.moves[:, 0]] = False  # compaction moves pages that have just been handed out, too
        step = LateStep(plan, self._run_through, self._queue)
        self._queue += [partial(self._write_poison, fresh), partial(self._run, step)]
        self._waiting += 1
        self.most_waiting = max(self.most_waiting, self._waiting)
        self._catch_up()
        return step

    def poison_free_pages(self, engine: Engine) -> None:
        """Queue poison for all pages without an owner, behind the steps that were launched before they were freed."""
        pool, moves = engine.scheduler.cache.pool, engine.scheduler.cache.moves
        free = np.ones((self._runner.limits.num_slabs, pool.pages_per_slab), bool)
        free[0] = False
        free[pool.num_slabs :] = False
        free.reshape(-1)[np.flatnonzero(pool.full_owners)] = False
        free[np.flatnonzero(pool.local_owners)] = False
        free.reshape(-1)[[move.source for move in moves]] = False  # which the next plan will copy
        self._queue.append(partial(self._write_poison, free))
        self._catch_up()

    def _catch_up(self) -> None:
        """Run the oldest work in the queue, or not."""
        for _ in range(self._choose.choice((0, 0, 1, len(self._queue)))):
            self._run_oldest()

    def _run_through(self, step: LateStep) -> None:
        while step.done is None or not step.whole:
            self._run_oldest()

    def _run_oldest(self) -> None:
        if self._queue:
            self._queue.popleft()()

    def _run(self, step: LateStep) -> None:
        self._waiting -= 1
        step.done = self._runner.launch(self.edit(step.plan))

    def _write_poison(self, pages: Bool[np.ndarray, "slabs m"]) -> None:
        state = self._runner.state
        self._runner.state = DeviceState(**{**state, "lanes": self._poison(state["lanes"], jnp.asarray(pages))})


def _poison_program(runner: Runner) -> Any:
    """Return the program (lanes, pages) -> lanes that fills pages with NaN."""

    def poison(lanes: list[Float[Array, "1 B e"]], pages: Bool[Array, "B m"]) -> list[Float[Array, "1 B e"]]:
        found = []
        for lane in lanes:
            view = lane.reshape(pages.size, -1)
            found.append(jnp.where(pages.reshape(-1, 1), jnp.full_like(view, jnp.nan), view).reshape(lane.shape))
        return found

    return jax.jit(poison, donate_argnums=0)


@contextlib.contextmanager
def programs_compiled_when_run() -> Iterator[None]:
    """Let runners that are made inside compile each step program in the calling thread when it is first run.

    A test that runs one family of programs need not wait for the others. Without it a runner compiles all programs of
    the first family at start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "ThreadPoolExecutor", _Inline)
        patch.setattr(steps_module, "compile_step", partial(_CompiledWhenRun, compile_step))
        yield


class _Inline:
    """An executor without threads."""

    def __init__(self, workers: int | None = None) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(function(*arguments))
        return found

    def shutdown(self, *, cancel_futures: bool = False) -> None: ...


class _CompiledWhenRun:
    """A step program that is compiled when it is first run."""

    def __init__(self, compile_step: Any, *arguments: Any) -> None:
        self._compile = functools.cache(lambda: compile_step(*arguments))

    def __call__(self, *arguments: Any) -> Any:
        with quick_compiles(), jax.no_tracing(False), jax.transfer_guard("allow"):
            program = self._compile()
        return program(*arguments)

"""How an engine changes its weights, pauses and sleeps: always between two steps, with no step in flight.

The weights have a version, 0 at the start, and the prefix cache has a tree for each version.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from jswa.cache.manager import CacheManager
from jswa.errors import RequestError
from jswa.plan import Request, StepEvents, TokenEvent
from jswa.sched.scheduler import Scheduler

InFlight = Literal["continue", "finish", "abort"]
WhilePaused = Literal["keep", "abort", "wait"]
Params = dict[str, Any]  # `model.transformer.Params`; this module imports no jax


@runtime_checkable
class ChangingRunner(Protocol):
    """A runner whose parameters can be replaced, and whose memory can be freed."""

    def replace_params(self, params: Params) -> None:
        """Run all later steps with these parameters; keep those that are not among them."""
        ...

    def free_arena(self) -> None:
        """Free the device state; no step may run until `allocate_arena`."""
        ...

    def allocate_arena(self) -> None:
        """Allocate a device state that has run nothing."""
        ...

    def free_params(self) -> None:
        """Free the parameters of the base model; no step may run until `replace_params`."""
        ...


class Turnover:
    """The version of an engine's weights, and whether it runs.

    Args:
        nodes: the hosts that share the model.
        drain: applies the step in flight, if there is one, and returns its events.
        copying: held by others while they copy KV to the host or back.

    Attributes:
        version: of the weights that the next step runs with.
        paused: whether no step runs until `resume`.
        pausing: whether it pauses once the requests that it has have ended.
        level: 0 awake, 1 asleep without the arena, 2 without the weights too.
    """

    def __init__(
        self,
        runner: object,
        scheduler: Scheduler,
        drain: Callable[[], StepEvents],
        copying: threading.Lock,
        *,
        nodes: int = 1,
    ) -> None:
        self.version = 0
        self.paused = False
        self.pausing = False
        self.level = 0
        self._nodes = nodes
        self._runner = runner if nodes == 1 and isinstance(runner, ChangingRunner) else None
        self._scheduler = scheduler
        self._drain = drain
        self._copying = copying
        self._next: Params | None = None  # the weights that wait for the requests of the old ones
        self._held: list[Request] = []  # the requests that wait until those before them have ended
        self._events: list[TokenEvent] = []  # what the next step reports
        self._lost = False  # the weights were freed

    @property
    def holds(self) -> bool:
        """Whether a request that is added now waits until those before it have ended."""
        return self._next is not None or self.pausing

    def add(self, request: Request) -> None:
        """Queue a request; it waits while those before it run to their end."""
        if self.holds:
            self._scheduler.require_fit(request)
            self._held.append(request)
            return
        self._scheduler.add(request)
        if request.version != self.version:
            self._events.append(TokenEvent(request.request_id, None, version=self.version))

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request; None if it has ended already."""
        for request in self._held:
            if request.request_id == request_id:
                self._held.remove(request)
                return TokenEvent(request_id, None, "abort")
        return self._scheduler.abort(request_id)

    def unfinished(self) -> list[Request]:
        """Return the requests that have not ended, with those that wait for new weights."""
        return [*(sequence.request for sequence in self._scheduler.sequences.values()), *self._held]

    def has_work(self) -> bool:
        """Return whether a step has anything to run or to report."""
        return bool(self._events) or (not self.paused and (self._scheduler.has_work() or self.holds))

    def reports(self) -> StepEvents | None:
        """Return the events that this step only reports; None: it runs."""
        if self._events:
            events, self._events = self._events, []
            return StepEvents(others=tuple(events))
        return StepEvents() if self.paused else None

    def settle(self) -> None:
        """Change to the weights that wait, or pause, once no request runs any more.

        Called before each step while requests that are added have to wait (`holds`).
        """
        if self.paused or self._scheduler.has_work():
            return
        if self._next is not None:
            if not self._copying.acquire(blocking=False):
                return  # the next step looks again
            try:
                params, self._next = self._next, None
                self._change(params)
            finally:
                self._copying.release()
        if self.pausing:
            self.paused, self.pausing = True, False
        self._release()

    def update(self, params: Params, in_flight: InFlight) -> int:
        """Change the weights, and return their version; with "finish" the change may come later.

        Unfinished requests go on with the new weights and the KV that they have ("continue"), end ("abort"), or run to
        their end with the old weights, while new requests wait ("finish"). Raises RequestError.
        """
        _require("in_flight", in_flight, get_args(InFlight))
        self.require_changing()
        if self._next is not None:
            raise RequestError("in_flight", in_flight, "another update waits for the requests of the old weights")
        if in_flight == "finish" and self._scheduler.has_work():
            if self.paused:
                raise RequestError("in_flight", in_flight, "must be continue or abort while the engine is paused")
            self._next = params
            return self.version + 1
        with self._alone():
            self._rest(abort=in_flight == "abort")
            self._change(params)
        return self.version

    def pause(self, requests: WhilePaused) -> None:
        """Run no step until `resume`; unfinished requests keep their pages, or end. Raises RequestError.

        With "wait" they run to their end first; those that come meanwhile wait for `resume`.
        """
        _require("requests", requests, get_args(WhilePaused))
        if requests == "wait" and not self.paused and (self._scheduler.has_work() or self.holds):
            self.pausing = True
            return
        self._rest(abort=requests == "abort")
        self.paused, self.pausing = True, False
        self._release()

    def resume(self) -> None:
        """Run steps again. Raises RequestError while the engine sleeps."""
        if self.level:
            raise RequestError("sleep", self.level, "call wake, which resumes too")
        self.paused = self.pausing = False
        self._release()

    def sleep(self, level: int) -> None:
        """Free the arena (1), and the weights too (2). Unfinished requests wait, and compute their KV again later.

        Raises RequestError for another level, and while an update of the weights waits.
        """
        _require("level", level, (1, 2))
        runner = self.require_changing()
        if self._next is not None:
            raise RequestError("sleep", level, "an update of the weights waits for the requests of the old ones")
        with self._alone():
            self.pause("keep")
            if not self.level:
                for sequence in self._scheduler.running:
                    self._scheduler.preempt(sequence.request.request_id)
                self._scheduler.drafting.keep_texts()
                self._cache.flush()
                self._cache.drain_moves()
                runner.free_arena()
            if level == 2 and not self._lost:
                runner.free_params()
                self._lost = True
            self.level = max(level, self.level)

    def wake(self) -> None:
        """Allocate the arena and resume. Raises RequestError if the weights were freed and not given again."""
        if self._lost:
            raise RequestError("sleep", self.level, "the weights were freed: call update_weights before wake")
        if self.level:
            self.require_changing().allocate_arena()
        self.level = 0
        self.resume()

    def _release(self) -> None:
        """Queue the requests that have waited, unless they still have to."""
        if not self.holds:
            held, self._held = self._held, []
            for request in held:
                self.add(request)

    def _rest(self, *, abort: bool) -> None:
        """Leave no step in flight; keep its events, and those of aborted requests, for the next step."""
        self._events += self._drain()
        if abort:
            ends = [self.abort(request.request_id) for request in self.unfinished()]
            self._events += [end for end in ends if end is not None]

    def _change(self, params: Params) -> None:
        self.require_changing().replace_params(params)
        self._lost = False
        self.version += 1
        self._scheduler.drafting.keep_texts()
        self._cache.next_version(self.version)
        self._events += [TokenEvent(name, None, version=self.version) for name in self._scheduler.sequences]

    @property
    def _cache(self) -> CacheManager:
        return self._scheduler.cache

    def require_changing(self) -> ChangingRunner:
        """Return the runner. Raises RequestError if it cannot change."""
        if self._runner is None:
            limit = "must be 1 to change the weights, or to sleep: other hosts follow neither; start them anew"
            raise RequestError("nnodes", self._nodes, limit)
        return self._runner

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no copy of KV begin. Raises RequestError if one runs."""
        if not self._copying.acquire(blocking=False):
            raise RequestError("cache", "is being saved or loaded", "wait for the end of that, then try again")
        try:
            yield
        finally:
            self._copying.release()


def _require(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise RequestError(field, value, f"must be one of {', '.join(map(str, allowed))}")

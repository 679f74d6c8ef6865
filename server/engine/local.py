"""The engine in this process, with all that its requests share: queue, budgets, stored conversations, counts."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from jswa.cache.prefix.stats import CacheStats, for_clients
from jswa.cache.view import CacheView
from jswa.errors import EngineDead
from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.engine_thread import EngineThread, State
from jswa.frontend.operations import Verb, operate_on
from jswa.images.picture import Picture
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

from ..core.counts import Counts, Load, added
from ..core.fairness import Admission, Budget, Helpers, Key, weights_of
from ..core.metrics import Snapshot, exposition
from ..core.texts import Order
from ..http.errors import engine_errors
from ..options import ServeConfig
from .forms import Forms, Made
from .intake import Ids, Intake, Put
from .responses import ResponseStore
from .side import FrontEnd, Info, Standing

_EYES = 2  # requests whose images the model reads at the same time: with several keys, of two
_REPORT_SECONDS = 2.0  # for which a scrape waits for the reports of all processes


class LocalEngine:
    """The engine of this process; see `EngineSide`. Owns the engine's thread, from `start` to `close`.

    Attributes:
        front_ends: those whose counts /metrics shows.
    """

    def __init__(self, build: Callable[[], EngineLike], tokenizer: Tokenizer | None, config: ServeConfig) -> None:
        """Build the engine.

        Args:
            build: returns the engine, and a new engine at each later call.
        """
        # Nothing but the thread holds a reference to the engine, so that the thread can drop a failed one.
        rebuild = build if config.restart_engine else None
        self.thread = EngineThread(build(), rebuild=rebuild, step_timeout=config.step_timeout)
        self.limits = self.thread.engine.limits
        self.images = self.thread.engine.images
        self._kernels = self.thread.engine.kernels.table()
        weights = weights_of(config.api_key, config.api_key_weight)
        self.admission = Admission(config.max_queued_requests, config.max_queued_tokens, weights)
        self.intake = Intake(self.thread, self.admission, tokenizer, Helpers(_EYES, weights))
        self.bodies = Budget(config.max_body_memory, weights)
        self.answers = Budget(config.max_answer_memory, weights)
        self.responses = ResponseStore()
        self.forms = Forms(weights)
        self.front_ends: list[FrontEnd] = []
        self.ended = Load()  # refusals of front ends that have ended
        self._names = config.metrics_prefix, config.served_model_name[0]
        self._counts = Counts()
        self._adapters: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """Whether the engine accepts requests."""
        return self.thread.state

    @property
    def failure(self) -> EngineDead | None:
        """The error for every request while the engine is dead or restarting; None while it is up."""
        return self.thread.failure

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the loaded LoRA adapters; while the engine is down, of those that it had."""
        if self.thread.failure is None:
            self._adapters = tuple(self.thread.engine.adapters)
        return self._adapters

    @property
    def has_forms(self) -> bool:
        """Whether the model has a tokenizer."""
        with engine_errors():
            return self.thread.engine.grammars is not None

    async def compile(self, question: bytes, delimiters: Collection[int], key: Key) -> Made:
        """Try a form and compile it."""
        with engine_errors():
            grammars = self.thread.engine.grammars
        assert grammars is not None
        return await self.forms.compile(grammars, question, delimiters, key)

    async def submit(
        self,
        names: Sequence[str],
        prompts: Sequence[Ids],
        params: SamplingParams,
        order: Order,
        put: Put,
        tokens: Mapping[str, Callable[[int], object]] | None = None,
        pictures: Sequence[Picture] = (),
    ) -> float:
        """Queue a request's texts; return the seconds that they waited for programs."""
        return await self.intake.submit(names, prompts, params, order, put, tokens, pictures)

    def abort(self, names: Iterable[str], *, deliver_last: bool = False) -> None:
        """End texts before the next step."""
        self.intake.abort(names, deliver_last=deliver_last)

    async def admit(self, key: Key, tokens: int) -> None:
        """Count long work as a waiting text."""
        self.admission.admit(key, 1, tokens)

    def leave(self, key: Key, tokens: int) -> None:
        """Count work no longer that `admit` has counted."""
        self.admission.release(key, 1, tokens)

    async def store(self, key: Key, name: str, messages: bytes) -> None:
        """Store a conversation."""
        self.responses.put(key, name, messages)

    async def stored(self, key: Key, name: str) -> bytes:
        """Return a conversation that was stored."""
        return self.responses.get(key, name)

    async def operate(self, verb: Verb, *arguments: Any) -> int | None:
        """Do what an operator asks."""
        with engine_errors():
            return await operate_on(self.thread, verb, *arguments)

    async def standing(self) -> Standing:
        """Return which weights the engine has, and whether it runs."""
        with engine_errors():
            now = self.thread.engine.turnover
        return Standing(now.version, now.paused, now.level)

    async def abort_named(self, name: str | None) -> int:
        """Abort the requests of a name, or all, of all front ends; return their number."""
        return sum(await asyncio.gather(*(one.abort_named(name) for one in self.front_ends)))

    async def view(self, edges: int) -> CacheView:
        """Return what the KV cache holds, with so many edges of the prefix tree."""
        with engine_errors():
            return await self.thread.call(lambda engine: engine.view(edges))

    async def metrics(self) -> bytes:
        """Return the metrics of all front ends and of the engine."""
        load = await self.load()
        return exposition(*self._names, self._counts, self._snapshot(load))

    async def info(self) -> Info:
        """Return the engine's part of /server_info."""
        load = await self.load()
        now, thread = self._snapshot(load), self.thread
        rows = {**dataclasses.asdict(now.figures.rows), "requests": load.requests}
        rest: dict[str, Any] = {
            "steps": dataclasses.asdict(now.figures.steps),
            "state": now.state,
            "restarts": now.restarts,
            "kernels": self._kernels,
            "prefix_cache": dataclasses.asdict(now.figures.cache),
        }
        return Info({**rows, "tasks": load.tasks, "texts": thread.active}, rest)

    async def load(self) -> Load:
        """Add up what all front ends have counted, and return their load together."""
        waits = [asyncio.ensure_future(one.report()) for one in self.front_ends]
        if waits:
            await asyncio.wait(waits, timeout=_REPORT_SECONDS)
        reports = [wait.result() for wait in waits if wait.done() and wait.exception() is None]
        for report in reports:
            self._counts.add(report.counts)
        own = [self.ended, self.forms.load(), self.intake.load()]
        return reduce(added, [*own, *(report.load for report in reports)])

    def add(self, counts: Counts) -> None:
        """Add to the counts of /metrics."""
        self._counts.add(counts)

    async def start(self, front_end: FrontEnd) -> None:
        """Start the engine's thread, on the running event loop, for the routes of this process."""
        self.front_ends.append(front_end)
        await self.begin()

    async def begin(self) -> None:
        """Start the engine's thread, on the running event loop, and the processes that try forms."""
        self.thread.start()
        grammars = self.thread.engine.grammars
        if grammars is not None and grammars.is_warm:
            await self.forms.start(grammars)

    async def close(self) -> None:
        """Stop the processes that try forms, the threads that read images, and the engine's thread."""
        await self.forms.close()
        self.intake.eyes.close()
        await self.thread.close()

    def _snapshot(self, load: Load) -> Snapshot:
        """Return the state at this moment, with the engine's figures as last read between two steps."""
        figures, thread, queue = self.thread.figures, self.thread, self.admission
        return Snapshot(
            figures._replace(cache=_for_all(figures.cache)), self.limits, queue.texts, queue.refused, thread.restarts,
            load, thread.state, thread.step_seconds, self.adapters,
        )  # fmt: skip


def _for_all(cache: CacheStats) -> CacheStats:
    """Return cache figures in which misses for another salt count as cold: they would reveal other tenants' prompts."""
    return dataclasses.replace(cache, missed=for_clients(cache.missed))

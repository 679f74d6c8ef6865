"""Replay of a trace through a prefix cache on the host: jswa's own, an infinite one, and full KV on every layer.

Implement `Cache` to add the cache of another engine to the table of `benchmarks.cache.radix`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Int

from benchmarks.cache.traces import TraceRequest
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.plan import Request, StepEvents, StepPlan
from jswa.sched.scheduler import Scheduler
from jswa.types import PrefixHit, SamplingParams


class Cache(Protocol):
    """A prefix cache and whatever schedules requests on it."""

    def submit(self, request: TraceRequest, name: str) -> None:
        """Queue a request, which will generate `request.output`."""
        ...

    def step(self) -> dict[str, PrefixHit]:
        """Do some work. Return what was cached for each request that has ended, by name."""
        ...


@dataclass
class Result:
    """Sums over a replay, in tokens.

    Attributes:
        revived: the part of `cached` of requests that had to replay a missing window.
        rounds: [cached, prompt] tokens by turn.
    """

    prompt: int = 0
    cached: int = 0
    revived: int = 0
    rounds: dict[int, list[int]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Σ cached tokens / Σ prompt tokens."""
        return self.cached / max(self.prompt, 1)

    def count(self, request: TraceRequest, hit: PrefixHit) -> None:
        """Add a request that has ended."""
        self.prompt += hit.prompt_tokens
        self.cached += hit.cached_tokens
        self.revived += hit.cached_tokens if hit.revived else 0
        totals = self.rounds.setdefault(request.turn, [0, 0])
        totals[0] += hit.cached_tokens
        totals[1] += hit.prompt_tokens


def replay(
    cache: Cache, requests: list[TraceRequest], *, running: int, barrier: bool = False, strict: bool = False
) -> Result:
    """Run a trace in its order, `running` requests at a time. A turn waits for the previous turn of its session.

    With a `barrier` a turn waits for the previous turn of all sessions. `strict`: no request overtakes another.
    """
    result, waiting = Result(), list(enumerate(requests))
    active: dict[str, TraceRequest] = {}
    ended: set[tuple[str, int]] = set()
    while waiting or active:
        position = 0
        while len(active) < running and position < len(waiting):
            number, request = waiting[position]
            held = request.turn and (request.session, request.turn - 1) not in ended
            if barrier and any(r.turn < request.turn for r in active.values()):
                held = True
            if held:
                if strict or position > 2 * running:
                    break
                position += 1
                continue
            del waiting[position]
            active[str(number)] = request
            cache.submit(request, str(number))
        for name, hit in cache.step().items():
            request = active.pop(name)
            ended.add((request.session, request.turn))
            result.count(request, hit)
    return result


class Engine:
    """jswa's scheduler, cache and pool, on a device that generates the outputs of the trace."""

    def __init__(self, layout: KVLayout, limits: Limits) -> None:
        self.scheduler = Scheduler(layout, limits)
        self.steps = self._submitted = 0
        self._requests: dict[str, TraceRequest] = {}
        self._hits: dict[str, PrefixHit] = {}
        self._pending: tuple[StepPlan, Int[np.ndarray, " R"]] | None = None

    def submit(self, request: TraceRequest, name: str) -> None:
        """Queue a request."""
        self._submitted += 1
        self._requests[name] = request
        length = len(request.prompt) + len(request.output)
        params = SamplingParams(temperature=0.0)
        self.scheduler.add(Request(name, request.prompt, params, frozenset(), (0, 0), length))

    def begun(self) -> int:
        """Return the number of requests that have left the queue."""
        return self._submitted - self.scheduler.stats().waiting

    def step(self) -> dict[str, PrefixHit]:
        """Plan a step and apply the one before it, as the engine overlaps them."""
        before, self._pending = self._pending, None
        plan = self.scheduler.plan()
        copies = plan or self.scheduler.plan_copies()
        host = self.scheduler.cache.host
        if host is not None and copies is not None and copies.transfers is not None:
            host.land(int(len(copies.transfers.downloads) > 0), lost=False)
        self.steps += 1
        if plan is not None:
            self._pending = plan, self._tokens(plan)
        self.scheduler.tidy()
        events = self.scheduler.apply(*before) if before is not None else StepEvents()
        ended = {}
        for event in events:
            if event.prefix is not None:
                self._hits[event.request_id] = event.prefix
            if event.finish_reason is not None:
                ended[event.request_id] = self._hits.pop(event.request_id)
                del self._requests[event.request_id]
        return ended

    def _tokens(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        tokens = np.zeros(plan.num_rows, np.int32)
        by_row_id = {s.row_id: s for s in self.scheduler.running}
        ends = (plan.starts + plan.counts).tolist()
        for row, (row_id, end) in enumerate(zip(plan.row_ids.tolist(), ends, strict=True)):
            request = self._requests[by_row_id[row_id].request.request_id]
            index = end - len(request.prompt)
            if index >= 0:
                tokens[row] = request.output[index]
        return tokens


class Infinite:
    """The ideal: a cache that keeps every token and finds any prefix, to the token."""

    def __init__(self) -> None:
        self._texts: dict[bytes, list[Int[np.ndarray, " T"]]] = {}
        self._active: list[tuple[str, TraceRequest]] = []

    def submit(self, request: TraceRequest, name: str) -> None:
        """Queue a request."""
        self._active.append((name, request))

    def step(self) -> dict[str, PrefixHit]:
        """Run the oldest request to its end."""
        name, request = self._active.pop(0)
        known = self._texts.setdefault(request.prompt[:1].tobytes(), [])
        most = max((_common(text, request.prompt[:-1]) for text in known), default=0)
        known.append(np.concatenate([request.prompt, request.output])[:-1])
        return {name: PrefixHit(len(request.prompt), most, most, 0, "cold")}


class FullEverywhere:
    """An engine that ignores windows: KV of every token on every layer, whole pages by the hash of their prefix, LRU.

    `pages` is the number of pages that the pool holds, `page_size` the number of tokens in a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._room, self._page = pages, page_size
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._active: list[tuple[str, TraceRequest]] = []

    def submit(self, request: TraceRequest, name: str) -> None:
        """Queue a request."""
        self._active.append((name, request))

    def step(self) -> dict[str, PrefixHit]:
        """Run the oldest request to its end."""
        name, request = self._active.pop(0)
        prompt_pages = self._keys(request.prompt[: len(request.prompt) - 1])
        found = 0
        while found < len(prompt_pages) and prompt_pages[found] in self._pages:
            found += 1
        text = np.concatenate([request.prompt, request.output])[:-1]
        # A page is useless without those before it: the end of a text is evicted before its beginning.
        for key in reversed(self._keys(text)):
            self._pages.pop(key, None)
            self._pages[key] = None
        while len(self._pages) > self._room:
            self._pages.popitem(last=False)
        return {name: PrefixHit(len(request.prompt), found * self._page, found * self._page, 0, "cold")}

    def _keys(self, tokens: Int[np.ndarray, " T"]) -> list[int]:
        keys, key = [], 0
        for start in range(0, len(tokens) - self._page + 1, self._page):
            key = hash((key, tokens[start : start + self._page].tobytes()))
            keys.append(key)
        return keys


def _common(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " m"]) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length

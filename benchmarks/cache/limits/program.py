"""An upper bound of the hit rate of any cache with some memory, whatever it knows.

A request can use the text that it shares with earlier ones only as far as the cache has kept it since a row last had
it. That takes a slot for each page of full KV; and all of a text but its last J·(W - 1) tokens can be used without a
window, the rest only with one, which takes its local pages. The bound is the best plan that

* keeps any fraction of a text, and of a window, and gets that fraction of the tokens;
* fits the memory beside the running rows, which hold no more than the text that they have and one window each;
* lets rows begin as soon as the order of the trace and the number of rows allow, and finish a prompt in one step.

The first is a relaxation: no cache gets more for less. The second leaves out what every engine needs besides: the pages
of a prefill chunk, the ends of pages. The third fixes the steps in which texts are idle. It is a linear program, solved
by HiGHS.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

from benchmarks.cache.traces import TraceRequest
from jswa.cache.layout import KVLayout
from jswa.cache.prefix.radix import common_prefix
from jswa.cache.prefix.resume import replay_start


class Use(NamedTuple):
    """What a request shares with earlier ones: `tokens` from position `start` on, which `by` was the last to have."""

    start: int
    tokens: int
    by: int


def uses(requests: list[TraceRequest]) -> list[list[Use]]:
    """Return what each request shares with earlier ones of its session, by the request that had it last."""
    texts: dict[str, list[tuple[int, Int[np.ndarray, " T"]]]] = {}
    found: list[list[Use]] = []
    for number, request in enumerate(requests):
        earlier, parts, at = texts.setdefault(request.session, []), list[Use](), 0
        for index, text in reversed(earlier):
            common = common_prefix(text, request.prompt[:-1])
            if common > at:
                parts.append(Use(at, common - at, index))
                at = common
        found.append(parts)
        earlier.append((number, np.concatenate([request.prompt, request.output])[:-1]))
    return found


def schedule(requests: list[TraceRequest], running: int) -> Int[np.ndarray, "n 2"]:
    """Return the steps in which each request begins and ends if none ever waits for memory."""
    spans = np.zeros((len(requests), 2), np.int64)
    ended: dict[tuple[str, int], int] = {}
    busy: list[int] = []  # ends of the rows
    now = 0
    for number, request in enumerate(requests):
        now = max(now, ended.get((request.session, request.turn - 1), 0))
        busy = sorted(end for end in busy if end > now)
        if len(busy) >= running:
            now = busy[-running]
            busy = [end for end in busy if end > now]
        spans[number] = now, now + len(request.output)
        ended[request.session, request.turn] = int(spans[number, 1])
        busy.append(int(spans[number, 1]))
    return spans


class Program:
    """A linear program that grows by variables within [0, 1] and rows `coefficients ≤ limit`."""

    def __init__(self) -> None:
        self.worth: list[float] = []
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []

    def variable(self, worth: float = 0.0) -> int:
        """Add a variable that adds `worth` to what is maximized; return its column."""
        self.worth.append(worth)
        return len(self.worth) - 1

    def at_most(self, limit: float, *terms: tuple[int, float]) -> None:
        """Add a row."""
        self.entries += [(len(self.limits), column, factor) for column, factor in terms]
        self.limits.append(limit)


def hit_bound(requests: list[TraceRequest], layout: KVLayout, slots: int, running: int) -> float:
    """Return the bound of Σ cached tokens / Σ prompt tokens in a pool of `slots` slots."""
    spans, program = schedule(requests, running), Program()
    kept: list[tuple[int, int, int, float]] = []  # from step, to step, variable, slots
    sure = 0
    for number, parts in enumerate(uses(requests)):
        begin = int(spans[number, 0])
        if not parts:
            continue
        sure += _add_request(program, layout, parts, [int(spans[part.by, 1]) for part in parts], begin, kept)
    _limit_memory(program, kept, _held(requests, layout, spans), slots)
    rows, columns, factors = zip(*program.entries, strict=True)
    found = linprog(
        -np.array(program.worth),
        A_ub=coo_matrix((factors, (rows, columns)), shape=(len(program.limits), len(program.worth))).tocsr(),
        b_ub=program.limits,
        bounds=[(0, 1)] * len(program.worth),
        method="highs",
    )
    assert found.status == 0, found.message
    return float(sure - found.fun) / sum(len(request.prompt) for request in requests)


def _add_request(
    program: Program,
    layout: KVLayout,
    parts: list[Use],
    ends: list[int],
    begin: int,
    kept: list[tuple[int, int, int, float]],
) -> int:
    """Add what a request may use, and what keeping that takes; return the tokens that it has anyway."""
    page, m = layout.page_size, layout.pages_per_slab
    total = parts[-1].start + parts[-1].tokens
    if all(end >= begin for end in ends):
        return total
    replay = total - replay_start(layout, total)
    window = program.variable()
    kept.append((ends[0], begin, window, m * _least_window(layout, total)))
    before = None
    for part, end in zip(parts, ends, strict=True):
        text = program.variable(part.tokens * (total - replay) / total)
        both = program.variable(part.tokens * replay / total)
        kept.append((end, begin, text, part.tokens / page))
        program.at_most(0, (both, 1), (text, -1))
        program.at_most(0, (both, 1), (window, -1))
        if before is not None:
            program.at_most(0, (text, 1), (before, -1))
        before = text
    return 0


def _least_window(layout: KVLayout, end: int) -> int:
    """Return the fewest local pages of a window that ends at `end` or less than a page before."""
    if layout.reach is None:
        return 0
    found = [
        -(-at // layout.page_size) - layout.reach.first_visible(at) // layout.page_size
        for at in (end, end // layout.page_size * layout.page_size)
        if at
    ]
    return min(found, default=0)


def _held(
    requests: list[TraceRequest], layout: KVLayout, spans: Int[np.ndarray, "n 2"]
) -> tuple[Int[np.ndarray, " e"], Float[np.ndarray, " e"]]:
    """Return the steps in which rows begin or end, and the slots that the rows hold from each to the next."""
    steps = np.unique(spans)
    held = np.zeros(len(steps))
    for (begin, end), request in zip(spans.tolist(), requests, strict=True):
        first, last = np.searchsorted(steps, (begin, end))
        for at in range(first, last):
            held[at] += layout.resident_slots(len(request.prompt) + int(steps[at]) - begin)
    return steps, held


def _limit_memory(
    program: Program,
    kept: list[tuple[int, int, int, float]],
    held: tuple[Int[np.ndarray, " e"], Float[np.ndarray, " e"]],
    slots: int,
) -> None:
    """Let what is kept fit beside the rows at every step: used(next) = used + what begins - what ends."""
    steps, rows = held
    changes: list[list[tuple[int, float]]] = [[] for _ in steps]
    for begin, end, variable, size in kept:
        if begin < end:
            changes[np.searchsorted(steps, begin)].append((variable, size))
            changes[np.searchsorted(steps, end)].append((variable, -size))
    # `used` is a fraction of the pool.
    before = None
    for at, terms in enumerate(changes):
        used = program.variable()
        scaled = [(variable, size / slots) for variable, size in terms]
        program.at_most(0, *scaled, *([(before, 1.0)] if before is not None else []), (used, -1.0))
        program.at_most(max(0.0, 1 - rows[at] / slots), (used, 1.0))
        before = used

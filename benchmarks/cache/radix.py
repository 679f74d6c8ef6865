"""Hit rates of the prefix cache on traces, and the time of its operations. Runs on the host alone, without a model.

    python -m benchmarks.cache.radix [--workload NAME ...] [--model NAME ...] [--json FILE]
    python -m benchmarks.cache.radix --trace FILE --tokens 131072 --running 16
    python -m benchmarks.cache.radix --operations

Hit rate = Σ cached tokens / Σ prompt tokens; a token counts as cached if no layer computed it. Baselines of the same
run: an infinite cache that finds any prefix (the ideal); full-length KV on every layer in the same bytes, in jswa's own
cache (what windows are worth by themselves) and in pages of 16 tokens with LRU eviction. The pool has the bytes of so
many tokens kept on all layers of the model (`Workload.tokens`, or --tokens for a trace).

Sessions "in turn" are the worst case of LRU: each comes back when all others have spoken. "In any order" the next one
to speak is drawn among all that are not at their end.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from benchmarks.cache import traces
from benchmarks.cache.replay import Engine, FullEverywhere, Infinite, Result, replay
from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from tools.cases.geometry import GEOMETRIES, model_of, slabs_of_tokens

PAGE = 64
LRU_PAGE = 16


@dataclass(frozen=True)
class Workload:
    """A trace and the pool that it runs on.

    Attributes:
        tokens: size of the pool, in tokens kept on all layers.
        running: rows at a time.
        barrier: whether a turn waits for the previous turn of all sessions.
    """

    lines: Callable[[], list[traces.Line]]
    tokens: int = 131_072
    running: int = 16
    barrier: bool = False


def _sessions(count: int) -> Workload:
    return Workload(lambda: traces.multi_turn(count, 8, 384, 128))


def _any_order(count: int) -> Workload:
    return Workload(lambda: traces.any_next(traces.multi_turn(count, 8, 384, 128)))


WORKLOADS = {
    "multi-turn 300/3000": Workload(lambda: traces.multi_turn(10, 10, 300, 3000), 4 * 131_072, 10, barrier=True),
    "sessions, 25 % of the pool": _sessions(8),
    "sessions, 50 %": _sessions(16),
    "sessions, 100 %": _sessions(32),
    "sessions, 200 %": _sessions(64),
    "sessions, 300 %": _sessions(96),
    "sessions, 400 %": _sessions(128),
    "sessions in any order, 100 %": _any_order(32),
    "sessions in any order, 200 %": _any_order(64),
    "sessions in any order, 300 %": _any_order(96),
    "sessions in any order, 400 %": _any_order(128),
    "last user turn edited": Workload(lambda: traces.edited(16, 4, 512, 128)),
    "the same, sessions at 200 %": Workload(lambda: traces.in_turn(traces.edited(64, 8, 384, 128))),
    "branch at an earlier message": Workload(lambda: traces.branched(16, 8, 384, 128)),
    "branches, sessions at 100 %": Workload(lambda: traces.in_turn(traces.branched(32, 8, 384, 128, branches=2))),
    "64 questions, one system prompt": Workload(lambda: traces.shared_prompt(64, 25_000, 500, 100)),
    "30 agents to 110k": Workload(lambda: traces.agents(30, 110_000, 200), 2_000_000),
}


def engine(model: str, tokens: int, running: int, longest: int, *, hybrid: bool = True) -> Engine:
    """Return jswa with a pool of the bytes of `tokens` tokens kept on all layers. Not `hybrid`: it ignores windows."""
    layout = KVLayout.of(model_of(model, hybrid=hybrid), PAGE)
    slabs = 1 + slabs_of_tokens(model, layout, tokens)
    return Engine(layout, Limits(longest, running, 8192, PAGE, num_slabs=slabs))


def compare(name: str, work: Workload, models: list[str]) -> list[dict[str, Any]]:
    """Replay one workload for each model; print and return the rows."""
    requests = traces.expand(work.lines())
    longest = max(len(r.prompt) + len(r.output) for r in requests)
    ideal = replay(Infinite(), requests, running=1)
    lru = FullEverywhere(work.tokens // LRU_PAGE, LRU_PAGE)
    full = replay(lru, requests, running=work.running, barrier=work.barrier)
    rows: list[dict[str, Any]] = []
    for model in models:
        cache = engine(model, work.tokens, work.running, longest)
        found = replay(cache, requests, running=work.running, barrier=work.barrier)
        blind = _without_windows(model, work, requests, longest)
        stats = cache.scheduler.cache.stats()
        rows.append(
            {
                "workload": name,
                "model": model,
                "pool_tokens": work.tokens,
                "pool_gib": cache.scheduler.limits.num_slabs * cache.scheduler.layout.slab_bytes(2) / 2**30,
                "ideal": ideal.hit_rate,
                "full_lru": full.hit_rate,
                "full_jswa": blind,
                "jswa": found.hit_rate,
                "last_round": _last(found),
                "revived_share_of_hits": found.revived / max(found.cached, 1),
                "missed": {reason: count / found.prompt for reason, count in stats.missed.items()},
                "preemptions": cache.scheduler.preemptions,
            }
        )
        r = rows[-1]
        print(
            f"{name:32} {model:14} {r['jswa']:7.2%} {r['ideal']:7.2%} {r['full_lru']:7.2%} {_percent(blind):>7} "
            f"{r['last_round']:7.2%} {r['revived_share_of_hits']:7.1%}",
            flush=True,
        )
    return rows


def _without_windows(model: str, work: Workload, requests: list[traces.TraceRequest], longest: int) -> float | None:
    """Return the hit rate of jswa's cache with full KV everywhere; None if the model's layers differ in shape."""
    full, local = GEOMETRIES[model][3:]
    if full != local:
        return None
    cache = engine(model, work.tokens, work.running, longest, hybrid=False)
    return replay(cache, requests, running=work.running, barrier=work.barrier).hit_rate


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _last(result: Result) -> float:
    cached, prompt = result.rounds[max(result.rounds)]
    return cached / max(prompt, 1)


def operations(model: str, *, prompt: int = 4096, shared: int = 2048, requests: int = 10_000) -> dict[str, float]:
    """Return median µs per request of each operation, in the steady state with about 1M tokens cached.

    Memory is made while a step would run (`evict_ahead`), so "evict" is all that an admission does not wait for. `grow`
    and `open` are what an admission does besides `match`, `insert` is what follows the prompt's last chunk.
    """
    layout = KVLayout.of(model_of(model), PAGE)
    windows = 10**6 // prompt * 2 * layout.window_pages(prompt)
    manager = CacheManager(layout, 10**6 // PAGE // layout.pages_per_slab + windows + 200, prompt // PAGE + 2, 1)
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 100_000, shared, dtype=np.int32) for _ in range(20)]
    times: dict[str, list[float]] = {}
    in_plan = 0
    for number in range(requests):
        own = rng.integers(0, 100_000, prompt - shared, dtype=np.int32)
        tokens = np.concatenate([prefixes[number % 20], own])
        evicted = manager.stats().evictions
        clock = _Clock()
        match = manager.match("", tokens, prompt - 1)
        clock.lap("match")
        lease = manager.open_at(match, length=prompt)
        clock.lap("open")
        assert lease is not None
        assert manager.grow(lease, prompt)
        manager.slide(lease, prompt)
        clock.lap("grow")
        in_plan += number >= requests // 2 and manager.prefix.retention.evictions > evicted
        clock.start()
        manager.evict_ahead()
        clock.lap("evict")
        manager.publish(lease, tokens, prompt)
        clock.lap("insert")
        manager.close(lease, tokens, prompt=prompt)
        clock.lap("close")
        manager.drain_moves()
        if number >= requests // 2:
            clock.add_to(times)
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "all": statistics.median(map(sum, zip(*times.values(), strict=True))),
        "evicted_in_plan": in_plan / (requests - requests // 2),
        "cached_tokens": manager.stats().full_pages * PAGE,
    }


def _run(manager: CacheManager, text: Int[np.ndarray, " T"]) -> None:
    """Run a text to its end."""
    lease = manager.open_at(manager.match("", text, len(text) - 1), length=len(text))
    assert lease is not None
    assert manager.grow(lease, len(text))
    manager.publish(lease, text, len(text))
    manager.close(lease, text)


class _Clock:
    """Seconds of one request, or of a call for several, by operation."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._at
        self._at = time.perf_counter()

    def add_to(self, times: dict[str, list[float]], rows: int = 1) -> None:
        """Append µs per request to lists by operation."""
        for name, value in self.laps.items():
            times.setdefault(name, []).append(1e6 * value / rows)


def burst(model: str, *, hit: bool, prompt: int = 32, rows: int = 256, bursts: int = 41) -> dict[str, float]:
    """Return median µs per row of a burst of short prompts with a page each, and of the steps of all rows together.

    `hit`: three quarters of each prompt are cached, and end inside a page. `page` and `slide` are one call for all rows
    at the end of a page, per row.
    """
    layout = KVLayout.of(model_of(model), PAGE)
    pages = layout.window_pages(2**20) + 3
    # A few bursts fill the pool: afterwards each takes the memory of texts that are evicted before it.
    manager = CacheManager(layout, rows * (2 * pages + 4), 2_048, rows)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {}
    start = np.arange(prompt * 3 // 4, dtype=np.int32)
    for _ in range(bursts):
        texts = rng.integers(0, 100_000, (rows, prompt), dtype=np.int32)
        if hit:
            texts[:, : len(start)] = start
        assert manager.make_room(rows * pages * (1 + layout.pages_per_slab))
        if hit:
            _run(manager, start)
        leases: list[Lease] = []
        for text in texts:
            clock = _Clock()
            match = manager.match("", text, prompt - 1)
            clock.lap("match")
            lease = manager.open_at(match, length=prompt)
            clock.lap("open")
            assert lease is not None
            assert manager.grow(lease, prompt)
            clock.lap("grow")
            leases.append(lease)
            clock.add_to(times)
        for lease, text in zip(leases, texts, strict=True):
            clock = _Clock()
            manager.publish(lease, text, prompt)
            clock.lap("publish")
            clock.add_to(times)
        clock, table_rows = _Clock(), np.array([lease.row for lease in leases])
        while leases[0].covered < leases[0].next_slide + PAGE:
            clock.start()
            assert manager.grow_by_page(table_rows)
            clock.lap("page")
        clock.start()
        manager.slide_all(table_rows, manager.table.covered[table_rows])
        clock.lap("slide")
        clock.add_to(times, rows)
        for lease, text in zip(leases, texts, strict=True):
            clock = _Clock()
            manager.close(lease, text)
            clock.lap("close")
            clock.add_to(times)
        manager.drain_moves()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a line per workload and model, or per model with --operations; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    parser.add_argument("--model", nargs="+", choices=list(GEOMETRIES), default=list(GEOMETRIES), help="default: all")
    parser.add_argument(
        "--trace", type=Path, help="trace file to run instead of the workloads (benchmarks/cache/traces.py)"
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="with --trace: pool, in tokens on all layers")
    parser.add_argument("--running", type=int, default=16, help="with --trace: rows at a time")
    parser.add_argument("--operations", action="store_true", help="measure µs per operation, not hit rates")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    if args.operations:
        for model in args.model:
            rows = {"4,096 tokens, 1M cached": operations(model)}
            rows |= {f"32 tokens, {name}": burst(model, hit=name == "hit") for name in ("cold", "hit")}
            for name, row in rows.items():
                results.append({"model": model, "prompt": name, **row})
                shown = " ".join(f"{key} {value:.1f}" for key, value in row.items() if key != "cached_tokens")
                print(f"{model:14} {name:24} {shown}   (µs per request)")
    else:
        work = {name: WORKLOADS[name] for name in args.workload}
        if args.trace:
            work = {args.trace.name: Workload(lambda: list(traces.read(args.trace)), args.tokens, args.running)}
        columns = ("jswa", "ideal", "LRU", "no win.", "last", "revived")
        print(f"{'workload':32} {'model':14} " + " ".join(f"{column:>7}" for column in columns))
        for name, one in work.items():
            results += compare(name, one, args.model)
    if args.json:
        result_file.write(args.json, {"rows": results})


if __name__ == "__main__":
    main()

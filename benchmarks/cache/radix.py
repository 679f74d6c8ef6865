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

from benchmarks import result_file
from benchmarks.cache import traces
from benchmarks.cache.replay import Engine, FullEverywhere, Infinite, Result, replay
from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from tools.cases.geometry import GEOMETRIES, blocks_of_tokens, model_of

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
    blocks = 1 + blocks_of_tokens(model, layout, tokens)
    return Engine(layout, Limits(longest, running, 8192, PAGE, num_blocks=blocks))


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
                "pool_gib": cache.scheduler.limits.num_blocks * cache.scheduler.layout.block_bytes(2) / 2**30,
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
    """Return median µs per request of each operation, in the steady state with about 1M tokens cached."""
    layout = KVLayout.of(model_of(model), PAGE)
    windows = 10**6 // prompt * 2 * layout.window_pages(prompt)
    manager = CacheManager(layout, 10**6 // PAGE // layout.pages_per_block + windows + 200, prompt // PAGE + 2)
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 100_000, shared, dtype=np.int32) for _ in range(20)]
    times: dict[str, list[float]] = {"match": [], "insert": [], "evict": [], "all": []}
    make_room, spent = manager.prefix.retention.make_room, 0.0

    def timed(slots: int) -> None:
        nonlocal spent
        start = time.perf_counter()
        make_room(slots)
        spent += time.perf_counter() - start

    manager.prefix.retention.make_room = timed  # type: ignore[method-assign]
    for number in range(requests):
        own = rng.integers(0, 100_000, prompt - shared, dtype=np.int32)
        tokens, spent = np.concatenate([prefixes[number % 20], own]), 0.0
        a = time.perf_counter()
        match = manager.match("", tokens, prompt - 1)
        b = time.perf_counter()
        lease = manager.open_at(match, length=prompt)
        assert lease is not None
        assert manager.grow(lease, prompt)
        manager.slide(lease, prompt)
        c = time.perf_counter()
        manager.publish(lease, tokens, prompt)
        d = time.perf_counter()
        manager.close(lease, tokens, turn=(prompt,))
        manager.drain_moves()
        e = time.perf_counter()
        if number >= requests // 2:
            for name, value in (("match", b - a), ("insert", d - c), ("evict", spent), ("all", e - a)):
                times[name].append(1e6 * value)
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "p90": sorted(times["all"])[-len(times["all"]) // 10],
        "cached_tokens": manager.stats().full_pages * PAGE,
    }


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
        print(
            "model              match  insert   evict     all (p90)   µs per request of 4,096 tokens, 1M tokens cached"
        )
        for model in args.model:
            r = operations(model)
            results.append({"model": model, **r})
            print(f"{model:16} {r['match']:7.0f} {r['insert']:7.0f} {r['evict']:7.0f} {r['all']:7.0f} ({r['p90']:.0f})")
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

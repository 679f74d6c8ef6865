"""Multi-turn conversations: hit rate of the prefix cache, latencies, throughput, and pages held.

    python -m benchmarks.speed.multiturn [--model tiny | FOLDER | --geometry MiMo-V2-Flash] [--clients 10] [--rounds 10]
        [--request 300] [--output 3000] [--parallel 10] [--rate 16] [--no-barrier] [--json FILE] [--plot FILE]

The prompt of each round is the conversation so far and `--request` new tokens. At most `--parallel` requests run at a
time. Clients that are ready send in random order, `--rate` requests per second (Poisson arrivals; 0: at once). With the
barrier round k + 1 begins when all clients have ended round k. With `--geometry` only the host part runs, with the KV
geometry of that model and a device that answers at once: hit rates and pages are those of the model, times are those of
the host. The baseline is a run with --no-cache.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import RowMask, StepPlan, StepResults
from jswa.types import PrefixHit, SamplingParams
from tools.cases.geometry import GEOMETRIES, model_of, slabs_of_tokens

SAMPLE_EVERY = 20  # steps between two samples of the pages


@dataclass(frozen=True, eq=False)
class AnsweredStep:
    """A finished step with arbitrary tokens."""

    plan: StepPlan

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Do nothing: no token depends on a mask."""

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Return tokens that depend on row id and position only."""
        ends = self.plan.starts + self.plan.counts
        out: Int[np.ndarray, " R"] = (ends * 7919 + self.plan.row_ids * 104_729) % 50_000 + 10
        return out

    def results(self) -> StepResults | None:
        """Return None: all steps are plain."""
        return None


class NoDevice:
    """A `StepRunner` that computes nothing."""

    def launch(self, plan: StepPlan) -> AnsweredStep:
        """Return the finished step."""
        return AnsweredStep(plan)


@dataclass
class Client:
    """A client and its conversation."""

    number: int
    history: list[int]
    rounds: int = 0


@dataclass
class InFlight:
    """A request in flight; times in seconds."""

    client: Client
    prompt: list[int]
    sent: float
    first: float | None = None
    output: list[int] = field(default_factory=list)
    prefix: PrefixHit | None = None


@dataclass(frozen=True)
class Settings:
    """The shape of the load; see the options of the command."""

    clients: int
    rounds: int
    request: int
    output: int
    parallel: int
    rate: float
    barrier: bool
    seed: int = 1


def run(engine: Engine, settings: Settings, watch: Callable[[Engine], None] | None = None) -> dict[str, Any]:
    """Run the load; return hit rates, times and pages. `watch` is called after each step."""
    choose, vocab = random.Random(settings.seed), engine.model.vocab_size
    clients = [Client(n, []) for n in range(settings.clients)]
    active: dict[str, InFlight] = {}
    done: list[tuple[int, InFlight, float]] = []
    pages: list[dict[str, int | float]] = []
    params = SamplingParams(temperature=0.0, max_tokens=settings.output, ignore_eos=True)
    start = next_send = time.monotonic()
    steps = 0
    while active or any(client.rounds < settings.rounds for client in clients):
        now = time.monotonic()
        ready = _ready(clients, active, settings)
        while ready and len(active) < settings.parallel and now >= next_send:
            client = ready.pop(choose.randrange(len(ready)))
            prompt = client.history + [choose.randrange(10, vocab) for _ in range(settings.request)]
            name = f"{client.number}.{client.rounds}"
            engine.add(engine.request(name, np.array(prompt, np.int32), params))
            active[name] = InFlight(client, prompt, now)
            next_send = now + (choose.expovariate(settings.rate) if settings.rate else 0.0)
        for event in engine.step() if engine.has_work() else []:
            asked = active[event.request_id]
            asked.first = asked.first or time.monotonic()
            asked.prefix = event.prefix or asked.prefix
            asked.output += [] if event.token is None else [event.token]
            if event.finish_reason is not None:
                done.append((asked.client.rounds, active.pop(event.request_id), time.monotonic()))
                asked.client.history = asked.prompt + asked.output
                asked.client.rounds += 1
        steps += 1
        if watch is not None:
            watch(engine)
        if steps % SAMPLE_EVERY == 0:
            pages.append(_pages(engine, time.monotonic() - start))
    return _summary(done, settings, time.monotonic() - start, pages, engine)


def _ready(clients: list[Client], active: dict[str, InFlight], settings: Settings) -> list[Client]:
    busy = {asked.client.number for asked in active.values()}
    ready = [c for c in clients if c.number not in busy and c.rounds < settings.rounds]
    if settings.barrier:
        first = min((c.rounds for c in clients), default=0)
        ready = [c for c in ready if c.rounds == first]
    return ready


def _pages(engine: Engine, seconds: float) -> dict[str, int | float]:
    stats, cached = engine.stats(), engine.cache_stats()
    return {
        "seconds": seconds,
        "full_of_rows": stats.full_pages,
        "local_of_rows": stats.local_pages,
        "full_cached": cached.full_pages,
        "local_cached": cached.local_pages,
    }


def _summary(
    done: list[tuple[int, InFlight, float]],
    settings: Settings,
    seconds: float,
    pages: list[dict[str, int | float]],
    engine: Engine,
) -> dict[str, Any]:
    rounds = []
    for number in range(settings.rounds):
        hits = [asked.prefix for turn, asked, _ in done if turn == number and asked.prefix is not None]
        rounds.append(sum(h.cached_tokens for h in hits) / max(sum(h.prompt_tokens for h in hits), 1))
    first = [1e3 * (asked.first - asked.sent) for _, asked, _ in done if asked.first is not None]
    whole = [end - asked.sent for _, asked, end in done]
    stats = engine.cache_stats()
    return {
        "settings": asdict(settings),
        "hit_rate": stats.hit_rate,
        "hit_rate_by_round": rounds,
        "revived_tokens": stats.revived_tokens,
        "missed": stats.missed,
        "ttft_ms": _percentiles(first),
        "latency_s": _percentiles(whole),
        "output_tokens_per_s": sum(len(asked.output) for _, asked, _ in done) / seconds,
        "prompt_tokens_per_s": stats.prompt_tokens / seconds,
        "seconds": seconds,
        "preemptions": engine.stats().preemptions,
        "pages": pages[:: max(1, len(pages) // 200)],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **at}


def geometry_engine(name: str, settings: Settings, tokens: int) -> Engine:
    """Return an engine without a device, in a model's KV geometry, with the bytes of `tokens` tokens on all layers."""
    model = model_of(name)
    layout = KVLayout.of(model, 64)
    longest = settings.rounds * (settings.request + settings.output)
    limits = Limits(longest, settings.parallel, 8192, 64, num_slabs=1 + slabs_of_tokens(name, layout, tokens))
    return Engine(model, limits, layout, NoDevice())


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot hit rate by round, and pages over time. Needs matplotlib (`pip install matplotlib`)."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    rates = result["hit_rate_by_round"]
    left.plot(range(1, len(rates) + 1), [100 * rate for rate in rates], marker="o")
    left.set(xlabel="round", ylabel="cached share of prompt tokens, %", ylim=(0, 101))
    for name in ("full_of_rows", "local_of_rows", "full_cached", "local_cached"):
        right.plot([p["seconds"] for p in result["pages"]], [p[name] for p in result["pages"]], label=name)
    right.set(xlabel="seconds", ylabel="pages")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a summary; write JSON and a plot if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder of a checkpoint, or tiny")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), help="run the host part only")
    parser.add_argument(
        "--pool-tokens", type=int, default=2**20, help="with --geometry: size of the pool, in tokens on all layers"
    )
    parser.add_argument("--clients", type=int, default=10, help="number of conversations")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each conversation")
    parser.add_argument("--request", type=int, default=300, help="new prompt tokens per turn")
    parser.add_argument("--output", type=int, default=3000, help="generated tokens per turn")
    parser.add_argument("--parallel", type=int, default=10, help="requests at a time")
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second; 0: at once")
    parser.add_argument("--no-barrier", action="store_true", help="clients do not wait for each other")
    parser.add_argument("--no-cache", action="store_true", help="turn the prefix cache off (the baseline)")
    parser.add_argument("--json", type=Path, help="result file to write")
    parser.add_argument("--plot", type=Path, help="picture to write (needs matplotlib)")
    a = parser.parse_args()
    settings = Settings(a.clients, a.rounds, a.request, a.output, a.parallel, a.rate, not a.no_barrier)
    if a.geometry:
        result = run(geometry_engine(a.geometry, settings, a.pool_tokens), settings)
    else:
        with LLM(a.model, max_num_seqs=a.parallel, prefix_cache=not a.no_cache) as llm:
            llm.generate([[10, 11, 12]], max_tokens=2, use_tqdm=False)
            llm.flush_cache()
            result = run(llm.engine, settings)
    result = {"model": a.geometry or a.model, **result}
    rounds = " ".join(f"{100 * rate:.1f}" for rate in result["hit_rate_by_round"])
    ttft, latency = result["ttft_ms"], result["latency_s"]
    print(f"hit rate {result['hit_rate']:.2%}; by round {rounds} %")
    print(f"TTFT ms: mean {ttft['mean']:.1f}, p50 {ttft['p50']:.1f}, p90 {ttft['p90']:.1f}, p99 {ttft['p99']:.1f}")
    print(
        f"latency s: mean {latency['mean']:.2f}, p90 {latency['p90']:.2f}; {result['output_tokens_per_s']:.0f} tokens/s"
    )
    if result["pages"]:
        most = {name: max(p[name] for p in result["pages"]) for name in result["pages"][0] if name != "seconds"}
        print("peak pages: " + ", ".join(f"{name} {count}" for name, count in most.items()))
    if a.json:
        result_file.write(a.json, result)
    if a.plot:
        plot(result, a.plot)


if __name__ == "__main__":
    main()

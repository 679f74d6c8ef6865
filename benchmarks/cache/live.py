"""Hit rates on live traffic, beside an upper bound and a policy that knows the future. Needs no model.

    python -m benchmarks.cache.live [--share 1 2 4] [--seed 8 9] [--model NAME ...] [--host 0 4] [--user LOW HIGH]
                                    [--policy lru]

The shares are those of text that will be asked again over the memory of 131,072 tokens kept on all layers
(`traces.Mix`); requests run in the order of the trace. The bound is that of any cache with this memory, whatever it
knows (`limits.program`); "offline" is jswa's cache with a policy that knows all requests to come (`limits.foresight`).
With host memory behind the arena, both have the memory of arena and host in one pool.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks import result_file
from benchmarks.cache.limits.foresight import Foresight
from benchmarks.cache.limits.program import hit_bound
from benchmarks.cache.replay import Engine, Infinite, replay
from benchmarks.cache.traces import Mix, expand
from jswa.cache.layout import KVLayout
from jswa.cache.prefix.policies import POLICIES
from jswa.config import EvictionPolicy, HostMemory, Limits
from tools.cases.geometry import GEOMETRIES, model_of, slabs_of_tokens

PAGE, RUNNING = 64, 16
MODELS = ["gpt-oss-20b", "gemma-3-27b", "MiMo-V2-Flash"]
# Hit rates in % of the cache managers of SGLang 0.5.23 and vLLM 0.33.0 on the default mix of seed 8, in the same bytes,
# with pages of 64: the best of all settings, and SGLang's and vLLM's default. They were driven outside of this
# repository, in an environment of their own.
PEERS = {
    (1, "gpt-oss-20b"): ("75.0 vLLM, dense", 72.6, 71.2),
    (1, "gemma-3-27b"): ("73.8 SGLang, 0.8", 73.8, 67.9),
    (1, "MiMo-V2-Flash"): ("80.2 SGLang, 0.2", 74.4, 73.1),
    (2, "gpt-oss-20b"): ("64.3 SGLang, 0.2", 51.0, 57.4),
    (2, "gemma-3-27b"): ("53.6 SGLang, 0.8", 53.6, 53.5),
    (2, "MiMo-V2-Flash"): ("76.9 SGLang, 0.2", 55.0, 71.8),
    (4, "gpt-oss-20b"): ("38.1 SGLang, 0.2", 25.7, 33.4),
    (4, "gemma-3-27b"): ("32.4 vLLM", 27.9, 32.4),
    (4, "MiMo-V2-Flash"): ("65.6 SGLang, 0.2", 28.3, 61.1),
}


def measure(mix: Mix, model: str, host: float = 0.0, policy: EvictionPolicy = "learned") -> dict[str, float | str]:
    """Return the hit rates of one mix and model: jswa's, those of the limits, and those of an infinite cache.

    Args:
        host: memory of the host behind the arena, as a multiple of it.
        policy: of jswa's cache.
    """
    requests = expand(mix.lines())
    longest = max(len(request.prompt) + len(request.output) for request in requests)
    layout = KVLayout.of(model_of(model), PAGE)
    slabs = slabs_of_tokens(model, layout, mix.pool)
    both = int((1 + host) * slabs)
    behind = HostMemory(1 + int(host * slabs), slots_per_step=256, tokens_per_slot=8.0) if host else None
    limits = Limits(longest, RUNNING, 8192, PAGE, num_slabs=1 + slabs, host=behind, radix_eviction_policy=policy)
    engine = Engine(layout, limits)
    found = replay(engine, requests, running=RUNNING, strict=True)
    engine.scheduler.check()
    knowing = Engine(layout, Limits(longest, RUNNING, 8192, PAGE, num_slabs=1 + both))
    Foresight(knowing.scheduler.cache.prefix, requests, knowing.begun)
    return {
        "share": mix.share,
        "host": host,
        "seed": mix.seed,
        "model": model,
        "policy": policy,
        "requests": len(requests),
        "ideal": replay(Infinite(), requests, running=1).hit_rate,
        "bound": hit_bound(requests, layout, both * layout.pages_per_slab, RUNNING),
        "offline": replay(knowing, requests, running=RUNNING, strict=True).hit_rate,
        "jswa": found.hit_rate,
        **_host_figures(engine),
    }


def _host_figures(engine: Engine) -> dict[str, float]:
    """Return what went to host memory and back, as multiples of the slots of all prompts' pages."""
    stats, pool = engine.scheduler.cache.stats(), engine.scheduler.cache.pool
    if engine.scheduler.cache.host is None:
        return {}
    return {
        "from host": stats.host_tokens / max(1, stats.prompt_tokens),
        "written arenas": stats.host_written_slots / pool.total_slots,
        "read arenas": stats.host_read_slots / pool.total_slots,
    }


def main() -> None:
    """Print a row per share, seed and model; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", nargs="+", type=float, default=[1.0, 2.0, 4.0], help="default: 1 2 4")
    parser.add_argument("--seed", nargs="+", type=int, default=[8], help="default: 8")
    parser.add_argument("--model", nargs="+", choices=list(GEOMETRIES), default=MODELS, help="default: three")
    parser.add_argument("--user", nargs=2, type=int, default=(64, 900), help="tokens of a message: at least, below")
    parser.add_argument("--output", nargs=2, type=int, default=(32, 400), help="tokens of an answer: at least, below")
    parser.add_argument("--turns", type=int, default=8, help="mean number of turns")
    parser.add_argument("--json", type=Path, help="result file to write")
    parser.add_argument(
        "--host", nargs="+", type=float, default=[0.0], help="memory of the host over the arena; default: 0"
    )
    parser.add_argument("--policy", choices=list(POLICIES), default="learned", help="jswa's; default: learned")
    args = parser.parse_args()
    base = Mix(1.0, turns=args.turns, user=tuple(args.user), output=tuple(args.output))
    rows = []
    print("| share | host | seed | model | ideal | bound | offline | jswa | best peer, any setting | SGLang | vLLM |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    for host, share, model, seed in product(args.host, args.share, args.model, args.seed):
        mix = replace(base, share=share, seed=seed)
        row = measure(mix, model, host, args.policy)
        peers = PEERS.get((share, model), ("", "", "")) if mix == Mix(share) and not host else ("", "", "")
        row |= {"best_peer": peers[0], "sglang": peers[1], "vllm": peers[2]}
        rates = " | ".join(f"{100 * float(row[name]):.1f}" for name in ("ideal", "bound", "offline", "jswa"))
        print(f"| {share:g} | {host:g} | {seed} | {model} | {rates} | {' | '.join(map(str, peers))} |", flush=True)
        rows.append(row)
    if args.json:
        result_file.write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()

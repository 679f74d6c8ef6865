"""Savings that are special to gemma-4, each measured on and off in the same run.

    python -m benchmarks.speed.gemma4 [--repeats 5] [--json FILE]

1. Capacity: K = V layers store V and the rotated part of K (folded), against whole K and V; tokens in 75 GB.
2. Throughput with both forms in an arena of the same bytes: random weights of a small dense model with K = V layers.
3. Prefill of a small model in the proportions of E2B (20 of 35 layers share KV): these 20 layers run for the last token
   of a row only, against for all tokens.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.speed.offline import TimedRunner, run
from jswa.architecture import ModelConfig
from jswa.cache.capacity import rows_held
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec, unpack
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.state import init_state
from jswa.exec.programs.step import forward
from jswa.exec.runner import Runner
from jswa.model.hf.config import parse_config
from jswa.model.hf.gemma4 import unfolded
from jswa.model.transformer import Params
from jswa.model.weights.load import random_params
from jswa.plan import COLUMNS

MEMORY = 75 * 10**9
FLOAT32 = jnp.dtype("float32")
_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
_RELEASED = {
    "gemma-4-12B": (3840, 48, 16, 8, 1),
    "gemma-4-26B-A4B": (2816, 30, 16, 8, 2),
    "gemma-4-31B": (5376, 60, 32, 16, 4),
}
_SMALL = {"model_type": "gemma4_text", "vocab_size": 4096, "vocab_size_per_layer_input": 4096, "sliding_window": 128}


def released(name: str) -> ModelConfig:
    """Return the geometry of a released model with K = V layers."""
    sizes = dict(zip(_KEYS, _RELEASED[name], strict=True))
    return parse_config({**_SMALL, **sizes, "sliding_window": 1024, "attention_k_eq_v": True})


def tied() -> ModelConfig:
    """Return a small model in the proportions of gemma-4-31B."""
    sizes = dict(zip(_KEYS, (256, 12, 8, 4, 1), strict=True))
    widths = {"head_dim": 64, "global_head_dim": 128, "intermediate_size": 512, "hidden_size_per_layer_input": 0}
    return parse_config({**_SMALL, **sizes, **widths, "attention_k_eq_v": True})


def sharing() -> ModelConfig:
    """Return a small model in the proportions of gemma-4-E2B."""
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    widths = {"head_dim": 64, "global_head_dim": 128, "intermediate_size": 512, "hidden_size_per_layer_input": 64}
    shared = {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": types}
    sizes = dict(zip(_KEYS[:4], (256, 35, 8, 1), strict=True))
    return parse_config({**_SMALL, **sizes, **widths, **shared})


def capacity() -> dict[str, Any]:
    """Return KiB of a token in the full layers, and tokens that `MEMORY` holds, by model and form."""
    table: dict[str, Any] = {}
    for name in _RELEASED:
        found = {}
        for form, model in (("folded", released(name)), ("whole", unfolded(released(name)))):
            layout = KVLayout.of(model, 64)
            slots = (MEMORY // layout.slab_bytes(2) - 1) * layout.pages_per_slab
            held = {length: rows_held(layout, slots, length) * length for length in (32768, 131072)}
            assert layout.full is not None
            found[form] = {"kib_per_token": layout.full.num_layers * layout.full.elems * 2 / 1024, "tokens": held}
        table[name] = found
    return table


def throughput(model: ModelConfig, params: Params, arena_bytes: int, repeats: int) -> list[dict[str, float]]:
    """Return the figures of `repeats` runs of 16 prompts of 256 tokens, with 64 tokens generated for each."""
    layout = KVLayout.of(model, 16)
    slabs = arena_bytes // layout.slab_bytes(4)
    limits = Limits(512, 16, 128, page_size=16, num_slabs=slabs, prefix_cache=False)
    engine = Engine(model, limits, layout, Runner(model, params, layout, limits), seed=0)
    engine.stepping.runner = timed = TimedRunner(engine.runner)
    prompts = [np.random.default_rng(i).integers(3, 4096, 256).tolist() for i in range(16)]
    run(engine, timed, prompts[:1], 4)
    held = rows_held(layout, slabs * layout.pages_per_slab, 320)
    return [{**run(engine, timed, prompts, 64), "rows_held": held} for _ in range(repeats)]


def prefill_seconds(model: ModelConfig, params: Params, repeats: int, *, every: bool) -> list[float]:
    """Return seconds of prefill steps of 512 tokens in one row. If `every`, all layers run all tokens."""
    layout, bucket = KVLayout.of(model, 16), Bucket(512, 1, decode=False)
    config = StepConfig(model, layout, bucket, PackSpec.of(bucket, page_size=16, max_rows=1))
    limits = Limits(1024, 1, 512, page_size=16, num_slabs=256)
    state = init_state(layout, limits, model.vocab_size, FLOAT32)
    packed = np.zeros(config.pack.size, np.int32)
    inputs = unpack(packed, config.pack)
    inputs.rows[0, COLUMNS.index("count")] = 512
    for entries, pages in ((inputs.full_pages, range(32)), (inputs.local_pages, range(32))):
        entries[:, 0] = 1  # a row that does not exist: the entry is ignored
        slab = layout.pages_per_slab if entries is inputs.full_pages else 100
        entries[:32] = [(0, page, slab + page) for page in pages]

    @partial(jax.jit, donate_argnums=1)
    def program(params: Params, state: Any, packed: Any) -> Any:
        state, hidden, *_ = forward(params, state, unpack(packed, config.pack), config=config, every=every)
        return state, hidden[-1]

    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        state, hidden = program(params, state, packed)
        hidden.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each variant")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    sizes = capacity()
    for name, both in sizes.items():
        on, off = both["folded"], both["whole"]
        ratios = ", ".join(f"{on['tokens'][n] / off['tokens'][n]:.2f} times the tokens at {n}" for n in on["tokens"])
        print(f"{name}: {on['kib_per_token']} of {off['kib_per_token']} KiB per token in the full layers; {ratios}")
    model = tied()
    params = random_params(model, FLOAT32, 0)
    arena = 20 * 2**20
    forms = {"folded": model, "whole": unfolded(model)}
    passes = {name: throughput(one, params, arena, args.repeats) for name, one in forms.items()}
    speed = {name: statistics.median(one["tokens_per_s"] for one in runs) for name, runs in passes.items()}
    held = {name: runs[0]["rows_held"] for name, runs in passes.items()}
    print(
        f"arena of {arena >> 20} MiB: {held['folded']:.0f} rows of 320 tokens folded, {held['whole']:.0f} whole; ",
        end="",
    )
    print(f"{speed['folded']:.0f} and {speed['whole']:.0f} tokens/s, ratio {speed['folded'] / speed['whole']:.2f}")
    model = sharing()
    params = random_params(model, FLOAT32, 0)
    tails = {name: prefill_seconds(model, params, args.repeats, every=name == "all") for name in ("last", "all")}
    last, every = (statistics.median(tails[name]) for name in ("last", "all"))
    print(
        f"prefill of 512 tokens: {last * 1e3:.0f} ms if the shared layers run for the last token only, "
        f"{every * 1e3:.0f} ms for all"
    )
    if args.json:
        results = {
            "device": jax.devices()[0].device_kind,
            "capacity": sizes,
            "throughput": passes,
            "prefill_seconds": tails,
        }
        result_file.write(args.json, results)


if __name__ == "__main__":
    main()

"""Ablation of shared indices: the indices of a step are computed once for all layers, or again in every layer.

SGLang's pull requests 20449 (prefill), 23552 (captured decode graphs) and 24138 (prefill in the TensorRT-LLM backend)
introduced it: one gather per step, and not one per sliding-window layer, finds where tokens are written in the
sliding-window pool.

`once_per_layer` is the baseline. A program traced inside it computes `step_indices` at the top as always (positions and
last tokens belong to no layer), and again in each layer, which uses its own copy. It wraps two functions of
`jswa.exec.programs.step`: `step_indices`, to remember its arguments, and `attend_layer`, to call it again. XLA would
merge the equal copies. So the operands of each copy (the packed inputs and both page tables) pass through an
`optimization_barrier` together with the queries of the layer: a copy cannot start before these queries exist, and no
two copies have the same operands. The counts below show that none were merged.

Gathers are counted twice: in the traced step, as a test of the engine counts them (integer gathers outside the scopes
`attention` and `moe`), and in the program that XLA has compiled for this machine, from which unused gathers are gone.
`.venv-gpu/bin/python -m benchmarks.cache.ablations --tables compiled` also counts the kernels of a step for an H200
that only compute indices (`tools.aot.steps`).
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
from jax import lax, named_scope
from jaxtyping import Array, Float, Int

from benchmarks.cache.ablation_table import Row, Table, loss, spread
from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import jit_step
from jswa.exec.pack import PackSpec
from jswa.exec.programs import indices as indices_module
from jswa.exec.programs import step as step_module
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.indices import StepIndices
from jswa.exec.programs.state import DeviceState, state_shapes
from jswa.exec.runner import Runner
from jswa.model.binding import param_shapes
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from jswa.model.weights.load import random_params
from jswa.plan import Request
from jswa.sched.scheduler import Scheduler
from jswa.types import SamplingParams
from tools.aot.measures.programs import integer_gathers

FLOAT32 = jnp.dtype("float32")
VARIANTS = ("on", "off")
SPEEDS = ("prefill_tokens_per_s", "decode_tokens_per_s")


@contextmanager
def once_per_layer() -> Iterator[None]:
    """Make steps that are traced inside compute their indices in every layer (see the module). One thread at a time."""
    at_top, attend = indices_module.step_indices, step_module.attend_layer
    top = threading.local()  # a runner traces its buckets in several threads

    def remembered(*args: Any, **options: Any) -> StepIndices:
        top.args, top.options = args, options
        return at_top(*args, **options)

    def own(
        config: StepConfig,
        indices: StepIndices,
        layer: int,
        lane: Float[Array, "1 slabs elems"],
        q: Float[Array, "T H D"],
        *rest: Any,
        last: bool,
    ) -> tuple[Float[Array, "1 slabs elems"], Float[Array, "T H V"]]:
        state: DeviceState
        inputs, state = top.args
        with named_scope("indices"):
            barrier: Any = lax.optimization_barrier
            inputs, full_table, local_table, _ = barrier((inputs, state["full_table"], state["local_table"], q))
            state = {**state, "full_table": full_table, "local_table": local_table}
            indices = at_top(inputs, state, **top.options)
        return attend(config, indices, layer, lane, q, *rest, last=last)

    with patch.object(step_module, "step_indices", remembered), patch.object(step_module, "attend_layer", own):
        yield


def gemma3(layers: int, d_model: int = 128) -> ModelConfig:
    """Return a small model in the shape of gemma-3: five local layers, then a full one."""
    sizes = {"hidden_size": d_model, "intermediate_size": 4 * d_model, "num_hidden_layers": layers, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32}
    window = {"sliding_window": 64, "sliding_window_pattern": 6, "max_position_embeddings": 2048}
    return parse_config({"model_type": "gemma3_text", **sizes, **heads, **window})


def traced_gathers(model: ModelConfig, limits: Limits, bucket: Bucket) -> int:
    """Count the integer gathers of a step that is traced in the caller's context."""
    layout = KVLayout.of(model, limits.page_size)
    spec = PackSpec.of(bucket, page_size=limits.page_size, max_rows=limits.max_rows)
    state = state_shapes(layout, limits, model.vocab_size, FLOAT32)
    params: Any = param_shapes(model, FLOAT32)
    program = jit_step(StepConfig(model, layout, bucket, spec), params, state)
    return len(integer_gathers(program.trace(params, state, np.zeros(spec.size, np.int32)).jaxpr))


def compiled_gathers(text: str) -> int:
    """Count gathers and dynamic slices of integers in a compiled program, outside attention and experts."""
    found = re.findall(r"= [su]\d+\[[\d,]*\]\S* (?:gather|dynamic-slice)\(.*?op_name=\"([^\"]*)\"", text)
    return sum(not {"attention", "moe"} & set(name.split("/")) for name in found)


def runners(model: ModelConfig, params: Params, limits: Limits) -> dict[str, Runner]:
    """Return a runner with indices once per step (on) and one with indices in every layer (off)."""
    layout = KVLayout.of(model, limits.page_size)
    on = Runner(model, params, layout, limits)
    with once_per_layer():
        return {"on": on, "off": Runner(model, params, layout, limits)}


def generate(engine: Engine, prompts: list[Int[np.ndarray, " T"]], output: int) -> dict[str, Any]:
    """Return the greedy tokens of all prompts, and the tokens per second of prefill and decode.

    Prefill ends when each prompt has its first token.
    """
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    texts: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for name, prompt in zip(texts, prompts, strict=True):
        engine.add(engine.request(name, prompt, params))
    start = begun = time.perf_counter()
    decoded = 0
    while engine.has_work():
        events = engine.step()
        for event in events:
            assert event.token is not None
            texts[event.request_id].append(event.token)
        if decoded or all(texts.values()):
            begun = begun if decoded else time.perf_counter()
            decoded += len(events)
    first = sum(map(len, texts.values())) - decoded
    end = time.perf_counter()
    return {
        "texts": list(texts.values()),
        "prefill_tokens_per_s": (sum(map(len, prompts)) + first) / (begun - start),
        "decode_tokens_per_s": decoded / (end - begun),
    }


def step_seconds(
    both: dict[str, Runner], model: ModelConfig, limits: Limits, length: int, count: int
) -> dict[str, Any]:
    """Return seconds of single decode steps of all rows at `length` tokens, from launch to tokens, alternating."""
    scheduler = Scheduler(KVLayout.of(model, limits.page_size), limits)
    prompt: Int[np.ndarray, " T"] = np.arange(length, dtype=np.int32) % model.vocab_size
    for number in range(limits.max_rows):
        request = Request(
            str(number), prompt, SamplingParams(temperature=0.0), frozenset(), (0, 0), limits.max_model_len
        )
        scheduler.add(request)
    while True:
        plan = scheduler.plan()
        assert plan is not None
        for runner in both.values():
            tokens = runner.launch(plan).tokens()
        scheduler.apply(plan, tokens)
        if plan.num_rows == limits.max_rows and (plan.counts == 1).all():
            break
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(count):
        for name, runner in both.items():  # the same plan again: it writes the KV that is already there
            start = time.perf_counter()
            runner.launch(plan).tokens()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(model: ModelConfig, limits: Limits, prompt: int, output: int, repeats: int, steps: int) -> dict[str, Any]:
    """Run both variants alternately on the same prompts: speed, tokens, and the KV arena after the first pass."""
    both = runners(model, random_params(model, FLOAT32, 0), limits)
    layout = KVLayout.of(model, limits.page_size)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.vocab_size, prompt).astype(np.int32) for _ in range(limits.max_rows)]
    passes: dict[str, list[dict[str, Any]]] = {name: [] for name in both}
    lanes: dict[str, list[Float[np.ndarray, "1 slabs elems"]]] = {}
    for number in range(repeats + 1):
        for name, runner in both.items():
            passes[name].append(generate(Engine(model, limits, layout, runner), prompts, output))
            if not number:
                lanes[name] = [np.asarray(lane) for lane in runner.state["lanes"]]
    texts = [one.pop("texts") for runs in passes.values() for one in runs]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(lanes["on"], lanes["off"], strict=True))
    seconds = step_seconds(both, model, limits, prompt, steps)
    found = {}
    for name, runner in both.items():
        # The decode step of all rows, if the engine has one; or its first half, which has the layers.
        layers = [n for n in runner.compiled if runner.configs[n].part != "finish"]
        number = min(layers, key=lambda n: (-runner.configs[n].bucket.rows, runner.configs[n].bucket.tokens))
        config = runner.configs[number]
        with once_per_layer() if name == "off" else nullcontext():
            traced = traced_gathers(model, limits, config.bucket)
        compiled = compiled_gathers(runner.compiled[number].as_text() or "")
        step_ms = [1e3 * one for one in seconds[name]]
        found[name] = {"traced": traced, "compiled": compiled, "step_ms": step_ms, "passes": passes[name][1:]}
    return {
        "layers": len(model.layers),
        "local_layers": sum(layer.attention.kind == "local" for layer in model.layers),
        "d_model": model.d_model,
        "rows": limits.max_rows,
        "prompt": prompt,
        "output": output,
        "tokens": sum(map(len, texts[0])),
        "passes_with_equal_tokens": sum(text == texts[0] for text in texts),
        "passes": len(texts),
        "largest_kv_difference": worst,
        **found,
    }


def results(repeats: int = 5, steps: int = 200) -> list[dict[str, Any]]:
    """Return all that the table shows, except what is compiled for a GPU."""
    limits = {rows: Limits(512, rows, 256, 16, num_slabs=2_000, prefix_cache=False) for rows in (16, 64)}
    return [compare(gemma3(26), one, 64, 64, repeats, steps) for one in limits.values()]


def on_h200(depths: tuple[int, ...] = (12, 24)) -> list[dict[str, Any]]:
    """Compile steps of the first layers of gemma-3-27b for an H200. Needs the extra `aot`, and no GPU."""
    from tools.aot import step_specs, steps  # sets up jax for it

    found = []
    for tokens in (0, 2048):
        for layers in depths:
            spec = step_specs.StepSpec("gemma-3-27b", layers, 2, tokens=tokens)
            on = steps.facts_of(spec)
            with once_per_layer():
                off = steps.facts_of(spec)
            names = ("index_launches", "launches", "graphs")
            variants = {key: {name: getattr(one, name) for name in names} for key, one in (("on", on), ("off", off))}
            found.append({"name": spec.name, "layers": layers, "tokens": tokens, **variants})
    return found


def table(found: list[dict[str, Any]], compiled: list[dict[str, Any]]) -> Table:
    """Return the comparison as a table."""
    rows = [row for one in found for row in _cells(one)]
    for one in compiled:
        on, off = ([one[variant]["index_launches"]] for variant in VARIANTS)
        where = one["name"] + ", for an H200"
        rows.append((where, "kernels that compute indices", "", spread(on), spread(off), loss(on, off, "fewer")))
    return Table(
        "Indices once per step (SGLang 20449, 23552, 24138)",
        "once per step",
        "in every layer",
        rows,
        [
            "Published: 20449 reports MiMo-V2-Flash on 4 GPUs, 1,400 questions of GSM8K, with this change only: "
            "accuracy 0.853, 25.9 s, 6,821 tokens/s. 24138 reports no figures. 27642 counts gathers that came back "
            "later (45 too many for 46 local layers); 26931 measures 8 µs per layer and 1.6 to 2.3 % of throughput "
            "(DeepSeek-V4 on AMD).",
            "Where it loses: on this CPU the median of on is slower than that of off at 64 rows and in all prefill. "
            "The ranges overlap, and other programs ran on both cores. For a GPU kernels are counted, and nothing is "
            "timed. The last column is empty where on is not worse.",
            "Off computes more than SGLang's baseline did: all indices of a layer, also of the pages that it reads and "
            "not only of where it writes. Optimisation barriers keep XLA from merging the copies of the layers.",
            "Gathers are of integers, outside attention and experts; `compiled` is for the CPU of this machine. Speeds "
            "are median (range) of alternating passes. Step times are median (10th to 90th percentile) of alternating "
            "steps.",
        ],
    )


def _cells(one: dict[str, Any]) -> list[Row]:
    shape = f"{one['layers']} layers of gemma-3's shape, {one['local_layers']} local, {one['rows']} rows"
    both = [one[variant] for variant in VARIANTS]
    equal = f"{one['passes_with_equal_tokens']} of {one['passes']} passes of {one['tokens']:,} equal"
    steps = [np.percentile(found["step_ms"], [10, 50, 90]).tolist() for found in both]

    def counts(key: str, published: str) -> Row:
        on, off = ([found[key]] for found in both)
        return "", f"gathers, {key}", published, spread(on), spread(off), loss(on, off, "fewer")

    def speeds(name: str, published: str, key: str) -> Row:
        on, off = ([run[key] for run in found["passes"]] for found in both)
        return "", name, published, spread(on), spread(off), loss(on, off, "more")

    first = counts("traced", "45 fewer for 46 local layers")
    step = ("", "decode step, ms", "0.008 less a layer", spread(steps[0], 2), spread(steps[1], 2))
    return [
        (shape, *first[1:]),
        counts("compiled", ""),
        (*step, loss(steps[0], steps[1], "fewer")),
        speeds("decode, tokens/s", "6,821 on; +1.6 to 2.3 %", SPEEDS[1]),
        speeds("prefill, tokens/s", "", SPEEDS[0]),
        ("", "greedy tokens", "accuracy 0.853 on", equal, equal, ""),
        ("", "largest difference in the KV arena", "", "0", f"{one['largest_kv_difference']:g}", ""),
    ]

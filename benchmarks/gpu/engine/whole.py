"""Throughput of gpt-oss-20b with exactly so many tokens in and out, in an engine whose programs come from files.

    python -m benchmarks.gpu.engine.whole --programs FOLDER [--loads 256 64 1 512] [--json FILE]
    .venv-gpu/bin/python -m benchmarks.gpu.engine.whole --compile FOLDER                   without a GPU

Weights are random. Unlike a served engine this one compiles only the programs of its loads, and checks no kernels at
its start. A load is a number of requests that come together, or that number with "p": drawn with top-p.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.gpu import elsewhere
from benchmarks.gpu.engine.launch import SMS, filled
from benchmarks.speed.offline import TimedRunner
from jswa.building import parts
from jswa.cache.layout import KVLayout
from jswa.config import EngineConfig, resolve_limits
from jswa.exec.buckets import bucket_table
from jswa.exec.compile import program, steps
from jswa.exec.programs.state import state_shapes
from jswa.exec.selfcheck import check as selfcheck
from jswa.exec.sizing import size_arena
from jswa.forms.mxfp4 import MXFP4_JOINED
from jswa.kernels import DeviceFacts, resolve
from jswa.llm import LLM
from jswa.model.binding import param_shapes
from jswa.model.hf.config import load_config, parse_config
from jswa.types import SamplingParams
from tools.cases.hub_configs import CONFIGS
from tools.cases.small_models import SMALL_MODELS

_FAST = {"kernels": "attention=mosaic_splits,experts=mosaic_overlap,elementwise=mosaic,routing=triton,sampling=triton"}
_WEIGHTS = "made-whole"
_patched: tuple[Any, Any, Any] = steps, parts, selfcheck


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine."""
    if args.small:
        return {
            "load_format": "dummy", "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64,
            "cudagraph_capture_sizes": (8, 64), "prefix_cache": False, "kv_cache_memory_bytes": 50_000_000,
        }  # fmt: skip
    return {
        "load_format": "dummy", "quantization": "mxfp4", "max_model_len": 2_048, "max_num_seqs": args.rows[-1],
        "max_num_batched_tokens": 8_192, "cudagraph_capture_sizes": (*args.rows, 8_192), "prefix_cache": False,
        "kv_cache_memory_bytes": args.kv_bytes, **({} if args.default_kernels else _FAST),
    }  # fmt: skip


def compile_all(folder: Path, options: dict[str, Any], only: Sequence[str]) -> None:
    """Compile an engine's programs without a GPU."""
    config = EngineConfig(**options)
    model = parse_config(CONFIGS["gpt-oss-20b"], weights=False)
    kind = jnp.dtype("bfloat16")
    params = dict(param_shapes(model, kind, MXFP4_JOINED))
    limits = resolve_limits(config, model, on_gpu=True)
    model = model.at_length(limits.max_model_len)
    kernels = resolve(config.kernels, DeviceFacts("gpu", 9.0, kind.name, sms=SMS, packed_experts=True))
    layout = KVLayout.of(model, limits.page_size)
    limits = size_arena(limits, layout, config, int(config.kv_cache_memory_bytes or 0), kind.itemsize, on_gpu=True)
    print(f"{limits.num_slabs} slabs, {limits.num_slabs * layout.slab_bytes(2) / 1e9:.1f} GB", flush=True)
    state = state_shapes(layout, limits, model.vocab_size, kind)
    with elsewhere.for_h200() as place:
        shapes: Any = params
        own = steps.StepPrograms(model, layout, limits, bucket_table(limits, on_gpu=True), kernels, shapes, state, None)
        where = place(jax.eval_shape(lambda: jnp.zeros(1))).sharding
        programs: dict[str, Callable[[], Any]] = {
            _WEIGHTS: lambda: jax.jit(_made(params), out_shardings=where).lower().compile()
        }
        for config_of_step in [own.configs[number] for number in own.family(("step", "none"))]:
            programs[_file(config_of_step)] = partial(program.compile_step, config_of_step, place(params), place(state))
        for name in [name for name in programs if any(word in name for word in only)]:
            if not elsewhere.is_kept(folder, name):
                begin = time.perf_counter()
                size = elsewhere.keep(folder, name, _placed(place, programs[name]))
                print(f"{name}: {time.perf_counter() - begin:.1f} s, {size / 1e6:.2f} MB", flush=True)


def _placed(place: Callable[[Any], Any], compiled: Callable[[], Any]) -> Any:
    """Compile with all arguments of steps on the device that is compiled for."""
    module: Any = program
    given = module.step_arguments

    def on_device(config: Any, params: Any, state: Any) -> Any:
        return place(jax.eval_shape(lambda: given(config, params, state)))

    module.step_arguments = on_device
    try:
        return compiled()
    finally:
        module.step_arguments = given


def _made(params: dict[str, Any]) -> Callable[[], dict[str, jax.Array]]:
    return lambda: {name: filled(name, shape, n) for n, (name, shape) in enumerate(params.items())}


def _file(config: Any) -> str:
    bucket = config.bucket
    return f"whole-{bucket.tokens}-{bucket.rows}-{config.kernels.sampling}"


def use_kept(folder: Path, loaded: list[dict[str, Any]]) -> None:
    """Have an engine take its programs and weights from files, compile no others, and check no kernels."""
    module, loading, checks = _patched
    compile_step, families = program.compile_step, steps.StepPrograms.families

    def kept(config: Any, *rest: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        row: dict[str, Any] = {"program": _file(config), "family": f"{config.part} {config.logprobs}"}
        found = None
        try:
            found = elsewhere.load(folder, _file(config))
        except Exception as error:  # jaxlib raises many types
            row["why"] = f"{type(error).__name__}: {error}"[:300]
        out = found or compile_step(config, *rest, **more)
        loaded.append({**row, "kept": found is not None, "seconds": time.perf_counter() - begin})
        return out

    def first(self: steps.StepPrograms, *, all_at_start: bool, on_gpu: bool) -> list[int]:
        del all_at_start, on_gpu
        return [number for family in families(self, {"none"}) for number in self.family(family)]

    def weights(folder_of_model: Path, dtype: Any, seed: int, **more: Any) -> Any:
        del dtype, seed, more
        begin = time.perf_counter()
        model = load_config(folder_of_model)
        made = elsewhere.load(folder, _WEIGHTS)
        assert made is not None
        params = dict(made())
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        loaded.append({"program": "weights", "kept": True, "seconds": time.perf_counter() - begin})
        return model, params

    module.compile_step, module.StepPrograms.first = kept, first
    checks.check_kernels = lambda *_: None
    if elsewhere.is_kept(folder, _WEIGHTS):
        loading.dummy_checkpoint = weights


def load_of(
    llm: LLM, timed: TimedRunner, word: str, size: tuple[int, int], random: np.random.Generator
) -> dict[str, Any]:
    """Run a load; return its times. `size`: tokens of each request in and out."""
    engine, count, output = llm.engine, int(word.removesuffix("p")), size[1]
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95} if word.endswith("p") else {"temperature": 0}
    params = SamplingParams(**drawn, max_tokens=output, ignore_eos=True)
    for index in range(count):
        prompt = random.integers(3, engine.model.vocab_size, size[0]).astype(np.int32)
        engine.add(engine.request(f"{word}-{index}-{time.monotonic_ns()}", prompt, params))
    timed.launching = timed.waiting = 0.0
    begun, made, all_begun, at_begun, launches = set[str](), 0, 0.0, (0.0, 0.0), 0
    start = time.perf_counter()
    first = 0.0
    while engine.has_work():
        events = engine.step()
        made += len(events)
        if events and not first:
            first = time.perf_counter() - start
        if len(begun) < count:
            begun |= {event.request_id for event in events}
            all_begun, at_begun = time.perf_counter() - start, (timed.launching, timed.waiting)
            before = made
        else:
            launches += 1
    total = time.perf_counter() - start
    decode = total - all_begun
    return {
        "requests": count, "draws": "top-p 0.95" if word.endswith("p") else "greedy",
        "input": size[0], "output": output,
        "seconds": total, "first_token_seconds": first, "output_tokens_per_s": count * output / total,
        "all_begun_seconds": all_begun, "decode_tokens_per_s": (made - before) / decode,
        "step_ms": 1e3 * decode / max(1, launches), "events": made,
        "launch_ms": 1e3 * (timed.launching - at_begun[0]) / max(1, launches),
        "waiting_share": (timed.waiting - at_begun[1]) / decode,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Compile, or measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=Path, help="folder to write programs to, without a GPU")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="compile only programs whose names contain one of these"
    )
    parser.add_argument("--programs", type=Path, help="folder with programs")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 512], help="rows of programs, ascending")
    parser.add_argument("--kv-bytes", type=int, default=40_000_000_000, help="of the arena")
    parser.add_argument("--loads", nargs="+", default=["256", "64", "1", "256p", "512"], help="requests at a time")
    parser.add_argument("--size", type=int, nargs=2, default=[1_024, 1_024], help="tokens in and out")
    parser.add_argument("--default-kernels", action="store_true", help="those that an engine has by default")
    parser.add_argument("--small", action="store_true", help="a small model on any machine; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no load begins")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    if args.compile:
        compile_all(args.compile, options_of(args), args.only)
        return
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(name)s %(message)s")
    began = time.perf_counter()
    loaded: list[dict[str, Any]] = []
    if args.programs:
        use_kept(args.programs, loaded)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(SMALL_MODELS["gpt-oss"] if args.small else CONFIGS["gpt-oss-20b"])
        )
        llm = LLM(folder, **options_of(args))
    facts: dict[str, Any] = {
        "device": jax.devices()[0].device_kind, "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "options": options_of(args),
        "start_seconds": time.perf_counter() - began, "programs": loaded,
    }  # fmt: skip
    print(facts, flush=True)
    with llm:
        timed = TimedRunner(llm.engine.runner)
        llm.engine.stepping.runner = timed
        random = np.random.default_rng(0)
        load_of(llm, timed, "2", (args.size[0], 4), random)
        facts["first_answer_seconds"] = time.perf_counter() - began
        rows: list[dict[str, Any]] = []
        for word in args.loads:
            if time.perf_counter() - began > args.seconds:
                break
            rows.append(load_of(llm, timed, word, tuple(args.size), random))
            print(rows[-1], flush=True)
            if args.json:
                result_file.write(args.json, {**facts, "loads": rows})


if __name__ == "__main__":
    main()

"""What a step's launch takes of the host: of whole steps, of their halves, and of steps that draw nothing.

    python -m benchmarks.gpu.engine.launch [--only NAME ...] [--programs FOLDER] [--traces FILE] [--json FILE]
    .venv-gpu/bin/python -m benchmarks.gpu.engine.launch --compile FOLDER [--only NAME ...]       without a GPU

Runs the step programs of gpt-oss-20b on random weights without an engine, so that only what is measured is compiled;
with --programs not even that. How XLA launches graphs is an XLA_FLAG of the process; it must be set for --compile too.

A step is measured in four ways: `queued`, one launch after another without waiting; `in turn`, as an engine does, the
next one before the tokens of the last; `idle`, each launch after the device has ended; and `numpy`, queued, with the
packed plan handed to the program as it is. `put`, `call` and `fetch` are the host's microseconds for the upload, for
the program's call and for the start of the download.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.gpu import elsewhere
from benchmarks.gpu.engine.decode_steps import lay_out_rows, plan_of
from benchmarks.gpu.engine.launching import COUNT, Launches, on_host
from benchmarks.gpu.engine.step_trace import traced
from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import jit_step, step_arguments
from jswa.exec.pack import PackSpec, pack
from jswa.exec.programs.config import Part, StepConfig
from jswa.exec.programs.sampling import verify
from jswa.exec.programs.state import DeviceState, init_state, state_shapes
from jswa.exec.programs.step import sampling_state
from jswa.forms.mxfp4 import MXFP4_JOINED
from jswa.forms.plain import PLAIN
from jswa.kernels import Kernels
from jswa.model.binding import head_names, param_shapes
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from pallas_kernels.experts.mxfp4 import TILE, tile_scales
from tools.cases.hub_configs import CONFIGS
from tools.cases.small_models import SMALL_MODELS

BFLOAT16 = jnp.dtype("bfloat16")
MAX_ROWS, PAGE, SMS = 256, 64, 132
_ROOM = 2_048  # tokens that a row's pages hold
_KERNELS = {
    "default": Kernels("mosaic", "mosaic_overlap", SMS),
    "fast": Kernels("mosaic_splits", "mosaic_overlap", SMS, "xla", "mosaic", "triton", "triton"),
    "fast_mosaic": Kernels("mosaic", "mosaic_overlap", SMS, "xla", "mosaic", "triton", "triton"),
    "cpu": Kernels(),
}


@dataclass(frozen=True)
class Variant:
    """A step program. `draws`: whether it draws as an engine's does, or takes the largest logit and no more."""

    kernels: str
    layers: int
    rows: int
    part: Part = "step"
    draws: bool = True
    tokens: int = 0  # of a step with prefill

    @property
    def name(self) -> str:
        """Name of its file and of its row."""
        kind = "" if self.part == "step" else f"-{self.part}"
        size = f"{self.rows}x{self.tokens}" if self.tokens else f"{self.rows}"
        return f"{self.kernels}-{self.layers}-{size}{kind}{'' if self.draws else '-greedy'}"


def _variants() -> Iterator[Variant]:
    for rows in (64, 8, 256):
        yield Variant("fast", 6, rows)
    for rows in (64, 8):
        yield Variant("fast", 6, rows, draws=False)
        yield Variant("fast", 6, rows, "forward")
        yield Variant("fast", 6, rows, "finish")
        yield Variant("default", 6, rows)
    yield from (Variant("fast_mosaic", 6, rows) for rows in (256, 64))
    yield Variant("fast", 2, 64)
    yield Variant("fast", 2, 64, draws=False)
    for rows in (64, 8, 256):
        yield Variant("fast", 24, rows)
        yield Variant("fast", 24, rows, draws=False)
        yield Variant("default", 24, rows)
    yield Variant("fast", 24, 8, "forward")
    yield Variant("fast", 24, 8, "finish")
    yield Variant("cpu", 2, 8)
    yield Variant("cpu", 2, 8, "forward")
    yield Variant("cpu", 2, 8, "finish")


VARIANTS = tuple(_variants())


class Setting:
    """What all programs of a number of layers share: model, layout, limits, and the shapes of their arguments."""

    def __init__(self, layers: int, *, small: bool = False) -> None:
        whole = parse_config(SMALL_MODELS["gpt-oss"] if small else CONFIGS["gpt-oss-20b"], weights=False)
        self.model: ModelConfig = replace(whole, layers=whole.layers[:layers]).at_length(whole.max_position)
        self.layout = KVLayout.of(self.model, PAGE)
        rows = 8 if small else MAX_ROWS
        # Pages of the full layers, and a few of the window's for each row.
        slabs = 1 + rows * (-(-_ROOM // PAGE) // self.layout.pages_per_slab + 4)
        self.layers = layers
        self.limits = Limits(self.model.max_position, rows, 2_048, page_size=PAGE, num_slabs=slabs)
        kind = jnp.dtype("float32") if small else BFLOAT16
        self.params: dict[str, Any] = dict(param_shapes(self.model, kind, PLAIN if small else MXFP4_JOINED))
        self.state: DeviceState = state_shapes(self.layout, self.limits, self.model.vocab_size, kind)
        self.kind = kind

    def config(self, variant: Variant) -> StepConfig:
        """Return the configuration of a program."""
        if variant.tokens:
            bucket = Bucket(variant.tokens, variant.rows, decode=False)
        else:
            bucket = Bucket(variant.rows, variant.rows, decode=True)
        spec = PackSpec.of(bucket, page_size=PAGE, max_rows=self.limits.max_rows)
        return StepConfig(self.model, self.layout, bucket, spec, _KERNELS[variant.kernels], part=variant.part)

    def lowered(self, variant: Variant, place: Callable[[Any], Any]) -> jax.stages.Lowered:
        """Trace a program for arguments that `place` puts on a device."""
        config = self.config(variant)
        module: Any = verify
        own = module.sample, module.kernels
        if not variant.draws:
            module.sample, module.kernels = _largest, SimpleNamespace(sample=_largest_and_none)
        try:
            arguments = step_arguments(config, self.params, self.state)
            shapes = place(jax.eval_shape(lambda: arguments[2:]))
            if config.part == "finish":
                shapes = (place(self.half(variant)),)
            with jax.default_matmul_precision("default"):
                function = jit_step(config, place(self.params), self.state)
                return function.lower(*place(arguments[:2]), *shapes)
        finally:
            module.sample, module.kernels = own

    def half(self, variant: Variant) -> Any:
        """Return the shapes of what a first half gives to the second."""
        config = self.config(replace(variant, part="forward"))
        arguments = step_arguments(config, self.params, self.state)
        return jax.eval_shape(jit_step(config, self.params, self.state), *arguments)[1]

    def made(self) -> Callable[[], tuple[Params, DeviceState]]:
        """Return a function that makes parameters and state."""
        size, vocab = self.limits, self.model.vocab_size
        shapes = dict(self.params)

        def make() -> tuple[Params, DeviceState]:
            params = {name: filled(name, shape, n) for n, (name, shape) in enumerate(shapes.items())}
            return params, init_state(self.layout, size, vocab, self.kind)

        return make


def _largest(logits: jax.Array, *rest: Any, **more: Any) -> jax.Array:
    """Stand in for `sample`: the largest logit of each row."""
    del rest, more
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _largest_and_none(logits: jax.Array, *rest: Any, **more: Any) -> tuple[jax.Array, None]:
    """Stand in for the kernels' `sample`."""
    return _largest(logits, *rest, **more), None


def filled(name: str, shape: Any, seed: int) -> jax.Array:
    """Return numbers that look random, by a hash that compiles quickly."""
    if name.rpartition(".")[2] in ("bias", "sinks") or len(shape.shape) < 2:
        return jnp.full(shape.shape, float(name.endswith("weight") or "norm" in name), shape.dtype)
    at = jax.lax.iota(jnp.uint32, int(np.prod(shape.shape[-2:]))).reshape(shape.shape[-2:])
    for axis, many in enumerate(shape.shape[:-2]):
        own = jax.lax.broadcasted_iota(jnp.uint32, shape.shape, axis)
        at = jnp.broadcast_to(at, shape.shape) if axis == 0 else at
        at = at + own * jnp.uint32(0x9E3779B9 + 2 * axis + many)
    mixed = (at + jnp.uint32(seed * 7919 + 1)) * jnp.uint32(2_654_435_761)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2_246_822_519)
    mixed = mixed ^ (mixed >> 13)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        unit = mixed.astype(jnp.int32).astype(jnp.float32) / 2.0**31
        fan = shape.shape[-1] if name.endswith("embed") else shape.shape[-2]
        numbers: jax.Array = (unit * (3 / fan) ** 0.5).astype(shape.dtype)
        return numbers
    bits = mixed.astype(jnp.dtype(f"uint{8 * shape.dtype.itemsize}"))
    codes: jax.Array = jax.lax.bitcast_convert_type(bits, shape.dtype)
    if name.endswith(".joined"):
        lines = (*shape.shape[:-2], shape.shape[-1], 2)
        least = 126 - round(np.log2(2.3 * (shape.shape[2] * TILE) ** 0.5))
        return codes.at[..., -1, :].set(tile_scales(jnp.full(lines, least, jnp.int32)))
    if name.endswith(".scales"):
        return jnp.full(shape.shape, 118, shape.dtype)
    return codes


class Steps:
    """Programs and their arguments on a device, run step by step."""

    def __init__(self, setting: Setting, params: Params, state: DeviceState) -> None:
        self.setting, self.params, self.state = setting, params, state
        self.head = {name: params[name] for name in head_names(setting.model, params)}
        self.half: Any = None

    def lay_out(self, rows: int, context: int, more: int) -> None:
        """Give rows pages of their own, as if their contexts had been computed."""
        limits = self.setting.limits
        runner: Any = SimpleNamespace(layout=self.setting.layout, limits=limits)
        cached = lay_out_rows(runner, rows, context, more)
        assert cached is not None
        self.cached = cached
        full, local = (np.zeros(self.state[name].shape, np.int32) for name in ("full_table", "local_table"))
        for row in cached:
            pages = row.pages
            full[row.row_id, : len(pages.full)] = pages.full
            local[row.row_id, pages.first_local : pages.first_local + len(pages.local)] = pages.local
        length = np.zeros(limits.max_rows, np.int32)
        length[:rows] = context
        tables = {"full_table": full, "local_table": local, "length": length}
        self.state = {**self.state, **{name: jax.device_put(value) for name, value in tables.items()}}  # type: ignore[typeddict-item]

    def packed(self, variant: Variant, at: int) -> Any:
        """Return the plan of a step as the program takes it."""
        return pack(plan_of(self.cached, at, 1, begin=at == 0), self.setting.config(variant).pack)

    def run(self, variant: Variant, program: Any, packed: Any) -> Any:
        """Run a program; return its tokens, or for a first half what it gives."""
        if variant.part == "forward":
            self.state, self.half, _ = program(self.params, self.state, packed)
            return self.half.runs
        if variant.part == "finish":
            sampled, outputs = program(self.head, sampling_state(self.state), self.half)
            self.state = {**self.state, **sampled}
            return outputs.tokens
        self.state, outputs = program(self.params, self.state, packed)
        return outputs.tokens


def measured(steps: Steps, variant: Variant, program: Any, context: int, live: int | None) -> dict[str, Any]:
    """Return the times of a variant, with so many rows that run, if not with as many as there are."""
    steps.lay_out(min(variant.rows, live or variant.rows), context, 8 * COUNT)
    plans = iter(range(7 * COUNT))
    launches = Launches(lambda: steps.packed(variant, next(plans)), lambda placed: steps.run(variant, program, placed))
    found = launches.all(numpy=variant.part == "step")
    tokens = np.asarray(launches.one(steps.packed(variant, next(plans)), [])).tolist()[:3]
    return {"tokens": tokens, **found}


def kernels_of(steps: Steps, variant: Variant, program: Any) -> dict[str, Any]:
    """Trace a few steps: kernels in a step, how long the device computes, and how long it waits."""
    at = iter(range(7 * COUNT, 8 * COUNT))

    def run() -> None:
        packed = [steps.packed(variant, next(at)) for _ in range(5)]
        tokens = [steps.run(variant, program, jax.device_put(each)) for each in packed]
        np.asarray(tokens[-1])

    found = traced(run)
    names = list(dict.fromkeys(kernel.name for kernel in found))
    events = [(names.index(kernel.name), kernel.begin, kernel.duration) for kernel in found]
    return {"steps": 5, "names": names, "kernels": events, "host": on_host(run)}


def _program(setting: Setting, variant: Variant, folder: Path | None) -> tuple[Any, dict[str, Any]]:
    """Load or compile a program; return it, and how long that took."""
    begin = time.perf_counter()
    found, why = None, None
    if folder is not None:
        try:
            found = elsewhere.load(folder, variant.name)
        except Exception as error:  # jaxlib raises many types
            why = f"{type(error).__name__}: {error}"[:400]
    if found is not None:
        return found, {"loaded_seconds": time.perf_counter() - begin}
    lowered = setting.lowered(variant, lambda tree: tree)
    traced_at = time.perf_counter()
    program = lowered.compile()
    about = {"traced_seconds": traced_at - begin, "compiled_seconds": time.perf_counter() - traced_at}
    return program, {**about, **({"not_loaded": why} if why else {})}


def compile_all(folder: Path, variants: Sequence[Variant]) -> None:
    """Compile programs without a GPU, and those that make their arguments."""
    settings: dict[int, Setting] = {}
    with elsewhere.for_h200() as place:
        for variant in variants:
            setting = settings.setdefault(variant.layers, Setting(variant.layers))
            where = place(jax.eval_shape(lambda: jnp.zeros(1))).sharding
            lower: dict[str, Callable[[], jax.stages.Lowered]] = {
                f"made-{variant.layers}": jax.jit(setting.made(), out_shardings=where).lower,
                variant.name: partial(setting.lowered, variant, place),
            }
            for name in [name for name in lower if not elsewhere.is_kept(folder, name)]:
                begin = time.perf_counter()
                lowered = lower[name]()
                traced_at = time.perf_counter()
                program = lowered.compile()
                seconds = f"traced {traced_at - begin:.1f} s, compiled {time.perf_counter() - traced_at:.1f} s"
                print(f"{name}: {seconds}, {elsewhere.keep(folder, name, program) / 1e6:.2f} MB", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Compile, or measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of variants")
    parser.add_argument("--compile", type=Path, help="folder to write programs to, without a GPU")
    parser.add_argument("--programs", type=Path, help="folder with programs")
    parser.add_argument("--context", type=int, default=1_536, help="tokens of a row")
    parser.add_argument("--live", type=int, help="rows of each step that run; the others are empty")
    parser.add_argument("--traces", type=Path, help="file to write the kernels of a few steps to")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no variant begins")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    variants = [variant for variant in VARIANTS if variant.name in args.only] if args.only else list(VARIANTS)
    variants.sort(key=lambda variant: args.only.index(variant.name) if args.only else 0)
    if args.compile:
        compile_all(args.compile, variants)
        return
    measure_all(variants, args)


def measure_all(variants: Sequence[Variant], args: argparse.Namespace) -> None:
    """Measure one variant after another; write the files after each."""
    until = time.monotonic() + args.seconds
    rows, traces = list[dict[str, Any]](), list[dict[str, Any]]()
    facts = {"device": jax.devices()[0].device_kind, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    steps: Steps | None = None
    for variant in variants:
        row: dict[str, Any] = {"name": variant.name, "context": args.context, "live": args.live or variant.rows}
        rows.append(row)
        if time.monotonic() > until:
            row["why"] = "the time is up"
            continue
        try:
            if steps is None or steps.setting.layers != variant.layers:
                steps = None  # frees its arrays
                begin = time.perf_counter()
                steps = _steps(variant, args.programs)
                row["made_seconds"] = time.perf_counter() - begin
            program, took = _program(steps.setting, variant, args.programs)
            row |= took
            row |= measured(steps, variant, program, args.context, args.live)
            if args.traces:
                found = kernels_of(steps, variant, program)
                traces.append({"rows": variant.rows, "name": variant.name, "context": args.context, **found})
                result_file.write(args.traces, {**facts, "traces": traces})
        except Exception as error:  # the next variant may run
            row["why"] = f"{type(error).__name__}: {error}"[:600]
            steps = None
        print(row, flush=True)
        if args.json:
            memory = jax.devices()[0].memory_stats()
            result_file.write(args.json, {**facts, "memory_stats": memory is not None, "launch": rows})


def _steps(variant: Variant, folder: Path | None) -> Steps:
    """Make parameters and state."""
    setting = Setting(variant.layers, small=variant.kernels == "cpu")
    make = None if folder is None else elsewhere.load(folder, f"made-{variant.layers}")
    steps = Steps(setting, *(make or jax.jit(setting.made()))())
    jax.block_until_ready(steps.params)  # type: ignore[no-untyped-call]
    return steps


if __name__ == "__main__":
    main()

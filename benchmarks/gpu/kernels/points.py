"""Kernels at the sizes for which other engines' figures are known: device time by the profiler.

    python -m benchmarks.gpu.kernels.points [--only NAME ...] [--programs FOLDER] [--json FILE] [--small]
    .venv-gpu/bin/python -m benchmarks.gpu.kernels.points --compile FOLDER [--only NAME ...]      without a GPU

A program calls one kernel six times, with weights or pages that exceed the L2 cache together. `us`: median, least and
most microseconds of each kernel in five runs, and their number; `kernel`: the median of Mosaic's, whose bandwidth is
given; `busy`: all kernels of a call, also those that compute indices, which a step runs once for all layers.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.gpu import elsewhere
from benchmarks.gpu.engine.step_trace import Kernel, traced
from benchmarks.gpu.kernels import attention
from benchmarks.gpu.kernels.attention_cases import Measure
from benchmarks.gpu.kernels.tune_experts import SCALE, chosen, rows_of_experts
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.experts.groups import group_rows
from pallas_kernels.experts.hopper.call import grouped_matmul
from pallas_kernels.experts.hopper.heuristics import clustered_tuning, default_tuning, shared_tuning
from pallas_kernels.experts.hopper.launch import Shape
from pallas_kernels.experts.mxfp4 import Mxfp4Joined
from tools.cases.kernels.attention_layers import DECODE_LAYERS
from tools.cases.kernels.experts import LAYERS
from tools.cases.kernels.experts_shapes import MATRICES, arguments

_CALLS, _RUNS = 6, 5
_TUNINGS = {"default": default_tuning, "shared": shared_tuning, "clustered": clustered_tuning}
_FACTORS = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)  # of the axes
_LARGE = 30e9  # bytes of pages, of which one set is enough


@dataclass(frozen=True)
class Point:
    """A kernel at a size: its name, the bytes that must move, what makes its arguments, and what calls it."""

    name: str
    bytes: float
    made: Callable[[], list[Any]]
    call: Callable[..., Any]

    def run(self, *calls: Any) -> list[Any]:
        """Call the kernel with each of the arguments."""
        return [self.call(*each) for each in calls]


def attention_points() -> Iterator[Point]:
    """Yield decode attention over pages."""
    layers = {layer.name: layer for layer in DECODE_LAYERS}
    sizes = (
        ("gpt-oss-20b full", 64, 8_192), ("gpt-oss-20b full", 64, 32_768), ("gpt-oss-20b full", 256, 1_536),
        ("gpt-oss-20b full", 1, 32_768), ("gpt-oss-20b full", 64, 1_536), ("gemma-3-27b full", 64, 1_536),
        ("gemma-3-27b full", 64, 32_768), ("gemma-3-27b local", 256, 8_192), ("gpt-oss-20b full", 1, 1_536),
        ("gpt-oss-20b local", 64, 8_192),
    )  # fmt: skip
    for name, batch, context in sizes:
        layer = replace(layers[name], batch=batch, context=context, layers_per_page=1)
        for kernel in ("mosaic_splits", "mosaic"):
            measure = Measure(layer)
            static: dict[str, Any] = {}

            def made(measure: Measure = measure, kernel: Any = kernel, static: dict[str, Any] = static) -> list[Any]:
                count = 1 if measure.bytes > _LARGE else _CALLS
                keywords, given = attention.paged_arguments(measure, jnp.dtype("bfloat16"), count, kernel)
                sinks = keywords.pop("sinks")
                static.update(keywords)
                return [(sinks, *given[n % len(given)]) for n in range(_CALLS)]

            def call(sinks: Any, *each: Any, kernel: Any = kernel, static: dict[str, Any] = static) -> Any:
                return paged_attention(*each, **static, sinks=sinks, implementation=kernel, sms=132)

            yield Point(f"{name} {batch}x{context} {kernel}".replace(" ", "-"), measure.bytes, made, call)


def expert_points() -> Iterator[Point]:
    """Yield the products of MXFP4 experts."""
    layers = {layer.name: layer for layer in LAYERS}
    joined, tiles = layers["gpt-oss-20b, 4 bits, overlap"], layers["gpt-oss-20b, 4 bits"]
    ways = {
        "default": (joined, (8, 128, 512, 2_048, 1, 64, 256)),
        "shared": (joined, (64, 8, 1)),
        "clustered": (joined, (128, 256, 512)),
        "mosaic": (tiles, (64, 8, 1, 128)),
    }
    for way, (layer, every) in ways.items():
        for tokens in every:
            for matrix in MATRICES:
                given = arguments(layer, matrix, tokens)
                sizes = rows_of_experts(layer, tokens)
                size = layer.weight_bytes(float((sizes > 0).sum())) * (2 / 3 if matrix == "up" else 1 / 3)

                def made(layer: Any = layer, given: Any = given, tokens: int = tokens) -> list[Any]:
                    groups, _, _ = group_rows(jnp.asarray(chosen(layer, tokens)), layer.experts)
                    sets = [_filled(given.weights, n) for n in range(2)]
                    bias = None if given.bias is None else jnp.zeros(given.bias.shape, given.bias.dtype)
                    x = [_normal(given.x, n) for n in range(_CALLS)]
                    return [(x[n], sets[n % 2], groups, bias) for n in range(_CALLS)]

                def call(x: Any, weights: Any, groups: Any, bias: Any, given: Any = given, way: str = way) -> Any:
                    shape = Shape.of(x, weights, bias, given.gated)
                    tuning = _TUNINGS.get(way, default_tuning)(shape)
                    return grouped_matmul(x, weights, groups, bias, given.gated, tuning)

                yield Point(f"experts-{tokens}-{matrix}-{way}", size, made, call)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _hashed(shape: tuple[int, ...], seed: int, kind: Any) -> jax.Array:
    """Return bits that look random, by a hash that compiles quickly."""
    at = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        at += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(_FACTORS[axis])
    at = (at + jnp.uint32(seed * 7919 + 1)) * jnp.uint32(2_654_435_761)
    at = (at ^ (at >> 15)) * jnp.uint32(2_246_822_519)
    at = at ^ (at >> 13)
    if jnp.issubdtype(kind, jnp.floating):
        numbers: jax.Array = (at.astype(jnp.int32).astype(jnp.float32) * 2.0**-31 * 1.7).astype(kind)
        return numbers
    bits = at.astype(jnp.dtype(f"uint{8 * jnp.dtype(kind).itemsize}"))
    codes: jax.Array = jax.lax.bitcast_convert_type(bits, kind)
    return codes


def _normal(like: Any, seed: int) -> jax.Array:
    out: jax.Array = _hashed(tuple(like.shape), seed, like.dtype)
    return out


def _filled(like: Any, seed: int) -> Any:
    """Return random codes in tiles, with scales that give results of about unit size."""
    if isinstance(like, Mxfp4Joined):
        return type(like)(*(_scaled(_hashed(tuple(each.shape), seed, each.dtype)) for each in like))
    words, scales = like
    return type(like)(_hashed(tuple(words.shape), seed, words.dtype), jnp.full(scales.shape, _scales(), scales.dtype))


def _scales() -> np.int16:
    return np.uint16(SCALE | SCALE << 8).astype(np.int16)


@partial(jax.jit, donate_argnums=0)
def _scaled(lines: jax.Array) -> jax.Array:
    return lines.at[..., -1, :].set(_scales())


def figures(point: Point, program: Any, *, plain: bool = False) -> dict[str, Any]:
    """Run a point's program and return its times; `plain`: run it twice, for a profiler outside."""
    given = point.made()
    for _ in range(2 if plain else 3):
        jax.block_until_ready(program(*given))  # type: ignore[no-untyped-call]
    if plain:
        return {}
    begin = time.perf_counter()
    jax.block_until_ready([program(*given) for _ in range(_RUNS)])  # type: ignore[no-untyped-call]
    by_host = (time.perf_counter() - begin) / (_RUNS * _CALLS)

    def run() -> None:
        for _ in range(_RUNS):
            jax.block_until_ready(program(*given))  # type: ignore[no-untyped-call]

    return {"us_by_host": 1e6 * by_host, **of_kernels(traced(run), point.bytes)}


def of_kernels(found: Sequence[Kernel], size: float) -> dict[str, Any]:
    """Return the median of each kernel, of a whole call, and the bandwidth."""
    names = list(dict.fromkeys(kernel.name for kernel in found))
    each = {name: sorted(k.duration / 1e3 for k in found if k.name == name) for name in names}
    own = sorted(k.duration / 1e3 for k in found if "mosaic" in k.name)
    busy = sum(map(sum, each.values())) / (_CALLS * _RUNS)
    return {
        "us": {name: [statistics.median(times), times[0], times[-1], len(times)] for name, times in each.items()},
        "kernel": statistics.median(own) if own else None,
        "busy": busy,
        "terabytes_per_s": size / statistics.median(own) / 1e6 if own else None,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Compile, or measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="only points whose names contain one of these")
    parser.add_argument("--compile", type=Path, help="folder to write programs to, without a GPU")
    parser.add_argument("--programs", type=Path, help="folder with programs")
    parser.add_argument("--plain", action="store_true", help="measure nothing: another profiler does")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no point begins")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    every = [p for p in (*attention_points(), *expert_points()) if any(word in p.name for word in args.only)]
    if args.compile:
        compile_all(every, args.compile)
        return
    began, rows = time.monotonic(), list[dict[str, Any]]()
    for point in every:
        if time.monotonic() - began > args.seconds:
            break
        row: dict[str, Any] = {"name": point.name, "bytes": point.bytes}
        begin = time.perf_counter()
        try:
            program = elsewhere.loaded(args.programs, point.name, row)
            row |= figures(point, program or jax.jit(point.run), plain=args.plain)
        except Exception as error:  # the next one may run
            row["why"] = f"{type(error).__name__}: {error}"[:400]
        row["seconds"] = time.perf_counter() - begin
        rows.append(row)
        print(row, flush=True)
        if args.json:
            result_file.write(args.json, {"device": jax.devices()[0].device_kind, "points": rows})


def compile_all(every: Sequence[Point], folder: Path) -> None:
    """Compile without a GPU."""
    with elsewhere.for_h200() as place:
        for point in every:
            if elsewhere.is_kept(folder, point.name):
                continue
            begin = time.perf_counter()
            try:
                shapes = place(jax.eval_shape(point.made))
                size = elsewhere.keep(folder, point.name, jax.jit(point.run).lower(*shapes).compile())
            except Exception as error:  # the next one may be compiled
                print(f"{point.name}: {type(error).__name__}: {error}"[:600], flush=True)
                continue
            print(f"{point.name}: {time.perf_counter() - begin:.1f} s, {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()

"""Sweep of the Hopper grouped matmul: the default tuning and the best one, for layers and batches of released models.

    python -m benchmarks.gpu.kernels.tune_experts [--only NAME] [--seconds 80] [--json FILE] [--clusters] [--smoke]

Tokens choose their experts at random. Every tuning that fits the GPU is timed once while the time of its measure lasts,
and the best few again beside the default, which is the baseline. `bytes` are the weights of the experts that have rows,
each read once; `share` is that of a large copy in the same run. --clusters tries thread blocks that copy rows for each
other too, which was never timed. --smoke runs a tiny layer on XLA, on any machine.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.gpu.kernels.attention import CACHE_BYTES, ceilings
from benchmarks.gpu.kernels.device_time import Timing, calls_worth_timing, time_calls
from pallas_kernels.experts.api import grouped_matmul
from pallas_kernels.experts.eight_bits import BlockTiles8, Tiles8
from pallas_kernels.experts.groups import Groups, group_rows
from pallas_kernels.experts.hopper.call import grouped_matmul as hopper
from pallas_kernels.experts.hopper.heuristics import default_tuning
from pallas_kernels.experts.hopper.launch import Shape, Tuning, launch
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.mxfp4 import SHIFT, TILE, WORD_LINES, Mxfp4Joined, Mxfp4Tiles, joined
from tools.cases.kernels.experts import DECODE_TOKENS, LAYERS, SILU, Layer
from tools.cases.kernels.experts_shapes import MATRICES, Matrix, arguments

_BEST = 3  # tunings that are timed again
_TOLERANCE = 6e-2
_TOKENS = (*DECODE_TOKENS, 512, 2048)
_SMOKE = Layer("smoke", 4, 2, 64, 64, SILU)
SCALE = 120 + 126 - SHIFT  # 2^-7 as tiles hold it: numbers are about 3, so results are of about unit size
Arrays = tuple[jax.Array, Any, Groups, jax.Array | None]


def main(words: Sequence[str] | None = None) -> None:
    """Sweep one measure after another until the time is up; write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="gpt-oss-20b, 4 bits", help="only layers whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(_TOKENS), help="tokens of a step")
    parser.add_argument("--seconds", type=float, default=80, help="of all measures, which share it")
    parser.add_argument("--clusters", action="store_true", help="try clusters of two thread blocks too")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer on any machine; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    layers = [_SMOKE] if args.smoke else [layer for layer in LAYERS if args.only in layer.name]
    work = list(itertools.product(layers, args.tokens, MATRICES))
    roof = ceilings(jnp.dtype("float32" if args.smoke else "bfloat16"), size=256 if args.smoke else 8_192)
    end, rows = time.monotonic() + args.seconds, []
    for done, (layer, tokens, matrix) in enumerate(work):
        until = time.monotonic() + max(0.0, (end - time.monotonic()) / (len(work) - done))
        row = sweep(layer, tokens, matrix, roof["copy_bytes_per_s"], until, smoke=args.smoke, clusters=args.clusters)
        rows.append(row)
        print(rows[-1], flush=True)
        if args.json:
            device = jax.devices()[0].device_kind
            result_file.write(args.json, {"device": device, "ceilings": roof, "experts": rows})


def sweep(
    layer: Layer, tokens: int, matrix: Matrix, roof: float, until: float, *, smoke: bool, clusters: bool = False
) -> dict[str, Any]:
    """Return the row of one measure: the default's time, the best tuning's, and how many were tried."""
    given = arguments(layer, matrix, tokens)
    sizes = rows_of_experts(layer, tokens)
    size = layer.weight_bytes(float((sizes > 0).sum())) * (2 / 3 if matrix == "up" else 1 / 3)
    count = calls_worth_timing(max(size / 4e12, 4e-6))
    arrays = _fill(layer, matrix, tokens, sizes, min(count, int(CACHE_BYTES / size) + 1))
    calls = [arrays[n % len(arrays)] for n in range(count)]
    row: dict[str, Any] = {"layer": layer.name, "matrix": matrix, "tokens": tokens, "bytes": size}
    shape = Shape.of(*arrays[0][:2], arrays[0][3], given.gated)
    first = default_tuning(shape)
    tunings = candidates(shape, first, clusters=clusters)
    default, (best, fastest), tried = _search(_caller(given.gated, smoke=smoke), calls, tunings, first, until)
    return {
        **row,
        "default": {**asdict(default), "tuning": first._asdict()},
        "best": {**asdict(fastest), "tuning": best._asdict()},
        "tried": tried,
        "share": size / fastest.median / roof,
        "default_share": size / default.median / roof,
    }


def _search(
    call: Callable[..., Any], calls: Sequence[Arrays], tunings: Iterator[Tuning], first: Tuning, until: float
) -> tuple[Timing, tuple[Tuning, Timing], int]:
    """Return the default's time, the best tuning with its time, and the number of tunings that were tried."""
    default, wanted = time_calls(partial(call, first), calls), _result(partial(call, first), calls[0])
    quick: dict[Tuning, Timing] = {}
    for tuning in tunings:
        if time.monotonic() > until:
            break
        quick[tuning] = time_calls(partial(call, tuning), calls, repeats=1)
    best = first, default
    for tuning in sorted(quick, key=lambda tuning: quick[tuning].median)[:_BEST]:
        timing = time_calls(partial(call, tuning), calls)
        right = np.allclose(_result(partial(call, tuning), calls[0]), wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
        if timing.most < best[1].least and right:
            best = tuning, timing
    return default, best, len(quick)


def candidates(shape: Shape, first: Tuning, *, clusters: bool = False) -> Iterator[Tuning]:
    """Yield the tunings that fit the shared memory, those that are like the default first; also with `clusters`."""
    found = []
    sizes = sorted({8, 16, 32, 64, 128, first.rows})
    others = (1, 2) if clusters else (1,), (False, True) if shape.overlaps else (False,)
    ways = itertools.product(sizes, (1, 2, 3), sorted({1, first.parts}), (2, 3, 4, 6), (1, 2, 3), *others)
    for rows, consumers, parts, stages, depth, cluster, shared in ways:
        sides = {"rows": rows, "consumers": consumers, "parts": parts}
        deep = {"stages": stages, "depth": 1 if shape.held == "plain" else depth}
        tuning = first._replace(**sides, **deep, cluster=cluster, shared=shared)
        try:
            launch(shape, tuning)
        except ValueError:
            continue
        found.append((sum(one != other for one, other in zip(tuning, first, strict=True)), tuning))
    yield from dict.fromkeys(tuning for _, tuning in sorted(found))


def _caller(gated: Any, *, smoke: bool) -> Callable[..., Any]:
    def call(tuning: Tuning, x: jax.Array, weights: Any, groups: Groups, bias: Any) -> jax.Array:
        if smoke:  # XLA stands in for the kernel on a machine that cannot run it
            return grouped_matmul(x, weights, groups, bias=bias, gated=gated, implementation="xla")
        return hopper(x, weights, groups, bias, gated, tuning)

    return call


def _result(call: Callable[..., Any], arrays: Arrays) -> np.ndarray:
    """Return the rows that belong to an expert."""
    out = np.asarray(jax.jit(call)(*arrays).astype(jnp.float32))
    groups = arrays[2]
    owned = [np.arange(size) + start for start, size in zip(*map(np.asarray, groups), strict=True)]
    return np.asarray(out[np.concatenate(owned)])


def rows_of_experts(layer: Layer, tokens: int) -> np.ndarray:
    return np.bincount(chosen(layer, tokens).reshape(-1), minlength=layer.experts)


def chosen(layer: Layer, tokens: int) -> np.ndarray:
    """Return the experts of each token, no expert twice."""
    random = np.random.default_rng(tokens)
    return np.argsort(random.random((tokens, layer.experts)), axis=1)[:, : layer.top_k].astype(np.int32)


def _fill(layer: Layer, matrix: Matrix, tokens: int, sizes: np.ndarray, sets: int) -> list[Arrays]:
    """Return arguments of calls, with weights of their own until these exceed the cache together."""
    given, key = arguments(layer, matrix, tokens), jax.random.key(0)
    groups, _, _ = group_rows(jnp.asarray(chosen(layer, tokens)), layer.experts)
    assert np.asarray(groups.sizes).tolist() == sizes.tolist()

    def normal(like: Any, seed: int, scale: float = 1.0) -> jax.Array:
        draw = jax.random.normal(jax.random.fold_in(key, seed), like.shape, like.dtype)
        return draw * jnp.asarray(scale, like.dtype)

    def weights(seed: int) -> Any:
        if layer.form != "plain":
            return _tiles(given.weights, jax.random.fold_in(key, seed), given.x.shape[1])
        return normal(given.weights, seed, given.x.shape[1] ** -0.5)

    bias = None if given.bias is None else normal(given.bias, 1)
    return [(normal(given.x, 2 + 2 * n), weights(3 + 2 * n), groups, bias) for n in range(sets)]


def _tiles(like: Any, key: jax.Array, inputs: int) -> Any:
    """Return random codes in tiles of this form and shape, with scales that give results of about unit size."""
    if isinstance(like, Tiles8):
        codes = jax.random.bits(key, like.codes.shape, "uint8")
        if like.kind == "int8":
            scale, codes = inputs**-0.5 / 74, jax.lax.bitcast_convert_type(codes, jnp.int8)
        else:
            scale, codes = inputs**-0.5 / 70, codes & 0xF7  # without NaN
        return Tiles8(codes, jnp.full(like.scales.shape, scale, jnp.float32))
    if isinstance(like, BlockTiles8):
        codes = jax.random.bits(key, like.codes.shape, "uint8") & 0xF7  # without NaN
        return BlockTiles8(codes, jnp.full(like.scales.shape, inputs**-0.5 / 70, jnp.float32))
    if isinstance(like, Int4Tiles):
        lines = jax.lax.bitcast_convert_type(jax.random.bits(key, like.tiles.shape, "uint16"), jnp.int16)
        scale = jax.lax.bitcast_convert_type(jnp.bfloat16(inputs**-0.5 / 4.6), jnp.int16)
        lines = lines.at[..., WORD_LINES + 3 :, :].set(0)  # rests of scales
        lines = lines.at[..., WORD_LINES : WORD_LINES + 2, :].set(scale)
        return Int4Tiles(lines.at[..., WORD_LINES + 2, :].set(8 | 8 << 8))  # zero points
    across_along = like[0].shape[:3]
    words = jax.random.bits(key, (*across_along, 4, 128), "uint32")
    scales = jnp.full((*across_along, TILE), SCALE | SCALE << 8, jnp.uint16).astype(jnp.int16)
    tiles = Mxfp4Tiles(jax.lax.bitcast_convert_type(words, jnp.int32), scales)
    return joined(tiles) if isinstance(like, Mxfp4Joined) else tiles


if __name__ == "__main__":
    main()

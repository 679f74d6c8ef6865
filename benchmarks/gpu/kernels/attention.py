"""Attention kernels at serving sizes beside baselines: microseconds, share of the bandwidth, TFLOP/s.

    python -m benchmarks.gpu.kernels.attention [--only NAME] [--json FILE] [--implementations mosaic cudnn] [--smoke]

Baselines of the same run: a large copy and a large matrix product (the ceilings), and cuDNN through `jax.nn` on
contiguous K and V. `benchmarks.gpu.kernels.torch_attention` adds SDPA and compiled flex_attention in a run of its own.
Bytes and FLOP are those inside the layer's window. A kernel that cannot run a measure is listed with the reason. Needs
a GPU, except for --smoke.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.gpu.kernels.attention_cases import MEASURES, SMOKE, Measure
from benchmarks.gpu.kernels.device_time import Timing, calls_worth_timing, time_calls
from pallas_kernels.attention.api import Implementation, paged_attention, tile_tokens
from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles, tile_rows

CACHE_BYTES = 300e6  # several times the L2 of an H200: arguments beyond that are cold
_FEW_ROWS = 64  # for which a product waits for the matrix alone
_LONGEST = 131_072  # tokens that the page table of a full layer covers
_GUESS = 4e12, 600e12  # bytes and FLOP per second, to choose the number of calls


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only measures whose label contains this")
    parser.add_argument("--implementations", nargs="+", default=["mosaic", "cudnn"], help="to measure")
    parser.add_argument("--calls", type=int, default=48, help="most calls in a program")
    parser.add_argument("--smoke", action="store_true", help="small sizes on any machine; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing is measured")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    measures = SMOKE if args.smoke else MEASURES
    end = time.monotonic() + args.seconds
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    results["ceilings"] = ceilings(dtype, size=512 if args.smoke else 8_192)
    print(f"copy {results['ceilings']['copy_bytes_per_s'] / 1e12:.2f} TB/s, ", end="")
    print(f"matrix product {results['ceilings']['flops'] / 1e12:.0f} TFLOP/s")
    results["attention"] = []
    for measure in measures:
        if args.only in measure.label:
            late = time.monotonic() > end
            row = {"label": measure.label, **asdict(measure), "bytes": measure.bytes, "flops": measure.flops}
            row["seconds"] = {
                name: "the time is up" if late else timed(name, measure, dtype, args.calls)
                for name in args.implementations
            }
            results["attention"].append(row)
            print_row(row, results["ceilings"])
            if args.json:  # after each measure, because a run may be cut off
                result_file.write(args.json, results)


def ceilings(dtype: jnp.dtype, size: int) -> dict[str, float]:
    """Measure bytes per second, and FLOP per second of a large matrix product.

    The bytes are those of a large copy (read and written), or of a matrix that few rows are multiplied with, if that is
    faster: on an H200 XLA's copy reaches 3.2 TB/s, and such a product 4.1.
    """
    block = jnp.ones((size, size), dtype)
    large = [jnp.full((4 * size, size), n, dtype) for n in range(6)]
    copied = time_calls(lambda x: x + 1, [(x,) for x in large])
    few = jnp.ones((_FEW_ROWS, 4 * size), dtype)
    read = time_calls(lambda x, y: x @ y, [(few, x) for x in large])
    product = time_calls(lambda x, y: x @ y, [(block * n, block) for n in range(1, 7)])
    return {
        "copy_bytes_per_s": large[0].nbytes * max(2 / copied.median, 1 / read.median),
        "flops": 2 * size**3 / product.median,
    }


def timed(implementation: str, measure: Measure, dtype: jnp.dtype, most_calls: int) -> dict[str, float] | str:
    """Return seconds of one call, or the reason why it cannot be measured."""
    count = call_count(measure, most_calls)
    call: Callable[..., Any]
    try:
        if implementation == "cudnn":
            call, arguments = contiguous(measure, dtype, count)
        else:
            named = cast(Implementation, implementation)
            keywords, arguments = paged_arguments(measure, dtype, count, named)
            call = partial(paged_attention, **keywords, implementation=named)
        timing: Timing = time_calls(call, arguments)
    except (ValueError, NotImplementedError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return asdict(timing)


def call_count(measure: Measure, most: int) -> int:
    """Return the number of calls to time, from the shortest time that the GPU could take."""
    return calls_worth_timing(max(measure.bytes / _GUESS[0], measure.flops / _GUESS[1], 4e-6), most)


def paged_arguments(
    measure: Measure, dtype: jnp.dtype, count: int, implementation: Implementation
) -> tuple[dict[str, Any], list[tuple[jax.Array, jax.Array, PagedRows, QueryTiles]]]:
    """Return keywords for all calls, and the arguments of `count` calls in one arena.

    Each call has queries of its own, and pages of its own until all pages together exceed the cache. Page tables are as
    wide as in an engine: cut to the window in local layers, for `_LONGEST` tokens in full layers.
    """
    layer, queries = measure.layer, measure.queries
    heads, kv_heads, head_dim, v_dim = layer.heads
    page, start = layer.page_size, layer.context - queries
    first = measure.first_key(start)
    columns = -(-layer.context // page) - first // page
    local = layer.window is not None or layer.chunk is not None
    width = columns + 1 if local else max(columns, _LONGEST // page)
    sets = min(count, int(CACHE_BYTES / measure.bytes) + 1)
    pages = 1 + sets * layer.batch * columns
    ids = np.random.default_rng(0).permutation(np.arange(1, pages, dtype=np.int32))
    tables = np.zeros((sets, layer.batch, width), np.int32)
    tables[:, :, :columns] = ids.reshape(sets, layer.batch, columns)
    counts, starts, first_page, zeros = (
        jnp.full(layer.batch, n, jnp.int32) for n in (queries, start, first // page, 0)
    )
    token_row = jnp.arange(layer.batch * queries, dtype=jnp.int32) // queries
    size = tile_tokens(implementation, heads // kv_heads)
    tiles = tile_rows(counts, jnp.cumsum(counts) - counts, token_row, min(size, queries))
    key = jax.random.key(0)
    kv = _random(key, (pages, layer.layers_per_page, kv_heads, page, measure.numbers), dtype)
    q = [_random(jax.random.fold_in(key, n), (len(token_row), heads, head_dim), dtype) for n in range(count)]
    rows = [PagedRows(starts, counts, jnp.asarray(table), first_page, zeros) for table in tables]
    attend = AttentionParams(head_dim**-0.5, layer.window, layer.chunk, layer.softcap, v_dim)
    sinks = jnp.zeros(heads, dtype) if layer.sinks else None
    keywords = {"attend": attend, "layer_index": layer.layers_per_page - 1, "sinks": sinks}
    return keywords, [(q[n], kv, rows[n % sets], tiles) for n in range(count)]


def contiguous(measure: Measure, dtype: jnp.dtype, count: int) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """Return cuDNN attention on the visible K and V of each row, contiguous, and its arguments.

    Raises NotImplementedError for sinks, softcap, chunks and prefixes, which cuDNN lacks.
    """
    layer, queries = measure.layer, measure.queries
    heads, kv_heads, head_dim, v_dim = layer.heads
    if queries not in (1, layer.context) or layer.row or layer.sinks or layer.softcap:
        raise NotImplementedError("cuDNN has no sinks, softcap, prefixes, or overlapping K and V")
    if layer.chunk is not None and layer.chunk < layer.context:
        raise NotImplementedError("cuDNN has no chunks")
    sets, key = min(count, int(CACHE_BYTES / measure.bytes) + 1), jax.random.key(0)
    keys = [
        tuple(_random(jax.random.fold_in(key, 2 * n + i), (layer.batch, measure.keys, kv_heads, size), dtype)
              for i, size in enumerate((head_dim, v_dim)))
        for n in range(sets)
    ]  # fmt: skip
    q = [_random(jax.random.fold_in(key, n), (layer.batch, queries, heads, head_dim), dtype) for n in range(count)]
    prefill = queries > 1
    window = (layer.window - 1, 0) if prefill and layer.window else None
    call = partial(jax.nn.dot_product_attention, is_causal=prefill, local_window_size=window, implementation="cudnn")
    return call, [(q[n], *keys[n % sets]) for n in range(count)]


def _random(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    out: jax.Array = jax.jit(lambda: jax.random.normal(key, shape, dtype))()
    return out


def print_row(row: dict[str, Any], ceiling: dict[str, float]) -> None:
    """Print a line per implementation."""
    for name, seconds in row["seconds"].items():
        if isinstance(seconds, str):
            print(f"{row['label']:56} {name:8} not measured: {seconds}")
            continue
        median = seconds["median"]
        print(
            f"{row['label']:56} {name:8} {1e6 * median:9.1f} µs "
            f"({1e6 * seconds['least']:.1f} to {1e6 * seconds['most']:.1f}), "
            f"{row['bytes'] / median / ceiling['copy_bytes_per_s']:6.1%} of a copy, "
            f"{row['flops'] / median / 1e12:6.1f} TFLOP/s"
        )


if __name__ == "__main__":
    main()

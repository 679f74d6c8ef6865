"""Baselines for `benchmarks.gpu.kernels.attention` in torch: SDPA and compiled flex_attention on contiguous K and V.

    python -m benchmarks.gpu.kernels.torch_attention [--only NAME] [--json FILE] [--smoke]

Imports torch and not jax, so that it has the GPU to itself. In decode SDPA gets only the keys inside the window; a
paged cache would have to gather them first, so its figure is a bound and not a rival.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import result_file
from benchmarks.gpu.kernels.attention_cases import MEASURES, SMOKE, Measure

_CALLS, _REPEATS = 20, 7
_CACHE_BYTES = 300e6  # several times the L2 of an H200: arguments beyond that are cold
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only measures whose label contains this")
    parser.add_argument("--smoke", action="store_true", help="small sizes on any machine; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing is measured")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    rows, end = [], time.monotonic() + args.seconds
    for measure in SMOKE if args.smoke else MEASURES:
        if args.only not in measure.label:
            continue
        late = time.monotonic() > end
        seconds = {
            name: "the time is up" if late else timed(make, measure) for name, make in (("sdpa", sdpa), ("flex", flex))
        }
        rows.append({"label": measure.label, "seconds": seconds})
        print(f"{measure.label:56} {seconds}")
        if args.json:
            result_file.write(args.json, {"attention": rows})


def timed(make: Callable[[Measure], Callable[..., Any]], measure: Measure) -> dict[str, float] | str:
    """Return seconds of one call, or the reason why it cannot be measured."""
    try:
        call = make(measure)
        return _time(call, [_inputs(measure) for _ in range(min(_CALLS, int(_CACHE_BYTES / measure.bytes) + 1))])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def sdpa(measure: Measure) -> Callable[..., Any]:
    """Return torch's best kernel for causal attention. Raises NotImplementedError if it would need a dense mask."""
    layer = measure.layer
    if layer.row or layer.sinks or layer.softcap:
        raise NotImplementedError("SDPA has no sinks, softcap or overlapping K and V")
    prefill = measure.queries > 1
    if prefill and (measure.queries != layer.context or measure.first_key(layer.context - 1) > 0):
        raise NotImplementedError("SDPA is causal from the first key on, or takes a dense mask")
    return partial(scaled_dot_product_attention, is_causal=prefill, enable_gqa=True)


def flex(measure: Measure) -> Callable[..., Any]:
    """Return compiled flex_attention with the block mask of the window. Raises NotImplementedError for sinks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    layer = measure.layer
    if layer.row or layer.sinks:
        raise NotImplementedError("flex_attention has no sinks or overlapping K and V")
    offset, reach, chunk = measure.keys - measure.queries, layer.window or 2**30, layer.chunk or 2**30

    def visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        position = query + offset
        return (key <= position) & (key > position - reach) & (key // chunk == position // chunk)

    mask = create_block_mask(visible, None, None, measure.queries, measure.keys, device=_device())
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=mask, enable_gqa=True)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(measure: Measure) -> Inputs:
    """Return queries and the visible keys and values, [batch, heads, tokens, size] each."""
    device = _device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, kv_heads, head_dim, v_dim = measure.layer.heads
    sizes = (heads, measure.queries, head_dim), (kv_heads, measure.keys, head_dim), (kv_heads, measure.keys, v_dim)
    q, k, v = (torch.randn(measure.layer.batch, *size, device=device, dtype=dtype) for size in sizes)
    return q, k, v


def _time(call: Callable[..., Any], inputs: list[Inputs]) -> dict[str, float]:
    """Time a CUDA graph of several calls with alternating inputs; on a CPU, plain calls."""
    for _ in range(3):
        call(*inputs[0])
    if not torch.cuda.is_available():
        seconds = [_wall(call, inputs[0]) for _ in range(_REPEATS)]
        return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(_CALLS):
            call(*inputs[index % len(inputs)])
    seconds = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / _CALLS)
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def _wall(call: Callable[..., Any], inputs: Inputs) -> float:
    start = time.perf_counter()
    call(*inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

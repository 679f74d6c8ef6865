"""Autotuner of the Hopper attention kernel, for each measure of `benchmarks.gpu.kernels.attention_cases`.

    python -m benchmarks.gpu.kernels.tune_attention [--only NAME] [--seconds 240] [--out FILE] [--json FILE] [--smoke]

Every tuning that fits the GPU is timed once, and the best few again beside the default (the baseline). A tuning
replaces the default if its output is equal and it is faster by more than the spread. Writes
pallas_kernels/tuning/<device>.json, or FILE. Needs a Hopper GPU; with --smoke, small layers run on XLA in the place of
each tuning, on any machine.
"""

import argparse
import itertools
import platform
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_file
from benchmarks.gpu.kernels.attention import call_count, paged_arguments
from benchmarks.gpu.kernels.attention_cases import MEASURES, SMOKE, Measure
from benchmarks.gpu.kernels.device_time import Timing, time_calls
from pallas_kernels.attention import api
from pallas_kernels.attention.hopper.call import paged_attention
from pallas_kernels.attention.hopper.heuristics import default_tuning
from pallas_kernels.attention.hopper.launch import Shape, Tuning, launch
from pallas_kernels.attention.tuned import FOLDER, Entry, device_name, key_of, save

_BEST = 3  # tunings that are timed again
_SMOKE_TUNINGS = 1
_TOLERANCE = 2e-2  # absolute, of bfloat16 outputs of about 1


def main(words: Sequence[str] | None = None) -> None:
    """Tune one measure after another until the time is up; write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only measures whose label contains this")
    parser.add_argument("--seconds", type=float, default=240, help="start no measure after this time")
    parser.add_argument("--out", type=Path, help="table to write, instead of the tuning of this device")
    parser.add_argument("--smoke", action="store_true", help="small sizes on any machine; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="result file to write: what was gained, and what was not tuned")
    args = parser.parse_args(words)
    out: Path = args.out or FOLDER / f"{device_name()}.json"
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "python": platform.python_version()}
    entries: list[Entry] = []
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for measure in SMOKE if args.smoke else MEASURES:
        if args.only not in measure.label:
            continue
        if time.perf_counter() - begin > args.seconds:
            print(f"{measure.label}: not tuned, the time is up")
            rows.append({"label": measure.label, "why": "the time is up"})
            continue
        entry = tune(measure, smoke=args.smoke)
        gain = entry.default_seconds / entry.seconds
        print(f"{measure.label:56} {entry.tuning} {1e6 * entry.seconds:.1f} µs, {gain:.2f} times the default's speed")
        entries.append(entry)
        save(out, entries, facts)
        rows.append(
            {"label": measure.label, "seconds": entry.seconds, "default_seconds": entry.default_seconds, "gain": gain}
        )
    if args.json:
        result_file.write(args.json, {**facts, "tuned": rows})


def tune(measure: Measure, *, smoke: bool = False) -> Entry:
    """Return the best tuning of one measure; the default if no other is faster."""
    keywords, arguments = paged_arguments(
        measure, jnp.dtype("bfloat16"), call_count(measure, 3 if smoke else 24), "mosaic"
    )
    call = partial(_on_xla if smoke else paged_attention, **keywords)
    q, kv, rows, tiles = arguments[0]
    shape = Shape.of(q, kv, rows, tiles, keywords["attend"])
    first = default_tuning(shape)
    wanted = np.asarray(jax.jit(partial(call, tuning=first))(*arguments[0]).astype(jnp.float32))
    tried = itertools.islice(candidates(shape), _SMOKE_TUNINGS if smoke else None)
    quick = {tuning: _time(call, arguments, tuning, repeats=1) for tuning in tried}
    best = sorted(quick, key=lambda tuning: quick[tuning].median)[:_BEST]
    default, chosen = _time(call, arguments, first), first
    fastest = default
    for tuning in best:
        timing = _time(call, arguments, tuning)
        got = np.asarray(jax.jit(partial(call, tuning=tuning))(*arguments[0]).astype(jnp.float32))
        if timing.most < fastest.least and np.allclose(got, wanted, rtol=0, atol=_TOLERANCE):
            chosen, fastest = tuning, timing
    return Entry(key_of(shape), chosen, fastest.median, default.median)


def _on_xla(*arguments: Any, tuning: Tuning, **keywords: Any) -> jax.Array:
    """Stand in for the kernel on a machine that cannot run it."""
    return api.paged_attention(*arguments, **keywords, implementation="xla")


def candidates(shape: Shape) -> Iterator[Tuning]:
    """Yield all tunings that fit the shared memory and registers; splits are near those of the default."""
    usual = default_tuning(shape).splits
    splits = sorted({1, max(1, usual // 2), usual, usual + 1, 2 * usual})
    for block, stages, split, producer, parts, ahead in itertools.product(
        (32, 64, 128), (2, 3, 4), splits, (False, True), (1, 2), (False, True)
    ):
        tuning = Tuning(block, stages, split, producer, parts, ahead)
        try:
            plan = launch(shape, tuning)
        except ValueError:
            continue
        if plan.queries * plan.group > 64 or parts == 1:  # a second warpgroup needs more than 64 rows
            yield tuning


def _time(call: Any, arguments: list[tuple[Any, ...]], tuning: Tuning, repeats: int = 5) -> Timing:
    return time_calls(partial(call, tuning=tuning), arguments, repeats)


if __name__ == "__main__":
    main()

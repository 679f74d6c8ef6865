"""Seconds to trace, lower and compile step programs of gpt-oss-20b: alone, in threads, in turns, in processes.

    python -m benchmarks.gpu.engine.compiling [--layers 24] [--ways alone threads turns processes] [--json FILE]

Compiles for an H200 and needs no GPU: what counts are the processors. `turns` are what an engine has at its start:
threads of which one traces and lowers, which holds Python's lock, while XLA compiles for the others. `ptxas` are the
seconds that it took of all processors. What XLA does with its own seconds is in its log, to which a process writes with
TF_CPP_MIN_LOG_LEVEL=0 and TF_CPP_VMODULE=hlo_pass_pipeline=1,gpu_compiler=1,nvptx_compiler=2.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import result_file
from benchmarks.gpu import elsewhere
from benchmarks.gpu.engine.launch import Setting, Variant


def programs(layers: int, kernels: str) -> list[Variant]:
    """Return six programs, as many as an engine with few sizes has."""
    decode = [Variant(kernels, layers, rows) for rows in (64, 8, 128, 256)]
    return [*decode, *(Variant(kernels, layers, 256, tokens=tokens) for tokens in (512, 2_048))]


def one(
    setting: Setting, variant: Variant, place: Any, began: float, turn: AbstractContextManager[Any] | None = None
) -> dict[str, Any]:
    """Compile a program; return when it began, and how long it took. `turn`: what it enters to be traced."""
    asked = time.monotonic()
    with turn or nullcontext():
        begin = time.monotonic()
        lowered = setting.lowered(variant, place)
    traced_at = time.monotonic()
    lowered.compile()
    end = time.monotonic()
    row = {"begin": begin - began, "traced": traced_at - begin, "compiled": end - traced_at, "end": end - began}
    return {"name": variant.name, "waited": begin - asked, **row}


def main(words: Sequence[str] | None = None) -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of the model")
    parser.add_argument("--kernels", default="fast", choices=("fast", "fast_mosaic", "default"), help="of the steps")
    parser.add_argument(
        "--ways", nargs="+", default=["alone", "threads", "turns", "processes"], help="to compile them in"
    )
    parser.add_argument("--number", type=int, help="compile this one of the programs, and print a line of JSON")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    variants = programs(args.layers, args.kernels)
    began = time.monotonic()
    with elsewhere.for_h200() as place:
        place(jax.eval_shape(lambda: jnp.zeros(1)))  # loads the compiler
        setting = Setting(args.layers)
        if args.number is not None:
            print("\n" + json.dumps(one(setting, variants[args.number], place, began)), flush=True)
            return
        found: dict[str, Any] = {}
        for way in args.ways:
            found[way] = in_way(way, setting, variants, place, args)
            print(way, found[way], flush=True)
            if args.json:
                about = {"layers": args.layers, "kernels": args.kernels, "cpus": os.cpu_count()}
                result_file.write(args.json, {**about, "ways": found})


def in_way(way: str, setting: Setting, variants: Sequence[Variant], place: Any, args: argparse.Namespace) -> Any:
    """Compile the first program alone, or all programs in threads or processes; return seconds, of each too."""
    begin, ptxas = time.monotonic(), _children()
    if way == "alone":
        rows = [one(setting, variants[0], place, begin)]
    elif way in ("threads", "turns"):
        jax.clear_caches()  # type: ignore[no-untyped-call]
        turn = Lock() if way == "turns" else None
        with ThreadPoolExecutor(len(variants)) as pool:
            rows = list(pool.map(lambda variant: one(setting, variant, place, begin, turn), variants))
    else:
        rows = _processes(len(variants), ["--layers", str(args.layers), "--kernels", args.kernels])
        return {"seconds": time.monotonic() - begin, "programs": rows}
    return {"seconds": time.monotonic() - begin, "ptxas": _children() - ptxas, "programs": rows}


def _children() -> float:
    """Return the seconds of all processors that the processes have taken which this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processes(count: int, options: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu.engine.compiling", *options, "--number"]
    with ThreadPoolExecutor(count) as pool:
        run = partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        ended = list(pool.map(lambda number: run([*command, str(number)]), range(count)))
    last = [(done.stdout.strip().splitlines() or [""])[-1] for done in ended]
    return [json.loads(line) if line.startswith("{") else {"why": line[:200]} for line in last]


if __name__ == "__main__":
    main()

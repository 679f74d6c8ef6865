"""The server on a GPU: time to start, `jswa bench serve`, and a soak in which requests end, are aborted and preempted.

    python -m benchmarks.gpu.engine.serve --hub gpt-oss-20b [--quantization mxfp4] [--soak 120] [--seconds 240]

Random weights, with the tokenizer of the embedded model. For --soak seconds streams of random lengths up to --longest
tokens begin, --streams at a time, and the soak waits for the last of them: 3 of 10 clients leave, and the operator
aborts one in 20 of the others. --kv-cache-memory-bytes is so small that the longest do not fit together, and rows are
preempted. What the soak leaves behind, and each stream that does not end as it should, is an error: the exit status is
then 1.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.serve.load import Address, get_text, server
from benchmarks.serve.serve_stress import streams
from jswa.storage.hub import TINY
from tools.cases.hub_configs import CONFIGS
from tools.cases.small_models import SMALL_MODELS

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LAST_STREAMS = 60  # seconds that streams which have begun may still need
_COUNTERS = ("num_preemptions", "prompt_tokens", "generation_tokens")


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint without weights: the config, and the tokenizer of the embedded model."""
    (folder / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER:
        shutil.copy(TINY / name, folder / name)
    return folder


def bench(at: Address, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Run `jswa bench serve` and return its figures."""
    subprocess.run(
        [
            sys.executable, "-m", "jswa", "bench", "serve", "--base-url", f"http://{at.host}:{at.port}",
            "--num-prompts", str(args.requests), "--max-concurrency", str(args.concurrency),
            "--input-words", str(args.input), "--output-tokens", str(args.output), "--json", str(out),
        ],
        check=True,
    )  # fmt: skip
    found = result_file.read(out)
    return {name: value for name, value in found.items() if name not in ("requests", "records")}


async def soak(at: Address, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Begin streams for some seconds; return what happened, or the law that was broken."""
    before = await counters(at)
    begin = time.monotonic()
    try:
        found = await streams(
            at, args.streams, seconds, seconds / 3, longest=args.longest, most_growth=args.most_growth
        )
    except AssertionError as error:
        found = {"wrong": str(error) or "an assertion of the soak failed"}
    after = await counters(at)
    return {**found, "whole_seconds": time.monotonic() - begin, **{name: after[name] - before[name] for name in after}}


async def counters(at: Address) -> dict[str, float]:
    """Return counters of /metrics by their names without prefix."""
    lines = (await get_text(at, "/metrics", "root")).splitlines()
    found = dict.fromkeys(_COUNTERS, 0.0)
    for line in lines:
        key, _, value = line.rpartition(" ")
        for name in _COUNTERS:
            if not line.startswith("#") and key.partition("{")[0].endswith((name, f"{name}_total")):
                found[name] += float(value)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Start a server, load it, and print; write JSON if it is asked for."""
    args = parsed(words)
    started = time.monotonic()
    options = ["--load-format", "dummy", "--quantization", args.quantization, "--max-num-seqs", str(args.max_num_seqs)]
    options += ["--max-model-len", str(args.max_model_len), "--kv-cache-memory-bytes", str(args.kv_cache_memory_bytes)]
    options += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    for size in args.cudagraph_capture_sizes:
        options += ["--cudagraph-capture-sizes", str(size)]
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder), SMALL_MODELS[args.small] if args.small else CONFIGS[args.hub])
        command = ["-m", "jswa", "serve", str(model), "--port", "0", "--admin-api-key", "root", *options]
        with server(command) as at:
            results: dict[str, Any] = {"start_seconds": time.monotonic() - started}
            results["bench"] = bench(at, args, Path(folder, "bench.json"))
            print(json.dumps(results), flush=True)
            if args.json:
                result_file.write(args.json, results)
            left = started + args.seconds - time.monotonic() - LAST_STREAMS
            results["soak"] = asyncio.run(soak(at, args, max(1.0, min(args.soak, left))))
            if args.json:
                result_file.write(args.json, results)
    print({name: value for name, value in results["soak"].items() if name != "samples"})
    return 1 if "wrong" in results["soak"] else 0


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--hub", choices=sorted(CONFIGS), help="random weights in this model's shape")
    shape.add_argument("--small", choices=sorted(SMALL_MODELS), help="a small model, for any machine")
    parser.add_argument("--quantization", default="auto", help="storage of the random weights, as of an engine")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="rows of a step")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="tokens of a step")
    parser.add_argument("--max-model-len", type=int, default=8_192, help="tokens of a request, at most")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=5 * 10**9, help="of the server")
    parser.add_argument(
        "--cudagraph-capture-sizes", type=int, nargs="+", default=[], help="compile these batch sizes only"
    )
    parser.add_argument("--requests", type=int, default=512, help="of `jswa bench serve`")
    parser.add_argument("--concurrency", type=int, default=256, help="of `jswa bench serve`")
    parser.add_argument("--input", type=int, default=200, help="words of a prompt of `jswa bench serve`")
    parser.add_argument("--output", type=int, default=200, help="tokens of an answer of `jswa bench serve`")
    parser.add_argument("--soak", type=float, default=120, help="seconds in which streams of the soak begin")
    parser.add_argument("--seconds", type=float, default=3600, help="of all together; the soak is cut to what is left")
    parser.add_argument("--streams", type=int, default=320, help="streams of the soak at a time")
    parser.add_argument("--longest", type=int, default=3_000, help="tokens of the longest stream of the soak")
    parser.add_argument("--most-growth", type=float, default=0.05, help="of the server's memory during the soak")
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

"""Whether a prompt whose prefix is cached gives the tokens and log probabilities that it gives cold.

    python -m benchmarks.gpu.engine.cached [--models gpt-oss gemma-3] [--prompts 40] [--output 32] [--json FILE]
                                           [--engine kernels=elementwise=mosaic ...]

Small models with random weights, whose heads and experts the Hopper kernels take. Prompts share a prefix that is longer
than the windows, and parted from each other inside a page. Each is asked alone and greedily: once with an empty cache,
and once behind the cached prefix. With `deterministic` all steps run in one program, so tokens and log probabilities
must be equal bit for bit. By default a cached prompt is prefilled in a smaller program than a cold one, which rounds
otherwise: then the tokens that differ are counted, and log probabilities before them may differ by rounding only
(--rounding). The exit status is 1 if either law does not hold.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import result_file
from benchmarks.engine_options import add_engine_options, engine_options
from jswa.llm import LLM
from tools.cases.small_models import SMALL_MODELS

_KV_BYTES = 2**26
_ROWS = 2


class Text(NamedTuple):
    """What a prompt gave: generated tokens, the log probability of each, and how many prompt tokens were cached."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def ask(llm: LLM, prompt: list[int], output: int) -> Text:
    """Return what a prompt gives, greedily."""
    (found,) = llm.generate([prompt], temperature=0, max_tokens=output, ignore_eos=True, logprobs=0, use_tqdm=False)
    made = found.outputs[0]
    assert made.logprobs is not None
    pairs = zip(made.token_ids, made.logprobs, strict=True)
    return Text(list(made.token_ids), [entry[token].logprob for token, entry in pairs], found.num_cached_tokens)


def cold_and_cached(llm: LLM, prefix: list[int], prompts: list[list[int]], output: int) -> list[tuple[Text, Text]]:
    """Return what each prompt gives with an empty cache, and behind the cached prefix."""
    cold = []
    for prompt in prompts:
        llm.flush_cache()
        cold.append(ask(llm, prompt, output))
    llm.flush_cache()
    ask(llm, prefix, 1)
    return list(zip(cold, [ask(llm, prompt, output) for prompt in prompts], strict=True))


def compare(pairs: Sequence[tuple[Text, Text]]) -> dict[str, Any]:
    """Count prompts whose tokens differ; return the largest difference of log probabilities before they do."""
    flipped, worst, equal = 0, 0.0, 0
    for cold, cached in pairs:
        same = [one == other for one, other in zip(cold.tokens, cached.tokens, strict=True)]
        before = same.index(False) if not all(same) else len(same)
        differences = np.abs(np.subtract(cold.logprobs[:before], cached.logprobs[:before]))
        worst = max(worst, float(differences.max(initial=0.0)))
        flipped += before < len(same)
        equal += cold[:2] == cached[:2]
    return {
        "prompts": len(pairs),
        "equal": equal,
        "flipped": flipped,
        "worst_logprob": worst,
        "cached_tokens": min(cached.cached for _, cached in pairs),
        "cold_tokens": max(cold.cached for cold, _ in pairs),
    }


def measure(name: str, args: argparse.Namespace, *, deterministic: bool) -> dict[str, Any]:
    """Ask all prompts of a model."""
    config, random = SMALL_MODELS[name], np.random.default_rng(0)
    prefix = random.integers(3, config["vocab_size"], args.prefix).tolist()
    prompts = [
        prefix + random.integers(3, config["vocab_size"], n).tolist() for n in random.integers(5, 60, args.prompts)
    ]
    sizes = (_ROWS, args.step // 4, args.step)  # a cold prompt needs the largest program, a cached one a smaller one
    options: dict[str, Any] = {
        "load_format": "dummy", "max_num_seqs": _ROWS, "kv_cache_memory_bytes": _KV_BYTES,
        "max_num_batched_tokens": args.step, "max_model_len": args.prefix + 60 + args.output,
        "deterministic": deterministic, "cudagraph_capture_sizes": () if deterministic else sizes,
        **engine_options(args.engine),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = LLM(folder, **options)
    with llm:
        found = compare(cold_and_cached(llm, prefix, prompts, args.output))
    return {"model": name, "deterministic": deterministic, **found}


def wrong(row: dict[str, Any], rounding: float) -> str:
    """Return which law a row breaks; empty if none."""
    if row["cold_tokens"] or not row["cached_tokens"]:
        return f"{row['cached_tokens']} tokens were cached, {row['cold_tokens']} in a cold prompt"
    if row["deterministic"] and row["equal"] < row["prompts"]:
        return f"{row['prompts'] - row['equal']} of {row['prompts']} prompts differ though all steps run in one program"
    if not row["worst_logprob"] <= rounding:
        return f"log probabilities differ by {row['worst_logprob']:.3g}"
    return ""


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SMALL_MODELS), choices=SMALL_MODELS, help="to run")
    parser.add_argument("--prompts", type=int, default=40, help="prompts behind the prefix")
    parser.add_argument("--prefix", type=int, default=700, help="tokens of the prefix")
    parser.add_argument("--output", type=int, default=32, help="tokens generated for each prompt")
    parser.add_argument("--step", type=int, default=256, help="tokens of a step, at most")
    add_engine_options(parser)
    parser.add_argument("--rounding", type=float, default=0.05, help="most that log probabilities may differ, in nats")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for deterministic in (True, False):
            row = measure(name, args, deterministic=deterministic)
            rows.append({**row, "wrong": wrong(row, args.rounding)})
            print(rows[-1], flush=True)
            if args.json:
                result_file.write(args.json, {"device": jax.devices()[0].device_kind, "cached": rows})
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

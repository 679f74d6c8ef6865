"""Baseline for `benchmarks.speed.offline`: the continuous batching of transformers (torch) on the same load.

    python -m benchmarks.gpu.engine.peer_transformers --hub gemma-3-27b [--prompts 256] [--input 1024] [--output 1024]

Random weights in the shape of a released model's text part, in bfloat16 (float32 on a CPU). Prompt lengths are those of
`benchmarks.speed.offline`; decoding is greedy and ignores end tokens. A first run warms up and is not counted; the
median and the range of the others are printed. Attention, graphs and sizes are left at the choice of transformers; the
chosen attention is recorded.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import result_file
from tools.cases.hub_configs import CONFIGS
from tools.cases.small_models import SMALL_MODELS


def make_model(raw: dict[str, Any], where: str) -> Any:
    """Return the text part of a config as a model with random weights on a device."""
    text = raw.get("text_config", raw)
    kind = text.get("model_type", raw["model_type"])
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in text.items() if k != "model_type"})
    dtype = torch.float32 if where == "cpu" else torch.bfloat16
    # Only its eager attention has sinks, besides kernels that it would have to download.
    attention = "eager" if kind == "gpt_oss" else "sdpa"
    with torch.device(where):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def run(model: Any, prompts: list[list[int]], output: int) -> dict[str, float]:
    """Run all prompts once. Raises RuntimeError if an output does not have `output` tokens."""
    asked = transformers.GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    found = model.generate_batch(prompts, generation_config=asked, progress_bar=False)
    seconds = time.perf_counter() - start
    made = [len(one.generated_tokens) for one in found.values()]
    if made != [output] * len(prompts):
        raise RuntimeError(f"{len(made)} texts of {sorted(set(made))} tokens, not {len(prompts)} of {output}")
    read = sum(map(len, prompts))
    return {
        "seconds": seconds,
        "tokens_per_s": (read + sum(made)) / seconds,
        "output_tokens_per_s": sum(made) / seconds,
    }


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--hub", choices=sorted(CONFIGS), help="a released model")
    shape.add_argument("--config", type=Path, help="a config.json, instead of --hub")
    shape.add_argument("--small", choices=sorted(SMALL_MODELS), help="a small model, for any machine")
    parser.add_argument("--prompts", type=int, default=256, help="number of prompts")
    parser.add_argument("--input", type=int, default=1024, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, default=1024, help="tokens generated for each prompt")
    parser.add_argument("--repeats", type=int, default=2, help="runs that are counted")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    raw: dict[str, Any] = dict(SMALL_MODELS[args.small]) if args.small else {}
    raw = raw or (dict(CONFIGS[args.hub]) if args.hub else json.loads(args.config.read_text()))
    model, random = make_model(raw, "cuda" if torch.cuda.is_available() else "cpu"), np.random.default_rng(0)
    lengths = random.integers(args.input // 2, args.input + 1, args.prompts)
    prompts = [random.integers(3, model.config.vocab_size, n).tolist() for n in lengths]
    run(model, prompts[:2], 4)
    runs = [run(model, prompts, args.output) for _ in range(args.repeats)]
    found = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name in runs[0]
        for values in ([one[name] for one in runs],)
    }
    for name, value in found.items():
        print(f"{name:22} {value['median']:10.1f} ({value['min']:.1f} to {value['max']:.1f})")
    about = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "attention": model.config._attn_implementation,
    }
    print(about)
    if args.json:
        result_file.write(args.json, {**about, **found})


if __name__ == "__main__":
    main()

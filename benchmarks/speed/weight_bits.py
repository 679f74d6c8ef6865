"""Decode speed and bytes of one random model, whose weights are held in the engine's dtype, in 8 and in 4 bits.

    python -m benchmarks.speed.weight_bits [--layers 6] [--rows 1 8] [--repeats 5] [--json FILE]

The model has gemma-3-1b's layers with two thirds of their width, packed in 4 bits (W4A16, groups of 32, symmetric), and
a small vocabulary: 75M weights in linear layers with the default of six. Its forms take turns, so that other work on
the machine hits all of them; the median and the range of the repeats are printed.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import result_file
from jswa.forms.base.names import LINEAR
from jswa.llm import LLM
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from tools.cases.hub_configs import CONFIGS

GROUP, OUTPUT = 32, 48
FORMS = {"dtype": "none", "8 bits": "int8", "4 bits": "auto"}


def write_model(folder: Path, layers: int) -> int:
    """Write the checkpoint; return the number of weights in its linear layers."""
    sizes = {"hidden_size": 768, "intermediate_size": 4608, "vocab_size": 8192, "num_hidden_layers": layers}
    config = {**CONFIGS["gemma-3-1b"], **sizes}
    weights = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    count = 0
    for name, source in sources(parse_config(config)).items():
        for part in source.parts:
            if not LINEAR.search(name):
                tensors[part.key] = (0.02 * rng.standard_normal(part.shape)).astype(np.float16)
                continue
            outputs, inputs = part.shape
            tensors[f"{part.key}_packed"] = rng.integers(-(2**31), 2**31, (outputs, inputs // 8), dtype=np.int32)
            scales = rng.uniform(0.5, 1.0, (outputs, inputs // GROUP)) / (4 * inputs**0.5)
            tensors[f"{part.key}_scale"] = scales.astype(np.float16)
            count += outputs * inputs
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return count


def decode_rate(llm: LLM, rows: int, seed: int) -> float:
    """Return generated tokens per second of this many rows with prompts of one token."""
    prompts = [[3 + (seed * 97 + row) % 8000] for row in range(rows)]
    start = time.perf_counter()
    llm.generate(prompts, temperature=0, max_tokens=OUTPUT, ignore_eos=True, use_tqdm=False)
    return rows * OUTPUT / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests at the same time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "max_num_seqs": max(args.rows),
        "max_num_batched_tokens": max(args.rows),
        "max_model_len": 2 * OUTPUT,
        "prefix_cache": False,
    }
    with tempfile.TemporaryDirectory() as name:
        count = write_model(Path(name), args.layers)
        llms = {form: LLM(name, quantization=mode, **options) for form, mode in FORMS.items()}
    results: dict[str, Any] = {"weights_in_linear_layers": count, "forms": {}}
    held: dict[str, int] = {}
    for form, llm in llms.items():
        runner: Any = llm.engine.runner
        held[form] = sum(value.nbytes for value in runner.params.values())
        results["forms"][form] = {"bytes": held[form], "tokens_per_s": {}}
    for rows in args.rows:
        rates: dict[str, list[float]] = {form: [] for form in llms}
        for repeat in range(args.repeats + 1):
            for form, llm in llms.items():
                rates[form].append(decode_rate(llm, rows, repeat))
        for form, (_, *found) in rates.items():  # the first run is a warm-up
            median, least, most = statistics.median(found), min(found), max(found)
            results["forms"][form]["tokens_per_s"][str(rows)] = {"median": median, "min": least, "max": most}
            size = f"{held[form] / 2**20:7.1f} MiB"
            print(f"{form:7} {size}  {rows:3} rows  {median:7.1f} tokens/s ({least:.1f} to {most:.1f})")
    if args.json:
        result_file.write(args.json, results)


if __name__ == "__main__":
    main()

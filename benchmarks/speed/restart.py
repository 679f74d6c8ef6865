"""Time and memory of loading weights, from safetensors and from the output of `jswa convert`.

    python -m benchmarks.speed.restart [--gib 2] [--stored bfloat16|fp8] [--quantization auto] [--folder DIR]
        [--repeats 3] [--json FILE]

Writes a random checkpoint in four files, of --gib GiB when it is loaded as bfloat16, converts it, and loads both
alternately, each time in a new process. The page cache is warm for both. Memory is reported as the peak of the process
over the weights' size, with and without the memory that the process had before it began to load.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import result_file
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from jswa.model.weights.formats import QuantizationMode
from jswa.storage.convert import convert

SHARDS = 4
_CHILD = """
import json, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from jswa.model.weights.load import load_checkpoint

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

jnp.zeros(1).block_until_ready()
before, begin, used = memory("VmRSS"), time.perf_counter(), time.process_time()
_, params = load_checkpoint(Path(sys.argv[1]), jnp.dtype("bfloat16"), quantization=sys.argv[2])
jax.block_until_ready(params)
seconds, used = time.perf_counter() - begin, time.process_time() - used
size = sum(value.nbytes for value in params.values())
print(json.dumps({"seconds": seconds, "processor": used, "bytes": size, "before": before, "peak": memory("VmHWM")}))
"""


def config(gib: float) -> dict[str, Any]:
    """Return a Llama config of about `gib` GiB in bfloat16; each layer has 128 MiB."""
    return {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": max(1, round((gib - 0.25) * 8)),
        "vocab_size": 32768,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def write(folder: Path, gib: float, stored: str) -> None:
    """Write the random checkpoint. Its numbers repeat, since their values make no difference."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = config(gib)
    parts = [part for source in sources(parse_config(hf)).values() for part in source.parts]
    noise = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32) / 50
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file, tensors = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors", {}
        for part in parts[shard::SHARDS]:
            values = np.resize(noise, part.shape)
            if stored == "fp8" and part.key.endswith("_proj.weight"):
                # safetensors cannot write float8: write bytes, and patch the header below.
                tensors[part.key] = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
                grid = [-(-n // 128) for n in part.shape]
                tensors[f"{part.key}_scale_inv"] = np.ones(grid, np.float32)
            else:
                tensors[part.key] = values.astype(ml_dtypes.bfloat16)
        save_file(tensors, folder / file)
        if stored == "fp8":
            _patch(folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if stored == "fp8":
        hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(hf))


def _patch(path: Path) -> None:
    """Replace U8 by F8_E4M3 in the header of a safetensors file."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for entry in header.values():
            if entry.get("dtype") == "U8":
                entry["dtype"] = "F8_E4M3"
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length + 5 * len(header)
        rest = file.read()
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text + rest)
        file.truncate()


def measured(folder: Path, quantization: QuantizationMode) -> dict[str, Any]:
    """Load once in a new process; return its seconds and bytes."""
    command = [sys.executable, "-c", _CHILD, str(folder), quantization]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights in bfloat16")
    parser.add_argument("--stored", choices=("bfloat16", "fp8"), default="bfloat16", help="type in the file")
    parser.add_argument("--quantization", choices=("auto", "none", "int8", "fp8"), default="auto", help="of the engine")
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each checkpoint")
    parser.add_argument("--json", type=Path, help="result file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "safetensors" / "config.json").exists():
            write(folder / "safetensors", options.gib, options.stored)
        report = run(folder, options.repeats, options.quantization)
    print(json.dumps(report, indent=1))
    if options.json:
        result_file.write(options.json, report)


def run(folder: Path, repeats: int, quantization: QuantizationMode) -> dict[str, Any]:
    """Return figures by kind of checkpoint; the first load of each is a warm-up."""
    kinds = ["safetensors", "converted"]
    begin = time.perf_counter()
    convert(folder / "safetensors", folder / "converted", "bfloat16", quantization)
    converting = time.perf_counter() - begin
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats + 1):
        for kind in kinds:
            rows[kind].append(measured(folder / kind, quantization))
    report: dict[str, Any] = {"seconds_to_convert": converting}
    for kind, found in rows.items():
        seconds = sorted(row["seconds"] for row in found[1:])
        size = found[0]["bytes"]
        report[kind] = {
            "gib": size / 2**30,
            "seconds": seconds,
            "processor_seconds": sorted(row["processor"] for row in found[1:]),
            "gib_per_s": size / 2**30 / seconds[len(seconds) // 2],
            "peak_by_weights": max(row["peak"] for row in found) / size,
            "peak_above_start_by_weights": max(row["peak"] - row["before"] for row in found) / size,
        }
    pairs = zip(rows["safetensors"][1:], rows["converted"][1:], strict=True)
    report["times_as_fast"] = sorted(one["seconds"] / other["seconds"] for one, other in pairs)
    return report


if __name__ == "__main__":
    main()

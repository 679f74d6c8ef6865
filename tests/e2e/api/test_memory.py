"""The peak memory of a process on a CPU: at most weights, arena and 500 MB, while it loads, compiles and runs."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources

MOST_BESIDE = 500 * 10**6
MOST_TO_LOAD = 350 * 10**6  # 275 when this was written, 260 of them Python, jax and its libraries
ARENA = 2**28
TYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
# 101 million parameters in eight layers: so many that a second copy of the weights, or two programs that are compiled
# at a time, exceed the bound.
CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 8,
    "sliding_window": 128,
    "sliding_window_pattern": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
FIGURE = """
import json, sys
from pathlib import Path
import jax
import jswa

def figure(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
"""
LOAD = (
    FIGURE
    + """
from jswa.building.parts import load_checkpoint

_, params = load_checkpoint(Path(sys.argv[1]), jax.numpy.dtype(sys.argv[2]))
print(json.dumps(figure("VmHWM")))
"""
)
ENGINE = (
    FIGURE
    + """
llm = jswa.LLM(
    sys.argv[1], dtype=sys.argv[2], max_num_seqs=1, max_num_batched_tokens=64, kv_cache_memory_bytes=int(sys.argv[3])
)
prompts = [[7 + n] * (20 + 90 * n) for n in range(4)]
results = llm.generate(prompts, jswa.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
assert [len(one.outputs[0].token_ids) for one in results] == [8] * 4
print(json.dumps(figure("VmHWM")))
"""
)
PAIRS = [
    pytest.param("bfloat16", "float32"),
    pytest.param("float32", "bfloat16", marks=pytest.mark.nightly),
    pytest.param("float32", "float32", marks=pytest.mark.nightly),
    pytest.param("bfloat16", "bfloat16", marks=pytest.mark.nightly),
]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")


def write(folder: Path, stored: str) -> int:
    """Write a checkpoint of random weights; return the number of its parameters."""
    noise = np.random.default_rng(0).standard_normal(2**16, dtype=np.float32) / 50
    parts = [part for source in sources(parse_config(CONFIG)).values() for part in source.parts]
    save_file(
        {part.key: np.resize(noise, part.shape).astype(TYPES[stored]) for part in parts}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(math.prod(part.shape) for part in parts)


def peak(program: str, *arguments: object) -> int:
    """Return the peak bytes of a process on a CPU that runs a program, without any kept from another run."""
    environment = {**os.environ, "JSWA_COMPILATION_CACHE": "", "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.nightly
@pytest.mark.parametrize(("stored", "run"), PAIRS)
def test_loading_takes_no_second_copy_of_the_weights(tmp_path: Path, stored: str, run: str) -> None:
    """There is no second copy of the weights, whatever their type in the file."""
    weights = write(tmp_path, stored) * np.dtype(TYPES[run]).itemsize
    assert weights >= 200 * 10**6
    beside = peak(LOAD, tmp_path, run) - weights
    assert beside <= MOST_TO_LOAD, f"{beside // 10**6} MB"


@pytest.mark.parametrize(("stored", "run"), PAIRS)
def test_an_engine_takes_little_beside_weights_and_arena(tmp_path: Path, stored: str, run: str) -> None:
    """An engine with two step programs, prefill and decode: they are compiled, not read."""
    weights = write(tmp_path, stored) * np.dtype(TYPES[run]).itemsize
    beside = peak(ENGINE, tmp_path, run, ARENA) - weights - ARENA
    print(f"{stored} run as {run}: {beside // 10**6} MB beside weights and arena")
    assert beside <= MOST_BESIDE, f"{beside // 10**6} MB"

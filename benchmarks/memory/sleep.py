"""Measure how long an engine takes to fall asleep and to wake up, and the memory that it has meanwhile.

    python -m benchmarks.memory.sleep tiny
    python -m benchmarks.memory.sleep random

`random` is a model of 58 million random parameters in bfloat16. Arrays are those of jax; resident memory is the
process's. The engine must give the same tokens behind each sleep, and compile nothing.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jswa

MIB = 2**20
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 256}
PROMPTS = [{"prompt_token_ids": list(range(5, 200))}] * 16


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("tiny", "random"))
    small = parser.parse_args().model == "tiny"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        name: Any = "tiny" if small else folder
        more: dict[str, Any] = {} if small else {"load_format": "dummy"}
        arena = (128 if small else 512) * MIB
        with jswa.LLM(name, dtype="bfloat16", kv_cache_memory_bytes=arena, **more, **OPTIONS) as llm:
            measure(llm)


def measure(llm: jswa.LLM) -> None:
    """Put an engine to sleep and wake it up, with its weights, without them, and three times more."""
    runner: Any = llm.engine.runner
    said = ask(llm)
    # In the engine's own form: the time of `update_weights` depends on the form that the trainer has.
    weights = {name: np.asarray(value).copy() for name, value in runner.params.items()}
    gc.collect()
    print(f"{sum(value.size for value in weights.values()) / 1e6:.1f} M parameters; {memory()}")
    print(f"sleep(1): {timed(llm.sleep)}; {memory()}")
    llm.sleep(2)
    print(f"sleep(2): {memory()}")
    llm.engine.turnover.update({name: jax.device_put(value) for name, value in weights.items()}, "continue")
    print(f"wake: {timed(llm.wake)}; {memory()}")
    for _ in range(3):
        assert ask(llm) == said
        print(f"sleep(1): {timed(llm.sleep)}; wake: {timed(llm.wake)}")
    assert ask(llm) == said
    assert runner.compiled_in_steps == 0


def ask(llm: jswa.LLM) -> list[int]:
    """Return the tokens of the first of sixteen texts."""
    outputs = llm.generate(PROMPTS, max_tokens=64, temperature=0, ignore_eos=True, use_tqdm=False)
    return outputs[0].outputs[0].token_ids


def timed(function: Callable[[], None]) -> str:
    """Call a function; return how long it took."""
    begin = time.perf_counter()
    function()
    return f"{1e3 * (time.perf_counter() - begin):.0f} ms"


def memory() -> str:
    """Return the bytes of jax's arrays, and the process's resident memory."""
    arrays = sum(array.nbytes for array in jax.live_arrays())  # type: ignore[no-untyped-call]
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return f"arrays {arrays / MIB:.0f} MiB, resident {resident:.0f} MiB"


if __name__ == "__main__":
    main()

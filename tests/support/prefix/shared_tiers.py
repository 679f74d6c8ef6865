"""A program with several CPU devices, which other tests must not see: a tiny model with host memory and files.

    python -m tests.support.prefix.shared_tiers FOLDER NAME

The program runs texts that the arenas cannot hold, each twice: on an engine that computes them first, and on one that
finds the files of the first. It prints answers and counts as JSON. Run by test_host_memory.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jswa.llm import LLM
from tests.support.commands.leaving import leave
from tests.support.oracles import quick_compiles
from tests.support.shared_model import ASKED, OPTIONS, checkpoint, greedy

TEXTS, LENGTH = 6, 70
ARENAS = {"llama4": 1 << 15}  # bytes, of models whose KV is small


def devices_of(name: str) -> int:
    """Return the devices that share a model: two, or twice two that share tokens."""
    return 4 if name.endswith("+context") else 2


def run(model: Path, vocab: int, folder: Path, arena: int) -> dict[str, Any]:
    """Return the answers to all texts, asked twice, and the tokens that came from each tier."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, vocab, LENGTH).tolist() for _ in range(TEXTS)]
    tiers = {"host_kv_bytes": 1 << 21, "disk_kv": f"{folder}:{1 << 24}"}
    devices = devices_of(model.name)
    shared = {"tensor_parallel_size": devices, "decode_context_parallel_size": devices // 2}
    with LLM(model, **{**OPTIONS, "kv_cache_memory_bytes": arena, **tiers, **shared}) as llm:
        disk: Any = llm.engine.scheduler.cache.host.disk  # type: ignore[union-attr]
        disk.seconds_per_token = 1.0  # computing is slow: everything is worth to be read
        answers = [
            greedy(llm.generate([prompt], temperature=0, max_tokens=8, logprobs=2, **ASKED)[0])
            for prompt in prompts + prompts
        ]
        runner: Any = llm.engine.runner
        stats = llm.cache_stats()
        return {
            "answers": [answers[:TEXTS], answers[TEXTS:]],
            "devices": len(runner.state["lanes"][0].devices()),
            "host": stats.host_tokens,
            "disk": stats.disk_tokens,
            "written": stats.disk_written_bytes,
        }


def main(folder: Path, name: str) -> None:
    """Run both engines."""
    model, vocab = checkpoint(name, folder)
    with quick_compiles():
        print(json.dumps([run(model, vocab, folder / "kv", ARENAS.get(name, 1 << 17)) for _ in range(2)]))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", devices_of(sys.argv[2]))  # type: ignore[no-untyped-call]
    main(Path(sys.argv[1]), sys.argv[2])
    leave()

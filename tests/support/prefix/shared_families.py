"""A program with four CPU devices, of which two share the tokens of full layers: the texts of one device, for a family.

    python -m tests.support.prefix.shared_families FIXTURE

It gives the config of a fixture eight query heads, two KV heads, eight experts if any, and random weights. Texts with
common beginnings come in random groups, in the smallest arena that is accepted. It prints why, if four devices cannot
hold the model.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jswa.errors import ConfigError
from jswa.llm import LLM
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from jswa.types import SamplingParams
from tests.parity.load import read_config
from tests.parity.weights import random_weights, write_checkpoint
from tests.support.commands.leaving import leave
from tests.support.oracles import quick_compiles
from tests.support.shared_model import greedy

DEVICES, SHARING, TEXTS = 4, 2, 14
MOST = 1 << 22  # bytes of an arena
Rows = list[list[list[float]]]
OPTIONS: dict[str, Any] = {
    "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "deterministic": True,
    "kernels": "sampling=xla",
}  # fmt: skip


def for_four_devices(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with eight query heads, two KV heads and eight experts, also in the parts of it."""
    found = dict(config)
    for key, value in config.items():
        if key in ("num_attention_heads", "num_sliding_attention_heads", "num_experts", "num_local_experts"):
            found[key] = 2 * DEVICES
        elif key == "num_attention_heads_per_layer":
            found[key] = [2 * DEVICES] * len(value)
        elif key == "num_key_value_heads" and value is not None:
            found[key] = DEVICES // SHARING
        elif isinstance(value, dict):  # the text part, or a layer's own fields
            found[key] = for_four_devices(value)
    return found


def write(name: str, folder: Path) -> int:
    """Write the checkpoint; return the size of its vocabulary."""
    config = for_four_devices(read_config(name))
    model = parse_config(config)
    shapes = {part.key: part.shape for source in sources(model).values() for part in source.parts}
    means = {key: 1.0 for key in shapes if "norm" in key and "gemma" not in name}
    write_checkpoint(folder, config, random_weights(shapes, means, 3))
    return model.vocab_size


def serve(llm: LLM, vocab: int) -> Rows:
    """Return tokens, log probabilities and margins of texts that come in random groups."""
    rng = np.random.default_rng(9)
    base = rng.integers(3, vocab, 70).tolist()
    asked = []
    for _ in range(TEXTS):
        prompt = base[: int(rng.integers(5, 60))] + rng.integers(3, vocab, int(rng.integers(1, 8))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(4, 34)), temperature=float(rng.choice([0.0, 0.0, 1.0])), seed=5, logprobs=2,
            ignore_eos=True,
        )  # fmt: skip
        asked.append((prompt, params))
    rows: Rows = []
    while len(rows) < len(asked):
        group = asked[len(rows) : len(rows) + int(rng.integers(3, 9))]
        found = llm.generate([prompt for prompt, _ in group], [params for _, params in group], use_tqdm=False)
        rows += [greedy(output) for output in found]
    return rows


def in_the_smallest_arena(folder: Path, vocab: int, devices: int, sharing: int) -> Rows:
    """Return what `serve` does. Raises ConfigError if these devices cannot hold the model."""
    size = 1 << 13
    while True:
        try:
            with (
                quick_compiles(),
                LLM(
                    folder,
                    tensor_parallel_size=devices,
                    decode_context_parallel_size=sharing,
                    kv_cache_memory_bytes=size,
                    **OPTIONS,
                ) as llm,
            ):
                return serve(llm, vocab)
        except ConfigError as error:
            if "memory" not in str(error) or size > MOST:
                raise
            size = size * 5 // 4


def main(name: str) -> None:
    """Print the rows of one device and of four as JSON, or why four are refused."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        vocab = write(name, folder)
        one = in_the_smallest_arena(folder, vocab, 1, 1)
        try:
            print(json.dumps([one, in_the_smallest_arena(folder, vocab, DEVICES, SHARING)]))
        except ConfigError as error:
            print(json.dumps({"refused": str(error)}))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)  # type: ignore[no-untyped-call]
    main(sys.argv[1])
    leave()

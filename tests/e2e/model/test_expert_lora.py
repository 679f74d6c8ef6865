"""LoRA adapters of experts in the whole engine: mixed batches, loading while it runs, and the memory of the room."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import RequestError
from jswa.llm import LLM
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.lora.files import room_bytes
from jswa.options.lora import LoraRoom
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.adapters import ATTENTION, random_lora
from tests.support.checkpoints.expert_adapters import random_expert_lora, write, write_fused
from tests.support.oracles import dense_logits, quick_compiles

TOLERANCE = 2e-4  # docs/numerics.md
FIXTURE = load_fixture("mixtral_base")
SPLIT, LEAVES = "block_sparse_moe.experts", ("w1", "w3", "w2")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "use_tqdm": False}
OPTIONS: dict[str, Any] = {
    "max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4, "deterministic": True,
    "kv_cache_memory_bytes": 1 << 20,
}  # fmt: skip
ROOM: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 3, "lora_experts": True}


@dataclass(frozen=True, eq=False)
class Setting:
    """A checkpoint, an engine with room for two adapters, their folders, and checkpoints with each merged."""

    folder: Path
    llm: LLM
    adapters: dict[str, Path]
    merged: dict[str | None, Path]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Return adapters of fused experts, of split experts, of attention, and one whose rank is too large."""
    folder = tmp_path_factory.mktemp("experts")
    write_checkpoint(folder, FIXTURE.config, FIXTURE.tensors)
    fused, split = (random_expert_lora(FIXTURE.tensors, 3, seed=seed) for seed in (1, 2))
    large, attention = random_expert_lora(FIXTURE.tensors, 4, seed=3), random_lora(FIXTURE.tensors, ATTENTION, 2, 4)
    adapters = {
        "fused": write_fused(folder / "fused", fused),
        "split": write(folder / "split", split.split(SPLIT, LEAVES), split),
        "large": write_fused(folder / "large", large),
        "attention": attention.write(folder / "attention"),
    }
    merged: dict[str | None, Path] = {None: folder}
    for name, lora in (("fused", fused), ("split", split), ("attention", attention)):
        merged[name] = folder / f"{name}_merged"
        write_checkpoint(folder / f"{name}_merged", FIXTURE.config, lora.merged(FIXTURE.tensors))
    with quick_compiles(), LLM(folder, **ROOM, **OPTIONS) as llm:
        yield Setting(folder, llm, adapters, merged)


def check(setting: Setting, name: str | None, tokens: list[int], prompt: int) -> None:
    """Assert that each token is the most likely one of the merged weights, up to rounding."""
    model, params = load_checkpoint(setting.merged[name], jnp.dtype("float32"))
    logits = dense_logits(model, params, np.array(tokens, np.int32))[prompt - 1 : -1]
    assert (logits.max(axis=-1) - logits[np.arange(len(logits)), tokens[prompt:]] < TOLERANCE).all(), name


def test_rows_of_different_adapters_share_steps(setting: Setting) -> None:
    """Adapters of both forms are loaded into the room, of which a third later takes a slot; nothing is traced."""
    llm, rng = setting.llm, np.random.default_rng(0)
    prompts = rng.integers(3, FIXTURE.config["vocab_size"], (3, 21)).tolist()
    with jax.no_tracing(True):
        llm.load_lora("fused", setting.adapters["fused"])
        llm.load_lora("split", setting.adapters["split"])
        names: tuple[str | None, ...] = ("fused", None, "split")
        asked = [{"prompt_token_ids": p, "lora": name} for p, name in zip(prompts, names, strict=True)]
        together = [output.outputs[0].token_ids for output in llm.generate(asked, max_tokens=6, **GREEDY)]
        llm.unload_lora("split")
        llm.load_lora("attention", setting.adapters["attention"])
        (last,) = llm.generate([prompts[2]], lora="attention", max_tokens=6, **GREEDY)
    for name, prompt, text in zip(names, prompts, together, strict=True):
        check(setting, name, [*prompt, *text], len(prompt))
    check(setting, "attention", [*prompts[2], *last.outputs[0].token_ids], len(prompts[2]))
    assert len({tuple(text) for text in together}) == 3


def test_the_room_of_experts_is_counted_and_limits_ranks(setting: Setting) -> None:
    params = setting.llm.engine.runner.params  # type: ignore[attr-defined]
    held = sum(value.nbytes for name, value in params.items() if ".lora_" in name)
    model = setting.llm.engine.model
    assert held == room_bytes(model, LoraRoom(2, 3, experts=True), 4)
    experts, width, hidden = (FIXTURE.config[k] for k in ("num_local_experts", "hidden_size", "intermediate_size"))
    one = experts * 3 * 4 * (2 * (width + 2 * hidden) + (width + hidden))  # of gates and ups twice the rank
    columns = 3 * 4 * (2 + 1)  # owners
    layers = len(model.layers)
    assert held - room_bytes(model, LoraRoom(2, 3), 4) == 2 * layers * (one + columns)
    with pytest.raises(RequestError, match=r"r = 4 of .*gate_up_proj: must be at most max_lora_rank = 3"):
        setting.llm.load_lora("large", setting.adapters["large"])


def test_room_without_experts_refuses_their_adapters(setting: Setting) -> None:
    reader = setting.llm.engine.lora_reader
    other = type(reader)(reader.checked, reader.model, reader.dtype, LoraRoom(2, 3))
    with pytest.raises(RequestError, match=r"adapts experts: .*set lora_experts = true"):
        other.read(setting.adapters["fused"])
    assert other.read(setting.adapters["attention"]).pairs

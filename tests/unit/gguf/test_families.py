"""Each architecture: a checkpoint written as llama.cpp's converter writes it, and read back.

The config must give the same model in every field, and every tensor the same bits.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jswa.errors import UnsupportedModel
from jswa.gguf.architectures import ARCHITECTURES
from jswa.gguf.checkpoint import Checkpoint, read_checkpoint
from jswa.gguf.made import read_made
from jswa.model.hf.config import parse_config
from tests.parity.load import load_fixture
from tests.support.gguf.convert import convert, rounded
from tests.support.gguf.metadata import ARCHES

# llama.cpp has these numbers in its program, not in the file.
_CHUNKS = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
_AS_LLAMA = {"model_type": "llama"}  # the converter forgets the window, which is null here
_NO_WINDOW = {"sliding_window": None}
CASES: dict[str, dict[str, Any]] = {
    "llama_gqa": {},
    "llama_mqa": {},
    "llama_mha_defaults": {},
    "llama_head_dim": {},
    "llama_attention_bias": {},
    "llama_mlp_bias": {},
    "llama_rope_linear": {},
    "llama_rope_llama3": {},
    "llama_rope_yarn": {},
    "llama_tied": {},
    "mistral_no_window": _AS_LLAMA,
    "mixtral_base": {},
    "ministral3_base": {},
    "qwen2_base": {},
    "qwen3_base": {},
    "qwen3_yarn": {},
    "qwen2_moe_base": {},
    "qwen3_moe_base": {},
    "phi3_base": {},
    "phi3_gqa_partial": {},
    "phi3_long": {},
    "phi3_long_partial_tied": {},
    "starcoder2_base": _NO_WINDOW,
    "starcoder2_no_bias_untied": _NO_WINDOW,
    "smollm3_base": {},
    "gemma2_base": {},
    "gemma3_text_defaults": {},
    "gemma3_text_p6": {},
    "gemma3n_text_base": {},
    "gemma3n_text_default_layers": {},
    "gemma4_text_base": {},
    "gemma4_text_dense": {},
    "gemma4_text_moe": {},
    "gpt_oss_base": {},
    "gpt_oss_no_attention_bias": {},
    "gpt_oss_tied_mqa_eps": {},
    "olmo2_base": {},
    "olmo2_bias_tied": {},
    "olmo3_base": {},
    "cohere2_base": {},
    "exaone4_base": {},
    "exaone4_no_window": {},
    "llama4_text_defaults": _CHUNKS,
    "llama4_text_chunk5_llama3": _CHUNKS,
    "mimo_v2_flash_base": {},
    "mimo_v2_flash_groups": {},
}


def converted(name: str, folder: Path, changes: dict[str, Any], kind: str = "F32") -> tuple[Any, Any, Checkpoint]:
    """A fixture's config and tensors, and the checkpoint that comes back from GGUF."""
    fixture = load_fixture(name)
    config = {**fixture.config, **changes}
    tensors = {key: x for key, x in rounded(fixture.tensors).items() if "rotary_emb" not in key}
    convert(folder / "it.gguf", {**config, **(fixture.old_config or {}), **changes}, tensors, kind)
    return config, tensors, read_checkpoint(folder / "it.gguf")


def read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor, read a few rows at a time."""
    made = checkpoint.tensors[name]
    files = {path: os.open(path, os.O_RDONLY) for path in checkpoint.paths}
    rows = int(np.prod(made.shape[:-1])) if len(made.shape) > 1 else 1
    last: dict[Any, Any] = {}
    try:
        parts = [read_made(made, files, row, min(row + 7, rows), made.shape[-1], last) for row in range(0, rows, 7)]
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    assert not last, "a turned matrix is kept after its last row"
    return np.concatenate(parts).reshape(made.shape)


@pytest.mark.parametrize("name", CASES)
def test_config_and_tensors_come_back(name: str, tmp_path: Path) -> None:
    config, tensors, checkpoint = converted(name, tmp_path, CASES[name])
    found = parse_config(checkpoint.config, eos_token_id=checkpoint.generation["eos_token_id"])
    assert found == parse_config(config, eos_token_id=[config["eos_token_id"]])
    assert checkpoint.tensors.keys() == tensors.keys()
    for key, x in tensors.items():
        np.testing.assert_array_equal(read(checkpoint, key), x, err_msg=key)


def test_every_architecture_has_a_case() -> None:
    read_ones = {ARCHES[load_fixture(name).config["model_type"]].name for name in CASES}
    names = {name.upper().replace("-", "_") for name in ARCHITECTURES}
    assert {one.replace("_", "") for one in read_ones} == {one.replace("_", "") for one in names}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("olmo3_thetas", "olmo2.rope.freq_base_swa"),
        ("gemma3_text_attention_bias", ""),
    ],
)
def test_a_feature_that_is_lost_is_refused_or_kept(name: str, key: str, tmp_path: Path) -> None:
    """A base of sliding layers that olmo3's config cannot have is refused; biases are kept."""
    if not key:
        config, _, checkpoint = converted(name, tmp_path, {"sliding_window_pattern": 6, "layer_types": None})
        assert checkpoint.config["attention_bias"] == config["attention_bias"]
        return
    with pytest.raises(UnsupportedModel, match=key):
        converted(name, tmp_path, {})

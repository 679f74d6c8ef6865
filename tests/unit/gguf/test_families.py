"""Each architecture: a checkpoint written as llama.cpp's converter writes it, and read back.

The config must give the same model in every field, and every tensor the same bits.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.gguf.architectures import ARCHITECTURES
from jswa.gguf.checkpoint import Checkpoint, read_checkpoint
from jswa.gguf.families.rope import share
from jswa.gguf.file.header import read_gguf
from jswa.gguf.made import read_made
from jswa.model.hf.config import parse_config
from tests.parity.load import read_config
from tests.support.gguf import metadata
from tests.support.gguf.fixtures import of_text, write_fixture
from tests.support.gguf.full import FULL_EXTRA
from tests.support.gguf.metadata import ARCHES

# llama.cpp has these numbers in its program, not in the file.
_CHUNKS = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
_AS_LLAMA = {"model_type": "llama"}  # the converter forgets the window, which is null here
_NO_WINDOW = {"sliding_window": None}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIRST_IS_FULL = {"layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING]}
# The file has the factor of Phi-3's LongRoPE in place of phimoe's own.
_FACTOR = math.sqrt(1 + math.log(128 / 32) / math.log(32))
_FACTORS = {"long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0, 20.0, 33.0]}
_FACTORS["short_factor"] = _FACTORS["long_factor"]
_PHIMOE_ROPE = {"rope_type": "longrope", **_FACTORS, "long_mscale": _FACTOR, "short_mscale": _FACTOR}
_SILU = {"hidden_act": "silu"}  # other activations are lost
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": None}
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
    "phimoe_base": {"original_max_position_embeddings": 4096},  # the converter needs it
    "phimoe_long": {"rope_scaling": _PHIMOE_ROPE, "rope_theta": 10_000.0},
    "dots1_base": {},
    "dots1_groups": {},
    "exaone_moe_base": {},
    "exaone_moe_groups": {},
    "afmoe_base": {
        "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL, _SLIDING],
        "global_attn_every_n_layers": 4,
    },
    "afmoe_defaults": {"mup_enabled": True},
    "laguna_base": _FIRST_IS_FULL,
    "laguna_per_element": {**_FIRST_IS_FULL, "moe_router_logit_softcapping": 0.0},  # which the converter forgets
    "step3p7_text": {},
    "cohere2_moe_base": {"expert_selection_fn": "sigmoid"},  # the converter says so of all models
    "cohere2_moe_dense_prefix": {},
    "mellum_base": {},
    "gemma_base": {},
    "gemma_defaults": {},
    "granite_base": {},
    "granite_defaults": {},
    "granitemoe_base": {},
    "granitemoe_defaults": {},
    "granitemoe_top3_bias_untied": _SILU,
    "glm4_base": {},
    "glm4_defaults": {},
    "glm4_partial_tied": _SILU,
    "glm4_yarn": {},
    "seed_oss_base": {},
    "seed_oss_defaults": {},
    "seed_oss_other_biases_tied": {**_SILU, **_PLAIN_ROPE},
    "ernie4_5_base": {},
    "ernie4_5_defaults": {},
    "ernie4_5_bias_untied": {**_SILU, **_PLAIN_ROPE},
    "olmoe_base": {},
    "olmoe_defaults": {},
    "arcee_base": {},
    "arcee_biases_tied": {},
    "arcee_defaults": {},
    "arcee_gelu": {"hidden_act": "relu2"},
    "nemotron_base": {},
    "nemotron_defaults": {},
    "hunyuan_v1_dense_base": {"max_position_embeddings": 262_144},  # the converter knows no other length
    "hunyuan_v1_dense_defaults": {},
    "hunyuan_v1_dense_plain_rope_bias": _SILU,
    "apertus_base": {},
    "apertus_defaults": {},
    "muse_glimmer_base": {"output_multiplier": 0.19611613},  # in float32
}


def converted(name: str, folder: Path, changes: dict[str, Any], kind: str = "F32") -> tuple[Any, Any, Checkpoint]:
    """A fixture's config, its decoder's tensors, and the checkpoint that comes back from GGUF."""
    config, tensors = write_fixture(folder / "it.gguf", name, kind, **changes)
    return config, tensors, read_checkpoint(folder / "it.gguf")


def read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor, read a few rows at a time."""
    made = checkpoint.tensors[name]
    files = {path: os.open(path, os.O_RDONLY) for path in checkpoint.paths}
    rows, columns = int(np.prod(made.shape[:-1])), made.shape[-1] if made.shape else 1
    last: dict[Any, Any] = {}
    try:
        parts = [read_made(made, files, row, min(row + 7, rows), columns, last) for row in range(0, rows, 7)]
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
    assert {ARCHES[of_text(read_config(name))["model_type"]][0] for name in CASES} == ARCHITECTURES.keys()


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


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("muse_glimmer_base", "blk.1.attn_q_norm.weight", "must have one number, and ones"),
        ("muse_glimmer_base", "blk.2.attn_k_norm.weight", "must have one number, and ones"),
        ("step3p7_text", "rope_freqs.weight", "must be factors of Llama 3's scaling"),
    ],
)
def test_a_vector_that_a_config_cannot_have_is_refused(name: str, tensor: str, said: str, tmp_path: Path) -> None:
    """Of norms that stand for one number, and of factors that stand for Llama 3's four."""
    path = converted(name, tmp_path, CASES[name])[2].paths[0]
    where = read_gguf(path).tensors[tensor]
    data = bytearray(path.read_bytes())
    data[where.begin + 4 : where.begin + 8] = np.float32(1.7).tobytes()
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=said):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("granite_base", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned = False: must be True"),
        ("granite_base", {"ssm.conv_kernel": 4, "expert_count": 0}, ""),
        ("granite_base", {"expert_shared_feed_forward_length": 7}, "expert_shared_feed_forward_length = 7: must be 96"),
        ("granitemoe_base", {"expert_shared_feed_forward_length": 7}, "does not know for granitemoe"),
        ("glm4_base", {"rope.dimension_sections": [8, 8, 0, 0]}, "does not know for glm4"),
    ],
)
def test_keys_of_relatives_are_refused_unless_they_change_nothing(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Granite 4, which the converter writes as Granite if it has no state-space layers, and of GLM-4.1V."""
    kind = of_text(read_config(name))["model_type"]
    usual = FULL_EXTRA[kind]

    def also(w: GGUFWriter, c: Any) -> None:
        usual(w, c)
        for key, value in changes.items():
            add = {bool: w.add_bool, int: w.add_uint32, list: w.add_array}[type(value)]
            add(f"{w.arch}.{key}", value)

    monkeypatch.setitem(metadata.EXTRA, kind, also)
    if not said:
        assert converted(name, tmp_path, {})[2].config["model_type"] == "granite"
        return
    with pytest.raises(UnsupportedModel, match=re.escape(said)):
        converted(name, tmp_path, {})


def test_a_share_of_rotation_that_the_file_does_not_tell_is_refused(tmp_path: Path) -> None:
    """Of Nemotron, where the converter counts in heads of another size than the model's."""
    with pytest.raises(UnsupportedModel, match=re.escape("nemotron.rope.dimension_count = 4: must be 8, for half of")):
        converted("nemotron_biases_tied", tmp_path, {})


def test_numbers_that_the_metadata_lack_are_named(tmp_path: Path) -> None:
    """Of Apertus with another activation, which llama.cpp does not run."""
    with pytest.raises(CheckpointError, match=re.escape("xielu.alpha_p = None: must list a finite number for each of")):
        converted("apertus_relu2_bias_tied", tmp_path, {})


def test_the_share_of_a_head_is_the_number_that_rotates() -> None:
    """Rounded down, for every part of every size of head: 30 / 52 * 52 is less than 30."""
    assert all(int(share(part, head) * head) == part for head in range(2, 1025, 2) for part in range(2, head + 1, 2))

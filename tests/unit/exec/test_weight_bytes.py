"""The bytes of the weights that a config tells are those that the engine holds (jswa/exec/sizing.py)."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jswa.exec.sizing import weight_bytes
from jswa.forms.layouts import lay_out
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import parse_quantization
from jswa.model.partition import shard_config
from jswa.model.weights.load import load_checkpoint
from pallas_kernels.experts.api import Implementation as Experts
from pallas_kernels.experts.int4_tiles import WIDE_LINES
from tests.support.checkpoints import float4
from tests.support.checkpoints.int8_groups import write_groups
from tests.support.checkpoints.packed_integers import CASES, Case, write_both
from tests.support.checkpoints.quantized import COMPRESSED, fp8_block, int8_rows, plain_tensors, write

FLOAT32 = np.dtype(np.float32)
UNREAD = {"ignore": ["lm_head", "re:.*self_attn\\.[qkv]_proj$", "model.layers.0.self_attn.o_proj"]}


def told(folder: Path) -> int:
    """Return the bytes by config.json alone."""
    raw = json.loads((folder / "config.json").read_text())
    return weight_bytes(parse_config(raw), parse_quantization(raw), "auto", "float32")


def held(folder: Path) -> int:
    """Return the bytes of the parameters."""
    return sum(value.nbytes for value in load_checkpoint(folder, FLOAT32, quantization="auto")[1].values())


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the quantization_config."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("name", ["compressed", "compressed 8 bits", "gptq", "awq", "awq one group"])
def test_packed_integers_count_as_they_are_held(name: str, tmp_path: Path) -> None:
    """4 bits with a scale of 16 and a zero point of 8 for each group; 8 packed bits in the engine's dtype."""
    folder, _ = write_both(tmp_path, CASES[name], "mixtral_base", num_hidden_layers=1, intermediate_size=128)
    assert held(folder) == told(folder)


@pytest.mark.parametrize("name", ["compressed symmetric bf16", "awq one group"])
def test_linear_layers_in_tiles_count_as_they_are_held(name: str, tmp_path: Path) -> None:
    """With a scale and a zero point for each 32 inputs, whatever the groups; two scales in float16 are not told."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    folder, _ = write_both(tmp_path, CASES[name], "llama_one_layer", others={}, one_order=True, **sizes)
    raw = json.loads((folder / "config.json").read_text())
    params = load_checkpoint(folder, FLOAT32, quantization="auto")[1]
    lay_out(params, linear="mosaic", experts=False)
    told = weight_bytes(parse_config(raw), parse_quantization(raw), "auto", "float32", linear="mosaic")
    rests = sum(value.nbytes // 21 for key, value in params.items() if value.shape[-2:-1] == (WIDE_LINES,))
    assert told == sum(value.nbytes for value in params.values()) - 2 * rests


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("compressed", UNREAD),
        ("compressed", {"ignore": ["re:.*self_attn.*"]}),
        ("awq", {"modules_to_not_convert": ["self_attn"]}),
        ("gptq", {"dynamic": {"-:.*\\.self_attn\\..*": {}}}),
    ],
)
def test_layers_that_are_left_out_count_in_the_engines_dtype(case: str, more: dict[str, Any], tmp_path: Path) -> None:
    """By name, by pattern or by part of a name. A pattern with brackets is not run: the checkpoint is untrusted."""
    folder, _ = write_both(tmp_path, CASES[case], "llama_one_layer", others={"self_attn": None}, intermediate_size=128)
    rewrite(folder, **more)
    params = load_checkpoint(folder, FLOAT32, quantization="auto")[1]
    qkv = params["layers.0.attention.qkv"]
    seen = held(folder)
    if more is UNREAD:
        groups = qkv.shape[0] // CASES[case].group
        seen += qkv.shape[1] * (qkv.shape[0] // 2 + 3 * groups) - qkv.nbytes
    assert told(folder) == seen


def test_groups_of_layers_count_each_in_its_form(tmp_path: Path) -> None:
    """Packed integers of 4 bits, and the down projection in int8 with a scale per output."""
    case = CASES["compressed symmetric bf16"]
    eight_bits = CASES["compressed 8 bits"]._replace(group=0, symmetric=True)
    folder, _ = write_both(tmp_path, case, "llama_one_layer", others={"down_proj": eight_bits})
    weights = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
    eight = {"targets": ["re:.*down_proj"], "weights": weights, "format": "int-quantized"}
    four = case.config["config_groups"]["group_0"]
    rewrite(folder, format="mixed-precision", config_groups={"a": {**four, "format": "pack-quantized"}, "b": eight})
    model = parse_config(json.loads((folder / "config.json").read_text()))
    rows = model.d_model  # outputs of the down projection
    inputs = 96
    as_packed, as_int8 = 4 * rows * inputs, rows * inputs + 4 * rows
    assert told(folder) == held(folder) - as_packed + as_int8


@pytest.mark.parametrize("sizes", [{"": 16}, {"k_proj": 8, "": 16}])
def test_int8_in_groups_counts_as_it_is_held(sizes: dict[str, int], tmp_path: Path) -> None:
    """A byte a weight, and a scale of 16 bits for the smallest group of q, k and v."""
    write_groups(tmp_path, "llama_gqa", sizes)
    assert told(tmp_path) == held(tmp_path)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("ends", [("model.embed_tokens",), ("model.embed_tokens", "lm_head")])
def test_embedding_and_head_in_int8_count_as_they_are_held(group: int, ends: tuple[str, ...], tmp_path: Path) -> None:
    """If the config names them; an embedding in groups of 16 is widened."""
    write_groups(tmp_path, "llama_gqa", {"": group}, ends=ends)
    assert told(tmp_path) == held(tmp_path)


def test_int8_with_zero_points_counts_in_the_engines_dtype(tmp_path: Path) -> None:
    """As it is held."""
    config, tensors = plain_tensors("llama_one_layer")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        tensors[key], tensors[f"{key}_scale"], tensors[f"{key}_zero_point"], _ = int8_rows(tensors[key])
    write(tmp_path, {**config, "quantization_config": COMPRESSED}, tensors)
    assert told(tmp_path) == held(tmp_path)


def test_devices_share_the_bytes_of_matrices_in_4_bits() -> None:
    """A device of four holds a quarter of each matrix, with the scales of its groups."""
    config, _ = plain_tensors("llama_gqa", num_attention_heads=8, num_key_value_heads=4, intermediate_size=256)
    raw = {**config, "quantization_config": Case("compressed", group=16).config}
    model, stored = parse_config(raw), parse_quantization(raw)
    part = shard_config(model, 4)
    linear = weight_bytes(model, stored, "auto", "float32") - weight_bytes(model, stored, "none", "float32")
    own = weight_bytes(part, stored, "auto", "float32") - weight_bytes(part, stored, "none", "float32")
    assert 4 * own == linear < 0


@pytest.mark.parametrize("experts", ["xla", "mosaic", "mosaic_overlap"])
@pytest.mark.parametrize("stored", ["channels", "4 bits", "NVFP4"])
def test_experts_that_their_kernel_widens_count_in_the_engines_dtype(
    stored: str, experts: Experts, tmp_path: Path
) -> None:
    """The default of Hopper reads stored experts of 8 and 4 bits in 16 bits alone, unless the mode names 8."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 128, "hidden_size": 64}
    if stored == "channels":
        config, tensors = plain_tensors("mixtral_base", **sizes)
        for key in [key for key in tensors if re.search(r"(_proj|\.w\d)\.weight$", key)]:
            tensors[key], tensors[f"{key}_scale"], _ = fp8_block(tensors[key], (1, tensors[key].shape[1]))
        folder = tmp_path
        write(folder, {**config, "quantization_config": {"quant_method": "fp8"}}, tensors)
    elif stored == "NVFP4":
        folder, _ = float4.write_both(tmp_path, "modelopt", "mixtral_base", **sizes)
    else:
        folder, _ = write_both(tmp_path, CASES["compressed symmetric bf16"], "mixtral_base", others={}, **sizes)
    raw = json.loads((folder / "config.json").read_text())
    params = load_checkpoint(folder, FLOAT32, quantization="auto", experts=experts)[1]
    told = weight_bytes(parse_config(raw), parse_quantization(raw), "auto", "float32", experts)
    assert told == sum(value.nbytes for value in params.values())

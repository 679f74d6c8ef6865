"""MiMo-V2.6's checkpoints: experts in MXFP4, projections in float8 with scales of blocks, the rest plain; in slices.

SGLang 0.5.23 reads them so: configs/model_config.py (`store_dtype`, `attention_projection_layout`), models/mimo_v2.py.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jswa.errors import UnsupportedModel
from jswa.exec.sizing import weight_bytes
from jswa.model.drafters.mtp_files import open_mtp
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import parse_quantization
from jswa.model.weights.load import load_checkpoint
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.quantized import fp8_block, mxfp4, plain_tensors, write
from tests.support.drafts.mtp import mtp_tensors

BLOCK = (20, 24)  # neither divides the rows of a slice nor the inputs
SIXTEEN = jnp.dtype(jnp.bfloat16)
MIXED: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(7)] + ["model.decoder.self_attn.o_proj"],
    "mxfp4_block_size": 32,
    "quant_method": "fp8",
    "store_dtype": "mxfp4",
    "weight_block_size": list(BLOCK),
}
Tensors = dict[str, np.ndarray]


def _mixed(slices: int) -> tuple[dict[str, Any], Tensors, Tensors]:
    """Return the config of a model with as many KV heads in full layers as slices, its tensors, and their numbers."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": slices, "swa_num_key_value_heads": 8}
    config, exact = plain_tensors("mimo_v2_flash_base", **heads)
    config |= {"model_type": "mimo_v2", "attention_projection_layout": "fused_qkv", "moe_router_dtype": "bfloat16"}
    tensors, rng = dict(exact), np.random.default_rng(1)
    for key in exact:
        if ".experts." in key:
            tensors[key], tensors[f"{key}_scale"], exact[key] = mxfp4(rng, exact[key].shape)
        elif ".mlp." in key and key.endswith("_proj.weight"):
            tensors[key], tensors[f"{key}_scale_inv"], exact[key] = fp8_block(exact[key], BLOCK)
        elif key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            del tensors[key]
        else:  # router, output of attention, norms, sinks, embedding and head
            tensors[key] = exact[key].astype(ml_dtypes.bfloat16)
            exact[key] = tensors[key].astype(np.float32)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}.self_attn"
        tensors |= _in_slices(prefix, exact, slices)
    return config, tensors, exact


def _in_slices(prefix: str, exact: Tensors, slices: int) -> Tensors:
    """Return q, k and v in one tensor, whose slices were quantized one by one; `exact` gets their numbers."""
    keys = [f"{prefix}.{name}_proj.weight" for name in "qkv"]
    ranks = [np.concatenate(x) for x in zip(*(np.split(exact[key], slices) for key in keys), strict=True)]
    codes, scales, unpacked = zip(*(fp8_block(rank, BLOCK) for rank in ranks), strict=True)
    q, k, _ = (len(exact[key]) // slices for key in keys)
    for key, rows in zip(keys, zip(*(np.split(x, [q, q + k]) for x in unpacked), strict=True), strict=True):
        exact[key] = np.concatenate(rows)
    name = f"{prefix}.qkv_proj.weight"
    return {name: np.concatenate(codes), f"{name}_scale_inv": np.concatenate(scales)}


@pytest.mark.parametrize("slices", [4, 8])
def test_the_mixed_form_has_the_numbers_of_a_plain_checkpoint(slices: int, tmp_path: Path) -> None:
    """Flash has four KV heads in full layers and so four slices, Pro eight; towers and drafters are not read."""
    config, tensors, exact = _mixed(slices)
    others: Tensors = {
        "visual.blocks.0.attn.qkv.weight": np.zeros((4, 4), np.float32),
        "audio_encoder.layers.0.fc1.weight": np.zeros((4, 4), np.float32),
        "speech_embeddings.0.weight": np.zeros((4, 4), np.float32),
        "model.mtp.layers.0.eh_proj.weight": np.zeros((4, 4), np.float32),
    }
    write_checkpoint(tmp_path / "plain", config, exact)
    write(tmp_path / "mixed", {**config, "quantization_config": MIXED}, tensors | others)
    for dtype in (jnp.dtype(jnp.float32), SIXTEEN):
        _, plain = load_checkpoint(tmp_path / "plain", dtype)
        _, found = load_checkpoint(tmp_path / "mixed", dtype)
        assert plain.keys() == found.keys()
        for name, value in plain.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_experts_stay_in_mxfp4_and_their_memory_is_foreseen(tmp_path: Path) -> None:
    """The bytes that config.json lets expect are those that are held."""
    config, tensors, _ = _mixed(4)
    config["quantization_config"] = MIXED
    write(tmp_path, config, tensors)
    model, found = load_checkpoint(tmp_path, SIXTEEN, quantization="auto")
    stacks = {name.rsplit(".", 1)[0] for name in found if name.endswith(".blocks")}
    assert stacks == {f"layers.{i}.mlp.{kind}" for i in range(1, 7) for kind in ("gate_up", "down")}
    held = sum(value.nbytes for value in found.values())
    assert weight_bytes(model, parse_quantization(config), "auto", "bfloat16") == held
    # If the config did not say so, one would expect 16 bits.
    unsaid = parse_quantization({**config, "quantization_config": {**MIXED, "store_dtype": None}})
    assert weight_bytes(model, unsaid, "auto", "bfloat16") > held


def test_another_block_size_of_mxfp4_is_refused() -> None:
    config, _, _ = _mixed(4)
    with pytest.raises(UnsupportedModel, match="mxfp4_block_size = 16: must be 32"):
        parse_config({**config, "quantization_config": {**MIXED, "mxfp4_block_size": 16}})


@pytest.mark.parametrize("slices", [4, 8])
def test_the_layers_for_drafts_have_the_slices_of_the_model(slices: int, tmp_path: Path) -> None:
    """They slide, and a sliding layer has other KV heads than a full one."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": slices, "swa_num_key_value_heads": 2 * slices}
    config, exact = plain_tensors("mimo_v2_flash_base", **heads)
    drafts = mtp_tensors(config, 1, seed=5)
    prefix = "model.mtp.layers.0.self_attn"
    rows = [np.split(drafts.pop(f"{prefix}.{name}_proj.weight"), slices) for name in "qkv"]
    drafts[f"{prefix}.qkv_proj.weight"] = np.concatenate([x for rank in zip(*rows, strict=True) for x in rank])
    write_checkpoint(tmp_path, config, exact | drafts)
    opened = open_mtp(tmp_path, parse_config(config))
    assert opened.table["layers.0.attention.qkv"].slices == slices

"""Matrices held in 8 and 4 bits: the numbers of the checkpoint where it has them, the same logits as those numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import CheckpointError, ConfigError
from jswa.llm import TINY
from jswa.model.transformer import Params
from jswa.model.weights.formats import Mode
from jswa.model.weights.load import load_checkpoint
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import Mxfp4, tiles, unpack
from pallas_kernels.quantized import Quantized, dequantized
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.oracles import dense_logits
from tests.support.quantized import fp8_block, int8_rows, mxfp4, write
from tests.unit.model.weights.test_dequantize import COMPRESSED, plain_tensors
from tools.tiny import scores

FLOAT32 = jnp.dtype("float32")
CHANNELS = {"quant_method": "fp8"}


def load(folder: Path, mode: Mode, experts: Implementation = "xla") -> Params:
    """In float32 but for what is held in fewer bits."""
    return load_checkpoint(folder, FLOAT32, quantization=mode, experts=experts)[1]


def plain(params: Params) -> Params:
    """The numbers that they stand for."""
    out: Params = {}
    for name, value in params.items():
        base, _, field = name.rpartition(".")
        if field == "values":
            scales = params[f"{base}.scales"]
            if base == "embed":
                out[base] = dequantized(Quantized(value.T, scales), FLOAT32).T
            else:
                out[base] = dequantized(Quantized(value, scales), FLOAT32)
        elif field == "blocks":
            out[base] = jnp.swapaxes(unpack(Mxfp4(value, params[f"{base}.scales"]), FLOAT32), 1, 2)
        elif field != "scales":
            out[name] = value
    return out


def assert_equal(one: Params, other: Params) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def by_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 with a scale per row."""
    return fp8_block(x, (1, x.shape[-1]))


def by_tensor(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 with one scale."""
    return fp8_block(x, x.shape)


def whole_numbers(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 with a scale per row."""
    scale = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float32)
    codes = np.round(x / scale).astype(np.int8)
    return codes, scale, codes.astype(np.float32) * scale


@pytest.mark.parametrize(
    ("name", "kind", "of"),
    [
        ("llama_gqa", by_rows, 4),
        ("llama_gqa", whole_numbers, 4),
        ("mimo_v2_flash_base", by_tensor, 4),
        ("gemma4_text_mix", by_rows, 4),  # keys and values folded: outputs, and inputs, in another order
        ("phi3_base", whole_numbers, 4),
    ],
)
def test_what_has_a_scale_per_output_is_held_as_it_is(
    name: str, kind: Callable[..., Any], of: int, tmp_path: Path
) -> None:
    """The very numbers of the checkpoint, in 8 bits; nothing is rounded again, also where more was asked for."""
    config, exact = plain_tensors(name)
    tensors: dict[str, np.ndarray] = {}
    for key, value in exact.items():
        tensors[key] = value
        if key.endswith("_proj.weight") and "layers" in key and "per_layer" not in key:
            tensors[key], tensors[f"{key}_scale"], _ = kind(value)
    write(tmp_path, {**config, "quantization_config": CHANNELS}, tensors)
    held = load(tmp_path, "auto")
    assert sum(value.dtype.itemsize == 1 for value in held.values()) >= of * len(config.get("layer_types", "xx"))
    assert_equal(plain(held), load(tmp_path, "none"))
    same, other = load(tmp_path, "int8"), load(tmp_path, "fp8")
    if kind is not whole_numbers:
        same, other = other, same
    eight = [key for key in held if key.endswith(("values", "scales"))]
    for key in eight:
        np.testing.assert_array_equal(same[key], held[key], err_msg=key)
    assert all(other[key].dtype != held[key].dtype for key in eight if key.endswith("values"))


def test_what_has_other_scales_is_not(tmp_path: Path) -> None:
    """Blocks and zero points are unpacked."""
    config, exact = plain_tensors("llama_one_layer")
    blocks: dict[str, np.ndarray] = dict(exact)
    zeros: dict[str, np.ndarray] = dict(exact)
    for key in [key for key in exact if key.endswith("_proj.weight")]:
        blocks[key], blocks[f"{key}_scale"], _ = fp8_block(exact[key], (16, 24))
        zeros[key], zeros[f"{key}_scale"], zeros[f"{key}_zero_point"], _ = int8_rows(exact[key])
    for tensors, method in ((blocks, {**CHANNELS, "weight_block_size": [16, 24]}), (zeros, COMPRESSED)):
        write(tmp_path, {**config, "quantization_config": method}, tensors)
        assert_equal(load(tmp_path, "auto"), load(tmp_path, "none"))


def packed_gpt_oss(folder: Path, scale: int | None = None, *, zeros: bool = False) -> None:
    """gpt-oss with experts in MXFP4, of this scale, or all of them zeros of either sign."""
    config, exact = plain_tensors("gpt_oss_base", intermediate_size=64)
    tensors, rng = dict(exact), np.random.default_rng(1)
    for key in [key for key in exact if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(key).shape
        packed, exponents, _ = mxfp4(rng, (experts, out, inner))
        packed &= 0x88 if zeros else 0xFF
        tensors[f"{key}_blocks"] = packed.reshape(experts, out, inner // 32, 16)
        tensors[f"{key}_scales"] = exponents if scale is None else np.full_like(exponents, scale)
    write(folder, {**config, "quantization_config": {"quant_method": "mxfp4"}}, tensors)


def test_experts_in_mxfp4_stay_packed(tmp_path: Path) -> None:
    """Gates before ups, outputs first; in tiles for Hopper. Logits are those of the unpacked numbers."""
    packed_gpt_oss(tmp_path)
    held, whole = load(tmp_path, "int8"), load(tmp_path, "none")
    assert_equal(plain(load(tmp_path, "auto")), whole)
    assert held["layers.0.mlp.gate_up.blocks"].shape == (4, 128, 32)
    unpacked = plain(held)
    for name in whole:
        if ".mlp." in name:
            np.testing.assert_array_equal(unpacked[name], whole[name], err_msg=name)
    tokens = np.arange(3, 20, dtype=np.int32)
    model, _ = load_checkpoint(tmp_path, FLOAT32)
    np.testing.assert_allclose(
        dense_logits(model, held, tokens), dense_logits(model, unpacked, tokens), rtol=1e-3, atol=2e-3
    )
    tiled = load(tmp_path, "auto", "mosaic")
    want = tiles(Mxfp4(held["layers.1.mlp.down.blocks"], held["layers.1.mlp.down.scales"]))
    np.testing.assert_array_equal(tiled["layers.1.mlp.down.words"], want.words)
    np.testing.assert_array_equal(tiled["layers.1.mlp.down.scales"], want.scales)


def test_what_hoppers_kernel_cannot_run_is_refused(tmp_path: Path) -> None:
    """Scales outside of its range, and experts in 8 bits where they were asked for."""
    packed_gpt_oss(tmp_path, scale=3)
    with pytest.raises(CheckpointError, match=r"layers\..* in MXFP4 does not fit Hopper's kernel"):
        load(tmp_path, "auto", "mosaic")
    packed_gpt_oss(tmp_path / "zeros", scale=3, zeros=True)
    assert "layers.0.mlp.down.words" in load(tmp_path / "zeros", "auto", "mosaic")
    fixture = load_fixture("gpt_oss_base")
    write_checkpoint(tmp_path / "plain", fixture.config, fixture.tensors)
    with pytest.raises(ConfigError, match="quantization = 'fp8': experts in 8 bits run on moe_backend = xla"):
        load(tmp_path / "plain", "fp8", "mosaic")
    assert "layers.0.mlp.gate_up" in load(tmp_path / "plain", "auto", "mosaic")


@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["gpt_oss_base", "gemma3_text_p2"])
def test_logits_are_those_of_the_rounded_numbers(name: str, mode: Mode, tmp_path: Path) -> None:
    """Every linear layer and expert in 8 bits, embedding and head too, whether they are one or two."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, whole = load_checkpoint(tmp_path, FLOAT32)
    held = load(tmp_path, mode)
    assert {value.dtype.name for value in held.values()} == {"float32", "int8" if mode == "int8" else "uint8"}
    assert "embed.values" in held
    assert ("lm_head.values" in held) == (not model.tie_embeddings)
    got = dense_logits(model, held, fixture.tokens)
    np.testing.assert_allclose(got, dense_logits(model, plain(held), fixture.tokens), rtol=1e-3, atol=2e-3)
    assert np.abs(got - dense_logits(model, whole, fixture.tokens)).max() > 1e-3


@pytest.mark.parametrize(("mode", "most"), [("int8", 1.01), ("fp8", 1.02)])
def test_tiny_predicts_as_well_in_8_bits(mode: Mode, most: float) -> None:
    """Bits per byte of stories that it has not seen: int8 within 1 % of float32."""
    model, params = load_checkpoint(TINY, FLOAT32)
    held = load_checkpoint(TINY, FLOAT32, quantization=mode)[1]
    texts = scores.held_out_stories(8)
    assert scores.bits_per_byte(model, held, texts) < most * scores.bits_per_byte(model, params, texts)

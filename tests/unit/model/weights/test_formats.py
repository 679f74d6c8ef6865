"""Storage formats: quantized matrices keep the checkpoint's numbers, and logits agree with dequantized weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import CheckpointError, ConfigError
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import dummy_checkpoint, load_checkpoint
from jswa.storage.convert import convert
from jswa.storage.hub import TINY
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import Mxfp4, Mxfp4Joined, Mxfp4Tiles, parted, tiles, unpack, untiled
from pallas_kernels.quantized import Quantized, dequantized
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.quantized import (
    COMPRESSED,
    fp8_block,
    int8_rows,
    plain_tensors,
    write,
    write_gpt_oss_mxfp4,
)
from tests.support.oracles import dense_logits
from tools.tiny import scores

FLOAT32 = jnp.dtype("float32")
CHANNELS = {"quant_method": "fp8"}


def load(folder: Path, mode: QuantizationMode, experts: Implementation = "xla") -> Params:
    """Load parameters whose unquantized matrices are float32."""
    return load_checkpoint(folder, FLOAT32, quantization=mode, experts=experts)[1]


def dequantize(params: Params) -> Params:
    """Return dequantized parameters."""
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
    """Assert that parameters are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def fp8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float8 with a scale per row."""
    return fp8_block(x, (1, x.shape[-1]))


def fp8_tensor(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float8 with one scale."""
    return fp8_block(x, x.shape)


def int8_symmetric(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return int8 with a scale per row."""
    scale = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float32)
    codes = np.round(x / scale).astype(np.int8)
    return codes, scale, codes.astype(np.float32) * scale


@pytest.mark.parametrize(
    ("name", "kind", "of"),
    [
        ("llama_gqa", fp8_rows, 4),
        ("llama_gqa", int8_symmetric, 4),
        ("mimo_v2_flash_base", fp8_tensor, 4),
        ("gemma4_text_mix", fp8_rows, 4),  # folded keys: outputs and inputs are reordered
        ("phi3_base", int8_symmetric, 4),
    ],
)
def test_matrices_with_a_scale_per_output_keep_the_stored_numbers(
    name: str, kind: Callable[..., Any], of: int, tmp_path: Path
) -> None:
    """Nothing is quantized again, even if the checkpoint is loaded with the same quantization."""
    config, exact = plain_tensors(name)
    tensors: dict[str, np.ndarray] = {}
    for key, value in exact.items():
        tensors[key] = value
        if key.endswith("_proj.weight") and "layers" in key and "per_layer" not in key:
            tensors[key], tensors[f"{key}_scale"], _ = kind(value)
    write(tmp_path, {**config, "quantization_config": CHANNELS}, tensors)
    params = load(tmp_path, "auto")
    assert sum(value.dtype.itemsize == 1 for value in params.values()) >= of * len(config.get("layer_types", "xx"))
    assert_equal(dequantize(params), load(tmp_path, "none"))
    same, other = load(tmp_path, "int8"), load(tmp_path, "fp8")
    if kind is not int8_symmetric:
        same, other = other, same
    eight = [key for key in params if key.endswith(("values", "scales"))]
    for key in eight:
        np.testing.assert_array_equal(same[key], params[key], err_msg=key)
    assert all(other[key].dtype != params[key].dtype for key in eight if key.endswith("values"))


def test_matrices_with_block_scales_or_zero_points_are_dequantized(tmp_path: Path) -> None:
    """Mode auto then gives the same parameters as none."""
    config, exact = plain_tensors("llama_one_layer")
    blocks: dict[str, np.ndarray] = dict(exact)
    zeros: dict[str, np.ndarray] = dict(exact)
    for key in [key for key in exact if key.endswith("_proj.weight")]:
        blocks[key], blocks[f"{key}_scale"], _ = fp8_block(exact[key], (16, 24))
        zeros[key], zeros[f"{key}_scale"], zeros[f"{key}_zero_point"], _ = int8_rows(exact[key])
    for tensors, method in ((blocks, {**CHANNELS, "weight_block_size": [16, 24]}), (zeros, COMPRESSED)):
        write(tmp_path, {**config, "quantization_config": method}, tensors)
        assert_equal(load(tmp_path, "auto"), load(tmp_path, "none"))


def test_mxfp4_experts_stay_packed(tmp_path: Path) -> None:
    """Gates precede ups, and the Hopper kernel gets tiles. Logits agree with dequantized weights."""
    write_gpt_oss_mxfp4(tmp_path)
    params, whole = load(tmp_path, "int8"), load(tmp_path, "none")
    assert_equal(dequantize(load(tmp_path, "auto")), whole)
    assert params["layers.0.mlp.gate_up.blocks"].shape == (4, 128, 32)
    unpacked = dequantize(params)
    for name in whole:
        if ".mlp." in name:
            np.testing.assert_array_equal(unpacked[name], whole[name], err_msg=name)
    tokens = np.arange(3, 15, dtype=np.int32)  # behind token 16, 1e-6 of the weights moves the logits by up to 0.04
    model, _ = load_checkpoint(tmp_path, FLOAT32)
    np.testing.assert_allclose(
        dense_logits(model, params, tokens), dense_logits(model, unpacked, tokens), rtol=1e-3, atol=2e-3
    )
    tiled = load(tmp_path, "auto", "mosaic")
    want = tiles(Mxfp4(params["layers.1.mlp.down.blocks"], params["layers.1.mlp.down.scales"]))
    np.testing.assert_array_equal(tiled["layers.1.mlp.down.words"], want.words)
    np.testing.assert_array_equal(tiled["layers.1.mlp.down.scales"], want.scales)


def test_formats_that_the_hopper_kernel_cannot_run_are_refused(tmp_path: Path) -> None:
    """These are MXFP4 scales out of its range, and experts in 8 bits whose sides are no whole tiles."""
    write_gpt_oss_mxfp4(tmp_path, scale=3)
    with pytest.raises(CheckpointError, match=r"layers\..* in MXFP4 does not fit the Hopper kernel"):
        load(tmp_path, "auto", "mosaic")
    write_gpt_oss_mxfp4(tmp_path / "zeros", scale=3, zeros=True)
    assert "layers.0.mlp.down.words" in load(tmp_path / "zeros", "auto", "mosaic")
    fixture = load_fixture("gpt_oss_base")
    write_checkpoint(tmp_path / "plain", fixture.config, fixture.tensors)
    with pytest.raises(
        ConfigError, match=r"kernels = 'experts=mosaic': .*\] in 8 bits does not fit multiples of 64: must be xla"
    ):
        load(tmp_path / "plain", "fp8", "mosaic")
    assert "layers.0.mlp.gate_up" in load(tmp_path / "plain", "auto", "mosaic")


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_experts_in_8_bits_are_in_tiles_for_hopper(mode: QuantizationMode, tmp_path: Path) -> None:
    """They are the numbers that XLA gets, of a checkpoint, of a converted one, and of random weights."""
    write(tmp_path / "source", *plain_tensors("gpt_oss_base", intermediate_size=64))
    held, tiled = load(tmp_path / "source", mode), load(tmp_path / "source", mode, "mosaic")
    assert tiled.keys() == {key.replace("values", "tiles") if ".mlp." in key else key for key in held}
    for name in ("layers.0.mlp.gate_up", "layers.2.mlp.down"):
        want = eight_bits.tiles(Quantized(held[f"{name}.values"], held[f"{name}.scales"]))
        np.testing.assert_array_equal(tiled[f"{name}.tiles"], want.codes)
        np.testing.assert_array_equal(tiled[f"{name}.scales"], want.scales)
    convert(tmp_path / "source", tmp_path / "converted", "float32", mode)
    assert_equal(load(tmp_path / "converted", "auto", "mosaic_overlap"), tiled)
    _, random = dummy_checkpoint(tmp_path / "source", FLOAT32, 0, quantization=mode, experts="mosaic")
    assert {key: (value.shape, value.dtype) for key, value in random.items()} == {
        key: (value.shape, value.dtype) for key, value in tiled.items()
    }


def test_experts_that_a_checkpoint_has_in_8_bits_are_kept_for_hopper_if_that_is_asked_for(tmp_path: Path) -> None:
    """By the backend that reads no 16 bits, or by the mode. The default kernel widens them, as it is measured so."""
    config, exact = plain_tensors("mixtral_base", num_hidden_layers=1, intermediate_size=64)
    tensors: dict[str, np.ndarray] = dict(exact)
    for key in [key for key in exact if ".experts." in key]:
        tensors[key], tensors[f"{key}_scale"], _ = fp8_rows(exact[key])
    write(tmp_path, {**config, "quantization_config": CHANNELS}, tensors)
    held = load(tmp_path, "auto")
    want = eight_bits.tiles(Quantized(held["layers.0.mlp.down.values"], held["layers.0.mlp.down.scales"]))
    asked: list[tuple[QuantizationMode, Implementation]] = [("auto", "mosaic_overlap"), ("fp8", "mosaic")]
    for mode, experts in asked:
        np.testing.assert_array_equal(load(tmp_path, mode, experts)["layers.0.mlp.down.tiles"], want.codes)
    np.testing.assert_array_equal(
        load(tmp_path, "auto", "mosaic")["layers.0.mlp.down"], load(tmp_path, "none")["layers.0.mlp.down"]
    )


def test_formats_that_experts_on_triton_cannot_read_are_refused(tmp_path: Path) -> None:
    """By the name of the option; experts that are widened at load run."""
    write_gpt_oss_mxfp4(tmp_path)
    with pytest.raises(ConfigError, match=r"kernels = 'experts=triton': layers\..* is in MXFP4"):
        load(tmp_path, "auto", "triton")
    assert "layers.0.mlp.gate_up" in load(tmp_path, "none", "triton")
    fixture = load_fixture("gpt_oss_base")
    write_checkpoint(tmp_path / "plain", fixture.config, fixture.tensors)
    with pytest.raises(ConfigError, match="quantization = 'fp8': experts in 8 bits need experts=xla"):
        load(tmp_path / "plain", "fp8", "triton")
    assert "layers.0.mlp.gate_up" in load(tmp_path / "plain", "auto", "triton")


@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["gpt_oss_base", "gemma3_text_p2"])
def test_logits_agree_with_the_dequantized_weights(name: str, mode: QuantizationMode, tmp_path: Path) -> None:
    """Linear layers, experts, embedding and head are in 8 bits, with tied and untied heads."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, whole = load_checkpoint(tmp_path, FLOAT32)
    params = load(tmp_path, mode)
    assert {value.dtype.name for value in params.values()} == {"float32", "int8" if mode == "int8" else "uint8"}
    assert "embed.values" in params
    assert ("lm_head.values" in params) == (not model.tie_embeddings)
    got = dense_logits(model, params, fixture.tokens)
    np.testing.assert_allclose(got, dense_logits(model, dequantize(params), fixture.tokens), rtol=1e-3, atol=2e-3)
    assert np.abs(got - dense_logits(model, whole, fixture.tokens)).max() > 1e-3


@pytest.mark.parametrize(("mode", "most"), [("int8", 1.01), ("fp8", 1.02)])
def test_tiny_predicts_as_well_in_8_bits(mode: QuantizationMode, most: float) -> None:
    """Bits per byte of params-out stories: int8 is within 1 % of float32, fp8 within 2 %."""
    model, plain = load_checkpoint(TINY, FLOAT32)
    params = load_checkpoint(TINY, FLOAT32, quantization=mode)[1]
    texts = scores.held_out_stories(8)
    assert scores.bits_per_byte(model, params, texts) < most * scores.bits_per_byte(model, plain, texts)


def numbers_of(params: Params, name: str) -> np.ndarray:
    """Return the numbers of an MXFP4 matrix [E, outputs, inputs], of blocks or of tiles."""
    if f"{name}.joined" in params:
        return np.asarray(untiled(parted(Mxfp4Joined(params[f"{name}.joined"]))))
    scales = params[f"{name}.scales"]
    if f"{name}.blocks" in params:
        return np.asarray(unpack(Mxfp4(params[f"{name}.blocks"], scales), FLOAT32))
    return np.asarray(untiled(Mxfp4Tiles(params[f"{name}.words"], scales)))


@pytest.mark.parametrize("experts", ["xla", "mosaic", "mosaic_overlap"])
def test_dummy_experts_in_mxfp4_are_as_large_as_those_in_16_bits(experts: Implementation, tmp_path: Path) -> None:
    """They are made in the form that the kernel reads, all 16 codes among them, and the logits are usual ones."""
    config, _ = plain_tensors("gpt_oss_base", intermediate_size=64)
    write(tmp_path, config, {})
    model, params = dummy_checkpoint(tmp_path, FLOAT32, 0, quantization="mxfp4", experts=experts)
    assert not any(name.endswith((".gate_up", ".down")) for name in params)
    found = 0
    for name in (key.rpartition(".")[0] for key in params if key.endswith((".blocks", ".words", ".joined"))):
        numbers = numbers_of(params, name)
        assert len(np.unique(numbers)) > 16
        assert 0.7 < numbers.std() * numbers.shape[-1] ** 0.5 < 1.5
        found += 1
    assert found == 2 * len(model.layers)
    if experts == "xla":
        logits = dense_logits(model, params, np.arange(5, dtype=np.int32))
        assert 0.01 < logits.std() < 100


@pytest.mark.parametrize("form", ["plain", "converted", "dummy"])
def test_mxfp4_is_refused_for_experts_that_are_not_stored_so(form: str, tmp_path: Path) -> None:
    """jswa does not round to 4 bits, and a model without experts has nothing to hold in them."""
    config, tensors = plain_tensors("gpt_oss_base")
    write(tmp_path / "source", config, tensors)
    if form == "plain":
        with pytest.raises(ConfigError, match="not stored in MXFP4"):
            load(tmp_path / "source", "mxfp4")
    elif form == "converted":
        convert(tmp_path / "source", tmp_path / "converted", "float32")
        with pytest.raises(ConfigError, match="not stored in MXFP4"):
            load(tmp_path / "converted", "mxfp4")
    else:
        with pytest.raises(ConfigError, match="the model has none"):
            dummy_checkpoint(TINY, FLOAT32, 0, quantization="mxfp4")


def test_mxfp4_holds_a_checkpoint_in_mxfp4_as_auto_does(tmp_path: Path) -> None:
    """Bit for bit."""
    write_gpt_oss_mxfp4(tmp_path)
    assert_equal(load(tmp_path, "mxfp4"), load(tmp_path, "auto"))

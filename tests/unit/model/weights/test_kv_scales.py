"""KV scales of a checkpoint: read by layer under every name and in every shape; invalid scales are refused."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.model.attention import scales_name, scales_of
from jswa.model.hf.quantization import parse_quantization
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.convert import convert
from jswa.storage.identity import weights_digest
from tests.support.checkpoints.quantized import COMPRESSED, plain_tensors, write

FLOAT32 = jnp.dtype("float32")
SELF = "model.layers.0.self_attn."
K, V = f"{SELF}k_scale", f"{SELF}v_scale"
Tensors = dict[str, np.ndarray]


def filled(value: float, *shape: int) -> np.ndarray:
    """Return an array with the same scale everywhere."""
    return np.full(shape, value, np.float32)


def load(folder: Path, extra: Tensors, name: str = "mistral_layer_types") -> tuple[ModelConfig, Params]:
    """Load a plain checkpoint with extra tensors; it has two KV heads."""
    config, tensors = plain_tensors(name)
    write(folder, config, {**tensors, **extra})
    return load_checkpoint(folder, FLOAT32)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
def test_scales_are_found_under_every_name(k: str, v: str, tmp_path: Path) -> None:
    """This holds for plain and quantized checkpoints; scales of one layer do not affect others."""
    extra = {SELF + k: filled(0.5), SELF + v: filled(0.25, 1)}
    found = load(tmp_path / "plain", extra)[1]
    assert {name for name in found if ".kv." in name} == {scales_name(0)}
    np.testing.assert_array_equal(found[scales_name(0)], [[0.5, 0.5], [0.25, 0.25]])
    assert found[scales_name(0)].dtype == jnp.float32
    config, tensors = plain_tensors("mistral_layer_types")
    idle = {f"{SELF}q_scale": filled(3), f"{SELF}o_proj.output_scale": filled(3)}
    write(tmp_path / "scaled", {**config, "quantization_config": COMPRESSED}, {**tensors, **extra, **idle})
    again = load_checkpoint(tmp_path / "scaled", jnp.dtype("bfloat16"))[1]
    np.testing.assert_array_equal(again[scales_name(0)], found[scales_name(0)])


def test_scales_may_be_per_head_bfloat16_or_shared_by_k_and_v(tmp_path: Path) -> None:
    """The parameter is float32 in each case."""
    heads = np.array([0.5, 2], ml_dtypes.bfloat16)
    other = f"{SELF.replace('.0.', '.3.')}kv_scale"
    extra = {K: heads.reshape(2, 1, 1), V: heads[::-1].reshape(2, 1), other: filled(0.125, 1)}
    model, found = load(tmp_path, extra)
    np.testing.assert_array_equal(found[scales_name(0)], [[0.5, 2], [2, 0.5]])
    np.testing.assert_array_equal(found[scales_name(3)], np.full((2, 2), 0.125))
    assert scales_of(found, model.layers[1].attention, 1) is None


def test_layers_that_share_kv_share_its_scales(tmp_path: Path) -> None:
    """If keys are also the values, K's scale is V's too."""
    extra = {f"model.layers.{i}.self_attn.k_scale": filled(1 + i) for i in range(6)}
    extra |= {f"model.layers.{i}.self_attn.v_scale": filled(0.5 + i) for i in range(6) if i not in (2, 5)}
    model, found = load(tmp_path, extra, "gemma4_text_mix")
    owners = [layer.attention.kv_from for layer in model.layers]
    assert owners == [None, None, None, 1, 1, 2]
    assert {name for name in found if ".kv." in name} == set(map(scales_name, (0, 1, 2)))
    np.testing.assert_array_equal(found[scales_name(2)], [[3], [3]])
    for index, layer in enumerate(model.layers):
        owner = index if layer.attention.kv_from is None else layer.attention.kv_from
        assert scales_of(found, layer.attention, index) is found[scales_name(owner)]


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({K: filled(1)}, f"{K}: the layer must also have a scale for V"),
        ({V: filled(1)}, f"{V}: the layer must also have a scale for K"),
        ({K: filled(1), V: filled(1), f"{SELF}kv_scale": filled(1)}, f"{K} and .*kv_scale are the same scale of KV"),
        ({K: filled(1, 3), V: filled(1)}, rf"{K} has shape \[3\]"),
        ({K: filled(1, 1, 2), V: filled(1)}, rf"{K} has shape \[1, 2\]"),
        ({K: filled(1), V: np.ones((), np.int32)}, f"{V} has type I32: must be one of F64, F32, F16, BF16"),
        ({K: filled(0), V: filled(1)}, rf"{K} has the scale 0.0: must be from 2\^-32 to 2\^16"),
        ({K: filled(1), V: filled(-1, 2)}, f"{V} has the scale -1.0"),
        ({K: filled(1), V: np.array([1, np.nan], np.float32)}, f"{V} has the scale nan"),
        ({K: filled(np.inf), V: filled(1)}, f"{K} has the scale inf"),
        ({K: filled(1), V: filled(1e9)}, f"{V} has the scale 1000000000.0"),
        ({f"{SELF}k_zero_point": filled(1)}, "does not use: .*k_zero_point"),
        ({K.replace(".0.", ".9."): filled(1)}, r"does not use: model\.layers\.9"),
    ],
)
def test_invalid_scales_are_refused(extra: Tensors, error: str, tmp_path: Path) -> None:
    """The error names file and key, even if the KV cache is not quantized."""
    with pytest.raises(CheckpointError, match=error):
        load(tmp_path, extra)


def test_a_converted_checkpoint_keeps_the_scales(tmp_path: Path) -> None:
    """They stay float32. A saved prefix cache does not fit an engine with other scales."""
    found = load(tmp_path / "source", {K: filled(0.3), V: filled(0.7, 2)})[1]
    convert(tmp_path / "source", tmp_path / "made", "bfloat16")
    again = load_checkpoint(tmp_path / "made", FLOAT32)[1]
    assert again.keys() == found.keys()
    np.testing.assert_array_equal(again[scales_name(0)], found[scales_name(0)])
    other = {**found, scales_name(0): found[scales_name(0)].at[1, 1].set(0.8)}
    without = {name: value for name, value in found.items() if name != scales_name(0)}
    assert len({weights_digest(params) for params in (found, other, without)}) == 3


@pytest.mark.parametrize(
    ("change", "fine"),
    [(lambda c: c.update(kv_cache_scheme={"num_bits": 8, "type": "float"}), True), (lambda c: None, False)],
)
def test_a_checkpoint_may_have_kv_scales_without_quantized_weights(
    change: Callable[[dict[str, object]], None], fine: bool
) -> None:
    """compressed-tensors then has no group of weights."""
    config: dict[str, object] = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    change(config)
    if fine:
        assert parse_quantization({"quantization_config": config}) is not None
    else:
        with pytest.raises(CheckpointError, match="config_groups"):
            parse_quantization({"quantization_config": config})

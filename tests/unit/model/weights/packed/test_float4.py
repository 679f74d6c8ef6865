"""Checkpoints in NVFP4: both layouts, their numbers bit for bit, mixtures of formats, and what is refused."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jswa.errors import CheckpointError, ModelError
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.source import TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import read_rows, resolve
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_files import TensorReader, stored_tensors
from tests.support.checkpoints.float4 import CONFIGS, LAYOUTS, Layout, float4, write_both
from tests.support.checkpoints.quantized import FLOAT8, write

FLOAT32 = np.dtype(np.float32)
SMALL: dict[str, Any] = {"intermediate_size": 128}
KEY = "x.weight"


def load(folder: Path, **more: Any) -> Params:
    return load_checkpoint(folder, more.pop("dtype", FLOAT32), **more)[1]


def rows(folder: Path, layout: Layout, tensors: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Write a tensor, and return all of its rows as they are read."""
    config = {**CONFIGS[layout], "quant_method": "modelopt"} if layout == "hf_quant_config" else CONFIGS[layout]
    write(folder, {}, tensors)
    found = stored_tensors(folder, lambda name: name)
    weight = resolve(TensorPart(KEY, shape), found, parse_quantization({"quantization_config": config}))
    with TensorReader(found) as reader:
        height = int(np.prod(shape[:-1]))
        parts = [read_rows(weight, reader, row, min(row + 3, height)) for row in range(0, height, 3)]
    return np.concatenate(parts).reshape(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 32), (3, 4, 48)])
def test_rows_are_the_numbers_of_the_definition(layout: Layout, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Bit for bit: each number is rounded once to float32."""
    tensors, exact = float4(layout, KEY, shape, 1)
    np.testing.assert_array_equal(rows(tmp_path, layout, tensors, shape), exact)


def test_each_matrix_of_a_stack_may_have_a_factor(tmp_path: Path) -> None:
    """In all shapes that a number per matrix can have."""
    tensors, exact = float4("modelopt", KEY, (3, 4, 32), 1)
    factor = tensors[f"{KEY}_scale_2"]
    for shape in ((3,), (3, 1), (3, 1, 1)):
        own = (factor * np.array([1, 2, 4], np.float32)).reshape(shape)
        found = rows(tmp_path, "modelopt", {**tensors, f"{KEY}_scale_2": own}, (3, 4, 32))
        np.testing.assert_array_equal(found, exact * np.array([1, 2, 4], np.float32)[:, None, None])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fixture", ["llama_one_layer", "mixtral_base", "phi3_base"])
def test_models_have_the_numbers_of_the_definition(layout: Layout, fixture: str, tmp_path: Path) -> None:
    """Stored in NVFP4, or as plain numbers: the parameters are equal bit for bit, also where q, k and v are fused."""
    packed, plain = write_both(tmp_path, layout, fixture, **SMALL)
    found, whole = load(packed, quantization="none"), load(plain)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value), err_msg=name)


def test_a_mixture_of_formats_is_read(tmp_path: Path) -> None:
    """Layers in NVFP4, in float8 with one scale, and plain ones."""
    packed, plain = write_both(
        tmp_path, "modelopt", "llama_one_layer", others={"k_proj": "fp8", "down_proj": "plain"}, **SMALL
    )
    found, whole = load(packed, quantization="none"), load(plain)
    for name, value in whole.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value), err_msg=name)


def changed(layout: Layout, end: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix [4, 32] of which one has another value; None: it is missing."""
    tensors, _ = float4(layout, KEY, (4, 32), 1)
    name = KEY + end
    kept = {key: tensor for key, tensor in tensors.items() if key != name}
    return kept if value is None else {**kept, name: value}


@pytest.mark.parametrize(
    ("layout", "end", "value", "expected"),
    [
        ("modelopt", "_scale_2", np.float32(0).reshape(()), r"x.weight_scale_2.* has the factor 0.0: must be a finite"),
        ("modelopt", "_scale_2", np.float32(-1).reshape(()), "has the factor -1.0: must be a finite number above 0"),
        ("modelopt", "_scale_2", np.array([np.nan], np.float32), "has the factor nan"),
        ("compressed-tensors", "_global_scale", np.array([np.inf], np.float32), "has the factor inf"),
        ("compressed-tensors", "_global_scale", np.array([1e-39], np.float32), "and so must its inverse"),
        ("modelopt", "_scale_2", np.ones(2, np.float32), r"has shape \[2\], x.weight asks for \[\] or \[1\]"),
        ("modelopt", "_scale_2", np.ones((), np.float16), "has type F16: must be one of F32"),
        ("modelopt", "_scale", np.ones((4, 1), FLOAT8), r"has shape \[4, 1\], x.weight asks for \[4, 2\]"),
        ("modelopt", "_scale", np.ones((4, 2), np.uint8), "has type U8: must be one of F8_E4M3"),
        ("modelopt", "_scale", None, "in NVFP4 must have x.weight_scale and x.weight_scale_2, and nothing else"),
        ("modelopt", "", np.zeros((4, 15), np.uint8), r"has shape \[4, 15\], the config asks for \[4, 16\]"),
        ("modelopt", "", np.zeros((4, 16), np.int8), "has type I8: must be one of U8"),
        ("compressed-tensors", "_zero_point", np.zeros((4, 2), np.int8), "and nothing else"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    layout: Layout, end: str, value: np.ndarray | None, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        rows(tmp_path, layout, changed(layout, end, value), (4, 32))


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_scale_of_nan_is_refused_with_its_row(bits: int, tmp_path: Path) -> None:
    scales = np.full((4, 2), 0x38, np.uint8)
    scales[2, 1] = bits
    tensors = changed("modelopt", "_scale", scales.view(ml_dtypes.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=r"x.weight_scale.* has the scale NaN in row 2: must be a number"):
        rows(tmp_path, "modelopt", tensors, (4, 32))


def test_inputs_of_no_whole_groups_are_refused(tmp_path: Path) -> None:
    tensors, _ = float4("modelopt", KEY, (4, 32), 1)
    with pytest.raises(CheckpointError, match="has NVFP4 rows of 40 numbers: must be a multiple of 16"):
        rows(tmp_path, "modelopt", tensors, (4, 40))


def test_a_tensor_without_which_numbers_would_be_wrong_is_refused(tmp_path: Path) -> None:
    """As the factors of AWQ's smoothing, which ModelOpt stores beside a matrix."""
    extra = {"model.layers.0.self_attn.q_proj.pre_quant_scale": np.ones(4, np.float32)}
    packed, _ = write_both(tmp_path, "modelopt", "llama_one_layer", extra=extra, **SMALL)
    with pytest.raises(CheckpointError, match=r"tensors that this model does not use: .*pre_quant_scale"):
        load(packed)


MODELOPT = CONFIGS["modelopt"]
GROUPS = CONFIGS["compressed-tensors"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {**MODELOPT, "quant_algo": "NVFP4_AWQ"},
            "quant_algo = 'NVFP4_AWQ': must be one of FP8, .*, or MIXED_PRECISION",
        ),
        ({**MODELOPT, "quant_algo": None}, r"quant_algo = '\(none\)': must be one of"),
        ({**MODELOPT, "group_size": 32}, "group_size = 32: must be 16 for NVFP4"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quantized_layers = .*: must be an object of 1 to"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
            "quantized_layers: 'a': quant_algo = 'W4A8_AWQ': must be one of",
        ),
        *(
            ({**GROUPS, "config_groups": {"a": {"weights": {**weights}}}}, "must be float, 4 bits, groups of 16")
            for weights in (
                {"type": "int", "num_bits": 4},
                {"type": "float", "num_bits": 8},
                {"type": "float", "num_bits": 4, "group_size": 32},
            )
        ),
    ],
)
def test_a_config_of_another_form_is_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        parse_quantization({"quantization_config": config})


def test_configs_name_the_layers_that_are_quantized() -> None:
    """By classes, wildcards and names; a mixture names each layer."""
    plain = parse_quantization(
        {"quantization_config": {**MODELOPT, "ignore": ["lm_head", "model.layers.0*", "*router*"]}}
    )
    assert plain is not None
    assert plain.schemes is not None
    held = {
        key: plain.schemes.of(key) for key in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight")
    }
    assert [None if scheme is None else scheme.held for scheme in held.values()] == ["nvfp4", None]
    assert plain.schemes.of("lm_head.weight") is None
    layers = {
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.language_model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    mixed = parse_quantization({"quantization_config": config})
    assert mixed is not None
    assert mixed.schemes is not None
    keys = "mlp.experts.3.up_proj", "self_attn.q_proj", "self_attn.k_proj"
    found = [mixed.schemes.of(f"model.layers.0.{key}.weight") for key in keys]
    assert [None if scheme is None else scheme.held for scheme in found] == ["nvfp4", "8 bits", None]

"""Weights packed in int32 (compressed-tensors, GPTQ, AWQ), against loops by the definitions of the formats."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.source import TensorPart
from jswa.model.weights.dequantize import read_rows, resolve, row_reader
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_files import TensorReader, stored_tensors
from tests.support.checkpoints.packed_integers import CASES, Case, quantized, write_both
from tests.support.checkpoints.quantized import plain_tensors, write

FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    """Exactly, since a difference of 8 bits times a scale of 11 fits in float32; in any cut of rows."""
    case, key = CASES[name], "model.layers.0.mlp.up_proj.weight"
    tensors, exact = quantized(case, key, (24, 128), seed=1)
    write(tmp_path, {}, tensors)
    found = stored_tensors(tmp_path)
    weight = resolve(TensorPart(key, exact.shape), found, parse_quantization({"quantization_config": case.config}))
    with TensorReader(found) as reader:
        read = row_reader({key: weight}, reader)
        whole = read_rows(weight, reader, 0, 24)
        cuts = np.concatenate([read(TensorPart(key, exact.shape), begin, begin + 5) for begin in range(0, 24, 5)])
    if case.dtype == np.float32:  # a product of float32 is rounded once
        np.testing.assert_array_equal(whole, exact.astype(np.float32))
    else:
        np.testing.assert_array_equal(whole.astype(np.float64), exact)
    np.testing.assert_array_equal(cuts, whole)


@pytest.mark.parametrize("name", ["compressed", "gptq act-order", "awq"])
def test_parameters_are_those_of_the_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    """Bit for bit, if they are held in the engine's dtype or in 8 bits; AutoGPTQ's biases of zeros are left out."""
    packed, plain = write_both(tmp_path, CASES[name], "llama_one_layer", intermediate_size=128)
    modes: tuple[QuantizationMode, ...] = ("none", "int8")
    for mode in modes:
        one, other = (load_checkpoint(folder, FLOAT32, quantization=mode)[1] for folder in (plain, packed))
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


STORED = np.load(Path(__file__).parents[4] / "parity" / "quantized.npz")


def stored(key: str) -> np.ndarray:
    """Return an array of the fixture in its type."""
    kind = str(STORED[f"{key}/type"])
    array: np.ndarray = STORED[key].view(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    return array


@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in STORED if key.startswith("packed")}))
def test_numbers_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    """Bit for bit, in the type of the scales; `tests/parity/make_quantized.py` has written them."""
    numbers = stored(f"{name}/numbers")
    fields = [field for field in ("packed", "scale", "zero_point") if f"{name}/{field}" in STORED]
    write(tmp_path, {}, {f"x.weight_{field}": stored(f"{name}/{field}") for field in fields})
    found = stored_tensors(tmp_path)
    group = numbers.shape[1] // stored(f"{name}/scale").shape[1] % numbers.shape[1]
    config = Case("compressed", int(name[6]), group).config
    weight = resolve(TensorPart("x.weight", numbers.shape), found, parse_quantization({"quantization_config": config}))
    with TensorReader(found) as reader:
        rows = read_rows(weight, reader, 0, len(numbers)).astype(numbers.dtype)
    np.testing.assert_array_equal(rows.view(np.uint8), numbers.view(np.uint8))


def test_a_bias_that_the_model_has_not_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    """As any other tensor that the model does not use."""
    case = CASES["gptq"]
    config, tensors = plain_tensors("mistral_layer_types", hidden_size=64, intermediate_size=128)
    key = "model.layers.0.mlp.up_proj.weight"
    parts, _ = quantized(case, key, tensors[key].shape, 0)
    stored = {name: value for name, value in tensors.items() if name != key} | parts
    stored["model.layers.0.mlp.up_proj.bias"] = np.ones(128, np.float16)
    write(tmp_path, {**config, "quantization_config": case.config}, stored)
    with pytest.raises(CheckpointError, match=r"up_proj\.bias"):
        load_checkpoint(tmp_path, FLOAT32)


@pytest.mark.parametrize(
    ("name", "file", "change", "said"),
    [
        ("gptq", "g_idx", lambda x: x + 100, "names group"),
        ("gptq", "g_idx", lambda x: x[:-1], "has shape"),
        ("gptq", "qweight", lambda x: x[:-1], "has shape"),
        ("gptq", "qzeros", lambda x: x[:, :-1], "has shape"),
        ("awq", "scales", lambda x: x[:-1], "cannot be divided|has shape"),
        ("compressed", "weight_scale", lambda x: x[0], "groups of inputs"),
        ("compressed", "weight_packed", lambda x: x[:, :-1], "has shape"),
        ("compressed", "weight_zero_point", lambda x: x.astype(np.int8), "has type I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, file: str, change: Any, said: str, tmp_path: Path) -> None:
    """With their file and key."""
    case, key = CASES[name], "model.layers.0.mlp.up_proj.weight"
    tensors, exact = quantized(case, key, (24, 128), seed=1)
    wrong = next(name for name in tensors if name.endswith(file))
    write(tmp_path, {}, tensors | {wrong: np.ascontiguousarray(change(tensors[wrong]))})
    found = stored_tensors(tmp_path)
    stored = parse_quantization({"quantization_config": case.config})

    def read(reader: TensorReader) -> None:
        read_rows(resolve(TensorPart(key, exact.shape), found, stored), reader, 0, 24)

    with TensorReader(found) as reader, pytest.raises(CheckpointError, match=said) as caught:
        read(reader)
    assert wrong.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8"),
        ({**Case("compressed", bits=2).config}, "num_bits = 2"),
    ],
)
def test_other_forms_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    """With the forms that can be read."""
    with pytest.raises(UnsupportedModel, match=said):
        parse_quantization({"quantization_config": config})

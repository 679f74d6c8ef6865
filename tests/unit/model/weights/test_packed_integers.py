"""Weights packed in int32 (compressed-tensors, GPTQ, AWQ), against loops by the definitions of the formats."""

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.llm import LLM
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.tensor_map import Part
from jswa.model.weights.dequantize import read_rows, resolve, row_reader
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_files import Reader, stored_tensors
from tests.support.checkpoints.quantized import plain_tensors, write

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # column of each 4 bits of a word, the lowest first (AutoAWQ's gemm kernel)
FLOAT32 = np.dtype(np.float32)


class Case(NamedTuple):
    """How a matrix is quantized. `group`: inputs that share a scale; 0: all."""

    form: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    dtype: Any = np.float16

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config."""
        if self.form == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group or -1,
                "zero_point": True,
                "version": "gemm",
            }
        if self.form != "compressed":
            size = {
                "bits": self.bits,
                "group_size": self.group or -1,
                "desc_act": self.act_order,
                "sym": self.symmetric,
            }
            return {"quant_method": "gptq", "checkpoint_format": self.form, **size}
        weights = {"type": "int", "num_bits": self.bits, "symmetric": self.symmetric, "strategy": "channel"}
        if self.group:
            weights |= {"strategy": "group", "group_size": self.group}
        if self.act_order:
            weights["actorder"] = "group"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


CASES = {
    "compressed": Case("compressed"),
    "compressed symmetric bf16": Case("compressed", symmetric=True, dtype=ml_dtypes.bfloat16),
    "compressed channel": Case("compressed", group=0, symmetric=True, dtype=np.float32),
    "compressed channel asymmetric": Case("compressed", group=0),
    "compressed act-order": Case("compressed", act_order=True),
    "compressed 8 bits": Case("compressed", bits=8, group=64),
    "gptq": Case("gptq"),
    "gptq symmetric": Case("gptq", symmetric=True),
    "gptq act-order": Case("gptq", act_order=True),
    "gptq 8 bits, one group": Case("gptq", bits=8, group=0),
    "gptq_v2": Case("gptq_v2"),
    "awq": Case("awq"),
    "awq one group": Case("awq", group=0),
}


def packed(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Return rows of numbers in rows of int32; number `order[i]` of a word is in its i-th bits."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            word, place = divmod(column, per_word)
            words[row, word] |= np.uint32(int(numbers[row, column]) << (bits * order.index(place)))
    return words.view(np.int32)


def quantized(case: Case, key: str, shape: tuple[int, int], seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a random matrix [out, in], and its numbers in float64."""
    rng, (outputs, inputs) = np.random.default_rng(seed), shape
    group = case.group or inputs
    groups, most, middle = inputs // group, 2**case.bits - 1, 2 ** (case.bits - 1)
    codes = rng.integers(0, most + 1, shape)
    least = 1 if case.form == "gptq" else 0  # its first format stores zero points less 1
    zeros = np.full((outputs, groups), middle) if case.symmetric else rng.integers(least, most + 1, (outputs, groups))
    scales = rng.uniform(0.01, 0.1, (outputs, groups)).astype(case.dtype)
    group_of = rng.permutation(np.arange(inputs) // group) if case.act_order else np.arange(inputs) // group
    exact = (codes - zeros[:, group_of]).astype(np.float64) * scales[:, group_of].astype(np.float64)
    stem = key.removesuffix("weight")
    if case.form == "compressed":
        tensors = {f"{key}_packed": packed(codes, case.bits), f"{key}_scale": scales}
        if not case.symmetric:
            tensors[f"{key}_zero_point"] = np.ascontiguousarray(packed(zeros.T, case.bits).T)
        if case.act_order:
            tensors[f"{key}_g_idx"] = group_of.astype(np.int32)
        return tensors | {f"{key}_shape": np.array(shape, np.int32)}, exact
    scales_in = {f"{stem}scales": np.ascontiguousarray(scales.T)}
    if case.form == "awq":
        words = {"qweight": packed(codes.T, 4, AWQ_ORDER), "qzeros": packed(zeros.T, 4, AWQ_ORDER)}
        return scales_in | {f"{stem}{name}": value for name, value in words.items()}, exact
    words = {
        "qweight": np.ascontiguousarray(packed(codes, case.bits).T),
        "qzeros": packed(zeros.T - least, case.bits),
        "g_idx": group_of.astype(np.int32),
    }
    return scales_in | {f"{stem}{name}": value for name, value in words.items()}, exact


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    """Exactly, since a difference of 8 bits times a scale of 11 fits in float32; in any cut of rows."""
    case, key = CASES[name], "model.layers.0.mlp.up_proj.weight"
    tensors, exact = quantized(case, key, (24, 128), seed=1)
    write(tmp_path, {}, tensors)
    found = stored_tensors(tmp_path)
    weight = resolve(Part(key, exact.shape), found, parse_quantization({"quantization_config": case.config}))
    with Reader(found) as reader:
        read = row_reader({key: weight}, reader)
        whole = read_rows(weight, reader, 0, 24)
        cuts = np.concatenate([read(Part(key, exact.shape), begin, begin + 5) for begin in range(0, 24, 5)])
    if case.dtype == np.float32:  # a product of float32 is rounded once
        np.testing.assert_array_equal(whole, exact.astype(np.float32))
    else:
        np.testing.assert_array_equal(whole.astype(np.float64), exact)
    np.testing.assert_array_equal(cuts, whole)


@pytest.mark.parametrize("name", ["compressed", "gptq act-order", "awq"])
def test_a_model_gives_the_tokens_of_its_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    """Parameters are equal bit for bit, also in 8 bits; AutoGPTQ's biases of zeros are left out."""
    case = CASES[name]
    config, tensors = plain_tensors("mistral_layer_types", hidden_size=64, intermediate_size=128)
    plain, stored = dict(tensors), dict(tensors)
    linear = [key for key in tensors if "proj" in key and tensors[key].ndim == 2]
    for seed, key in enumerate(linear):
        parts, exact = quantized(case, key, tensors[key].shape, seed)
        plain[key] = exact.astype(np.float32)
        del stored[key]
        stored |= parts
        if case.form == "gptq":
            stored[key.removesuffix("weight") + "bias"] = np.zeros(tensors[key].shape[0], np.float16)
    write(tmp_path / "plain", config, plain)
    write(tmp_path / "packed", {**config, "quantization_config": case.config}, stored)
    for mode in ("auto", "int8"):
        one, other = (
            load_checkpoint(tmp_path / folder, FLOAT32, quantization=mode)[1] for folder in ("plain", "packed")
        )
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32}
    with LLM(tmp_path / "packed", **options) as llm:
        (out,) = llm.generate([[1, 2, 3]], temperature=0, max_tokens=4, ignore_eos=True, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4


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

    def read(reader: Reader) -> None:
        read_rows(resolve(Part(key, exact.shape), found, stored), reader, 0, 24)

    with Reader(found) as reader, pytest.raises(CheckpointError, match=said) as caught:
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

"""Checkpoints whose quantization_config says one thing and whose integers say another: right, or refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jswa.errors import CheckpointError
from jswa.model.hf.quantization import parse_quantization
from jswa.model.weights.load import load_checkpoint
from tests.support.checkpoints.packed_integers import AWQ_ORDER, Case, packed
from tests.support.checkpoints.quantized import plain_tensors, write

FLOAT32 = np.dtype(np.float32)
KEY = "model.layers.0.mlp.up_proj"
ONES = np.uint32(0x11111111)


class Matrix(NamedTuple):
    """Weights as a quantizer finds them: normal, in groups of 32 inputs, with codes in the zero point's direction."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """[out, in]."""
        group = np.arange(self.codes.shape[1]) // 32
        weights: np.ndarray = (self.codes - self.zeros[:, group]) * self.scales.astype(np.float64)[:, group]
        return weights


def quantize(
    shape: tuple[int, int], *, symmetric: bool, bits: int = 4, mean: float = 0.0, positive: slice = slice(0)
) -> Matrix:
    """Return random normal weights [out, in], quantized by the least and the most of each group.

    Args:
        mean: of the weights, in standard deviations.
        positive: outputs that have no negative weights, so that their zero points are 0.
    """
    outputs, inputs = shape
    wide = np.random.default_rng(0).normal(mean, 1, (outputs, inputs // 32, 32))
    wide[positive] = np.abs(wide[positive])
    most = 2**bits - 1
    if symmetric:
        scales = np.abs(wide).max(-1) / (most // 2)
        zeros = np.full(scales.shape, most // 2 + 1)
    else:
        low, high = np.minimum(wide.min(-1), 0), np.maximum(wide.max(-1), 0)
        scales = (high - low) / most
        zeros = np.clip(np.round(-low / scales), 0, most).astype(int)
    scales = scales.astype(np.float16)
    codes = np.clip(np.round(wide / scales[..., None]) + zeros[..., None], 0, most).astype(int)
    return Matrix(codes.reshape(shape), zeros, scales)


def gptq(one: Matrix, *, less: int, bits: int = 4) -> dict[str, np.ndarray]:
    """Return the tensors of GPTQ, with so much less in the zero points."""
    zeros = packed(one.zeros.T, bits).view(np.uint32) - np.uint32(less * (2**32 - 1) // (2**bits - 1))
    words = {"qweight": np.ascontiguousarray(packed(one.codes, bits).T), "qzeros": zeros.view(np.int32)}
    return {f"{KEY}.{name}": value for name, value in {**words, "scales": one.scales.T.copy()}.items()}


def awq(one: Matrix) -> dict[str, np.ndarray]:
    """Return the tensors of AWQ."""
    words = {"qweight": packed(one.codes.T, 4, AWQ_ORDER), "qzeros": packed(one.zeros.T, 4, AWQ_ORDER)}
    return {f"{KEY}.{name}": value for name, value in {**words, "scales": one.scales.T.copy()}.items()}


def compressed(one: Matrix, zeros: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the tensors of compressed-tensors."""
    tensors = {"weight_packed": packed(one.codes, 4), "weight_scale": one.scales}
    if zeros is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(packed(zeros.T, 4).T)
    return {f"{KEY}.{name}": value for name, value in tensors.items()}


@pytest.fixture
def load(tmp_path: Path) -> Callable[[dict[str, np.ndarray], dict[str, Any]], np.ndarray]:
    """Return a function that loads one packed matrix [128, 64] in a small model and returns it [out, in]."""

    def load(tensors: dict[str, np.ndarray], label: dict[str, Any]) -> np.ndarray:
        config, others = plain_tensors("llama_one_layer", hidden_size=64, intermediate_size=128)
        stored = {name: value for name, value in others.items() if name != f"{KEY}.weight"}
        write(tmp_path, {**config, "quantization_config": label}, stored | tensors)
        gate_up = np.asarray(load_checkpoint(tmp_path, FLOAT32)[1]["layers.0.mlp.gate_up"])
        return gate_up[:, 128:].T.astype(np.float64)

    return load


def label_of(form: str, **more: Any) -> dict[str, Any]:
    """Return a quantization_config of GPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": form, "desc_act": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
SYMMETRIC, ASYMMETRIC = (quantize((128, 64), symmetric=symmetric) for symmetric in (True, False))


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sym", [{"sym": True}, {"sym": False}, {}])
def test_symmetric_gptq_is_right_under_either_label(
    label: str, stored: str, bits: int, sym: dict[str, bool], load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen's GPTQ checkpoints need that say `gptq` and store `gptq_v2`; the log says it."""
    one = quantize((128, 64), symmetric=True, bits=bits)
    with caplog.at_level(logging.WARNING, "jswa"):
        found = load(gptq(one, less=int(stored == "gptq"), bits=bits), label_of(label, bits=bits, **sym))
    np.testing.assert_allclose(found, one.weights, rtol=1e-6)
    assert ("not of" in caplog.text) == (label != stored)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_asymmetric_gptq_is_right_with_zero_points_of_0(form: str, load: Any) -> None:
    """The first format takes 1 off whole words, so a zero point of 0 borrows from its neighbour."""
    one = quantize((128, 64), symmetric=False, positive=slice(3, 128, 43))
    assert np.count_nonzero(one.zeros == 0) == 6
    found = load(gptq(one, less=int(form == "gptq")), label_of(form, sym=False))
    np.testing.assert_allclose(found, one.weights, rtol=1e-6)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [{"sym": False}, {}])
def test_asymmetric_gptq_of_the_other_format_is_refused(form: str, sym: dict[str, bool], load: Any) -> None:
    """Each weight would be off by one scale; the error says what to correct."""
    with pytest.raises(CheckpointError, match=r"scales on average.*checkpoint_format") as caught:
        load(gptq(ASYMMETRIC, less=int(form != "gptq")), label_of(form, **sym))
    assert f"{KEY}.qweight" in str(caught.value)


@pytest.mark.parametrize("mean", [0.0, 0.1, -0.1])
def test_weights_off_center_are_not_taken_for_the_other_format(mean: float, load: Any) -> None:
    """Trained matrices have means of a few hundredths of their spread."""
    one = quantize((128, 64), symmetric=False, mean=mean)
    np.testing.assert_allclose(load(gptq(one, less=1), label_of("gptq", sym=False)), one.weights, rtol=1e-6)


def test_a_symmetric_label_of_other_zero_points_is_refused(load: Any) -> None:
    """The peers that trust the label compute with 8."""
    with pytest.raises(CheckpointError, match="symmetric, and not all zero points are 8"):
        load(gptq(ASYMMETRIC, less=1), label_of("gptq", sym=True))
    with pytest.raises(CheckpointError, match="symmetric, and not all zero points are 8"):
        load(awq(ASYMMETRIC), {**AWQ, "zero_point": False})
    with pytest.raises(CheckpointError, match="symmetric, and not all zero points are 8"):
        load(compressed(ASYMMETRIC, ASYMMETRIC.zeros), Case("compressed", symmetric=True).config)


def test_missing_zero_points_are_refused_if_the_label_is_asymmetric(load: Any) -> None:
    """They are not 8 in silence."""
    without = {name: value for name, value in awq(ASYMMETRIC).items() if not name.endswith("qzeros")}
    for tensors, label in (
        (without, {**AWQ, "zero_point": True}),
        (compressed(ASYMMETRIC, None), Case("compressed", symmetric=False).config),
    ):
        with pytest.raises(CheckpointError, match="asymmetric, and there are no zero points"):
            load(tensors, label)


def test_awq_and_compressed_tensors_with_zero_points_that_do_not_fit_are_refused(load: Any) -> None:
    """Stored less 1, or all 0."""
    for zeros in (np.maximum(ASYMMETRIC.zeros - 1, 0), np.zeros_like(ASYMMETRIC.zeros)):
        wrong = ASYMMETRIC._replace(zeros=zeros)
        for tensors, label in ((awq(wrong), AWQ), (compressed(wrong, zeros), Case("compressed").config)):
            with pytest.raises(CheckpointError, match="scales on average: their zero points do not fit"):
                load(tensors, label)


def test_awq_and_compressed_tensors_are_right_if_label_and_numbers_agree(load: Any) -> None:
    """The same weights in each form."""
    for one, label in ((SYMMETRIC, {**AWQ, "zero_point": False}), (ASYMMETRIC, {**AWQ, "zero_point": True})):
        np.testing.assert_allclose(load(awq(one), label), one.weights, rtol=1e-6)
    for one, zeros in ((SYMMETRIC, None), (SYMMETRIC, SYMMETRIC.zeros), (ASYMMETRIC, ASYMMETRIC.zeros)):
        label = Case("compressed", symmetric=one is SYMMETRIC).config
        np.testing.assert_allclose(load(compressed(one, zeros), label), one.weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (label_of("gptq", bits=8), "qweight has shape"),
        (label_of("gptq", group_size=48), "2 groups: 64 inputs in groups of 48"),
        (label_of("gptq", group_size=-1), "2 groups: 64 inputs in groups of 64"),
        (label_of("gptq", desc_act=True), "no g_idx"),
    ],
)
def test_bits_groups_and_orders_must_be_those_of_the_label(label: dict[str, Any], said: str, load: Any) -> None:
    """The error names the tensor."""
    if label["group_size"] == 48:  # two groups of 48 and 16 inputs would fit: three scales do not
        label = {**label, "group_size": 24}
        said = "2 groups: 64 inputs in groups of 24"
    with pytest.raises(CheckpointError, match=said):
        load(gptq(SYMMETRIC, less=1), label)


def test_rules_of_single_layers_have_their_own_labels(load: Any) -> None:
    """GPTQModel's `dynamic`; a pattern that is not run leaves the tensors to speak."""
    one = quantize((128, 64), symmetric=True, bits=8)
    for rule in (r"+:.*\.up_proj", r".*\.0\..*up_proj.*", r".*(up|gate)_proj"):
        label = label_of("gptq", sym=True, dynamic={rule: {"bits": 8}, r"-:.*\.o_proj": {}})
        np.testing.assert_allclose(load(gptq(one, less=1, bits=8), label), one.weights, rtol=1e-6)
    found = parse_quantization({"quantization_config": label_of("gptq", dynamic={r"+:.*\.up_proj": {"bits": 8}})})
    assert found is not None
    assert found.schemes is not None
    held = {name: found.schemes.of(f"model.layers.0.mlp.{name}.weight") for name in ("up_proj", "down_proj")}
    assert {name: None if scheme is None else scheme.held for name, scheme in held.items()} == {
        "up_proj": None,
        "down_proj": "int4",
    }


def test_int8_with_a_symmetric_label_has_zero_points_of_0(load: Any) -> None:
    """Or is refused; and without zero points its label is not asymmetric."""
    values = np.random.default_rng(0).integers(-128, 128, (128, 64)).astype(np.int8)
    scale = np.full((128, 1), 0.01, np.float32)

    def tensors(zero: int | None) -> dict[str, np.ndarray]:
        more = {} if zero is None else {f"{KEY}.weight_zero_point": np.full((128, 1), zero, np.int8)}
        return {f"{KEY}.weight": values, f"{KEY}.weight_scale": scale} | more

    def label(*, symmetric: bool) -> dict[str, Any]:
        weights = {"type": "int", "num_bits": 8, "symmetric": symmetric, "strategy": "channel"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}

    for zero, symmetric in ((None, True), (0, True), (3, False)):
        found = load(tensors(zero), label(symmetric=symmetric))
        np.testing.assert_allclose(found, (values - float(zero or 0)) * 0.01, rtol=1e-6)
    with pytest.raises(CheckpointError, match="symmetric, and not all zero points are 0"):
        load(tensors(3), label(symmetric=True))
    with pytest.raises(CheckpointError, match="asymmetric, and there are no zero points"):
        load(tensors(None), label(symmetric=False))

"""Blocks that are held as they are: their codes and scales stand for the numbers that the gguf package gives."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.gguf.file.types import PARTS, numbers
from jswa.gguf.view import view_of
from jswa.model.weights.dequantize import unpack_mxfp4
from jswa.model.weights.load import load_checkpoint
from tests.parity.load import load_fixture
from tests.support.gguf.convert import convert


def test_mxfp4_has_the_numbers_of_the_package() -> None:
    data = np.random.default_rng(0).integers(0, 256, (6, 3 * 17), np.uint8)
    data[:, ::17] = np.arange(100, 118).reshape(6, 3)  # exponents
    codes, scales = (PARTS[part]("U8", "MXFP4", data) for part in ("codes", "scales"))
    np.testing.assert_array_equal(unpack_mxfp4(codes, scales), numbers("MXFP4", data))


def test_q4_0_has_the_numbers_of_the_package() -> None:
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    data = gguf.quantize(x, gguf.GGMLQuantizationType.Q4_0).view(np.uint8)
    words, scales = (PARTS[part]("", "Q4_0", data) for part in ("words", "word_scales"))
    codes = np.stack([(words.view(np.uint32) >> (4 * place)) & 15 for place in range(8)], axis=-1).reshape(5, 96)
    found = (codes.astype(np.float32) - 8) * np.repeat(scales.astype(np.float32), 32, axis=1)
    np.testing.assert_array_equal(found, numbers("Q4_0", data))


def test_q8_0_has_the_numbers_of_the_package() -> None:
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    data = gguf.quantize(x, gguf.GGMLQuantizationType.Q8_0).view(np.uint8)
    values, scales = (PARTS[part]("", "Q8_0", data) for part in ("values", "value_scales"))
    assert (str(values.dtype), str(scales.dtype)) == ("int8", "float16")
    found = values.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=1)
    np.testing.assert_array_equal(found, numbers("Q8_0", data))


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSWA_COMPILATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("jswa.gguf.view._tokenizer", lambda metadata: {})
    fixture, wide = load_fixture("gpt_oss_base"), np.random.default_rng(0)
    tensors = dict(fixture.tensors)
    for name, x in fixture.tensors.items():
        if ".experts." in name:
            shape = tuple({48: 64, 96: 128}.get(size) or size for size in x.shape)
            tensors[name] = wide.standard_normal(shape).astype(np.float32)
    path = tmp_path / "it.gguf"
    convert(path, {**fixture.config, "intermediate_size": 64}, tensors, "MXFP4")
    view = view_of(path)
    _, held = load_checkpoint(view, jnp.dtype("float32"), quantization="auto")
    assert any(str(x.dtype) == "uint8" for key, x in held.items() if key.startswith("layers.0.mlp.gate_up"))
    _, params = load_checkpoint(view, jnp.dtype("float32"))
    stored = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}
    parts = [stored[f"blk.0.ffn_{name}_exps.weight"] for name in ("gate", "up")]
    wanted = np.concatenate([np.swapaxes(part, 1, 2) for part in parts], axis=2)
    np.testing.assert_array_equal(np.asarray(params["layers.0.mlp.gate_up"]), wanted)

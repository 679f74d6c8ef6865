"""The folder that a GGUF file stands for, and what is refused: files that are not whole, or not of one checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import CheckpointError, ConfigError, UnsupportedModel
from jswa.exec.sizing import weight_bytes
from jswa.gguf.architectures import ARCHITECTURES
from jswa.gguf.file.shards import read_shards
from jswa.gguf.pointer import pointed
from jswa.gguf.tensors import tensors_of
from jswa.gguf.view import view_of
from jswa.model.hf.quantization import parse_quantization
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.safetensors_files import weights_fingerprint
from jswa.storage.convert import convert as convert_folder
from jswa.storage.hub import find_model
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.gguf.convert import rounded
from tests.support.gguf.fixtures import write_fixture


@pytest.fixture(autouse=True)
def own_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views in a folder of the test; the fixtures have no tokenizer."""
    monkeypatch.setenv("JSWA_COMPILATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("jswa.gguf.view._tokenizer", lambda metadata: {})


def written(path: Path, name: str = "llama_one_layer", kind: str = "F32", **changes: Any) -> Path:
    """A fixture as GGUF."""
    write_fixture(path, name, kind, **changes)
    return path


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Parameters have the same bits."""
    assert one.keys() == other.keys()
    for key, x in one.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(other[key]), err_msg=key)


@pytest.mark.parametrize(
    "name", ["llama_gqa", "gemma3_text_p6", "qwen3_moe_base", "gpt_oss_base", "gemma4_text_moe", "exaone_moe_base"]
)
def test_parameters_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    """The engine's own, bit for bit; of a converted folder too."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path / "hf", fixture.config, rounded(fixture.tensors))
    view = find_model(str(written(tmp_path / "it.gguf", name)))
    _, params = load_checkpoint(tmp_path / "hf", jnp.dtype("float32"))
    same(load_checkpoint(view, jnp.dtype("float32"))[1], params)
    convert_folder(view, tmp_path / "out")
    assert not (tmp_path / "out" / "gguf.json").exists()
    same(load_checkpoint(tmp_path / "out", jnp.dtype("float32"))[1], params)


def test_a_view_is_made_anew_when_the_file_changes(tmp_path: Path) -> None:
    path = written(tmp_path / "it.gguf")
    view = view_of(path)
    before = (view / "config.json").stat().st_mtime_ns
    assert view_of(path) == view
    assert (view / "config.json").stat().st_mtime_ns == before
    first = weights_fingerprint(view)
    written(path, rms_norm_eps=0.125)
    with pytest.raises(CheckpointError, match="has changed since"):
        pointed(view)
    assert view_of(path) == view
    assert json.loads((view / "config.json").read_text())["rms_norm_eps"] == 0.125
    assert weights_fingerprint(view) != first


def test_a_view_of_another_version_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "it.gguf")
    view = view_of(path)
    (view / "config.json").write_text("{}")
    assert view_of(path) == view
    assert (view / "config.json").read_text() == "{}"
    monkeypatch.setattr("jswa.gguf.pointer.maker", lambda: "another")
    monkeypatch.setattr("jswa.gguf.view.maker", lambda: "another")
    view_of(path)
    assert json.loads((view / "config.json").read_text())["model_type"] == "llama"


def test_a_link_leads_to_its_file(tmp_path: Path) -> None:
    """The user has named it, so it may lead anywhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "it.gguf").symlink_to(written(tmp_path / "elsewhere" / "real.gguf"))
    assert pointed(view_of(tmp_path / "here" / "it.gguf")) == tmp_path / "elsewhere" / "real.gguf"


def test_a_folder_elsewhere_points_nowhere(tmp_path: Path) -> None:
    """A checkpoint that has a pointer of its own would make any file part of itself."""
    view = view_of(written(tmp_path / "it.gguf"))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "gguf.json").write_text((view / "gguf.json").read_text())
    assert pointed(tmp_path / "theirs") is None


def test_other_forms_are_not_written(tmp_path: Path) -> None:
    view = view_of(written(tmp_path / "it.gguf"))
    with pytest.raises(ConfigError, match="quantization = 'int8': a GGUF file becomes a checkpoint in safetensors"):
        convert_folder(view, tmp_path / "out", quantization="int8")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_numbers_are_those_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    """Of each type that it can write."""
    path = written(tmp_path / "it.gguf", "llama_gqa", kind)
    _, params = load_checkpoint(view_of(path), jnp.dtype("float32"), quantization="none")
    (tensor,) = (one for one in gguf.GGUFReader(path).tensors if one.name == "blk.0.ffn_down.weight")
    wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(np.asarray(params["layers.0.mlp.down"]).T, wanted.astype(np.float32))


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_moe_base"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_integers_are_held_in_their_bits(kind: str, name: str, tmp_path: Path) -> None:
    """The same numbers as widened ones; a converted folder has them widened."""
    view = view_of(written(tmp_path / "it.gguf", name, kind))
    raw = json.loads((view / "config.json").read_text())
    model, held = load_checkpoint(view, jnp.dtype("float32"), quantization="auto")
    told = weight_bytes(model, parse_quantization(raw), "auto", "float32")
    if name == "llama_gqa":  # experts with 32 inputs have one scale each, which a config does not tell
        assert told == sum(x.nbytes for x in held.values())
    qkv = {key.partition(".qkv.")[2]: str(x.dtype) for key, x in held.items() if ".0.attention.qkv." in key}
    wanted = {"Q4_0": {"codes": "uint8", "group_zeros": "uint8"}, "Q8_0": {"values": "int8"}}[kind]
    assert qkv == {**wanted, "group_scales": "float16"}
    ends = {key: str(x.dtype) for key, x in held.items() if key.partition(".")[0] in ("embed", "lm_head")}
    own = {"values": "int8", "group_scales": "float16"} if kind == "Q8_0" else {"": "float32"}
    assert ends == {f"{name}.{end}".rstrip("."): dtype for name in ("embed", "lm_head") for end, dtype in own.items()}
    _, wide = load_checkpoint(view, jnp.dtype("float32"), quantization="none")
    convert_folder(view, tmp_path / "out", "float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    same(load_checkpoint(tmp_path / "out", jnp.dtype("float32"), quantization="auto")[1], wide)


def test_other_architectures_and_keys_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModel, match=r"general\.architecture = 'mamba': must be one of afmoe, apertus, arcee, "
    ):
        view_of(tmp_path / "it.gguf")
    written(tmp_path / "it.gguf")
    data = (tmp_path / "it.gguf").read_bytes().replace(b"llama.vocab_size", b"llama.some_thing")
    (tmp_path / "it.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"metadata that jswa does not know for llama: llama\.some_thing"):
        view_of(tmp_path / "it.gguf")


def test_biases_in_blocks_are_refused(tmp_path: Path) -> None:
    """Of experts, which have two axes: a block does not fit a number."""
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    writer.add_block_count(1)
    data = gguf.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_gate_exps.bias", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = read_shards(tmp_path / "it.gguf")
    with pytest.raises(CheckpointError, match="has type Q8_0: a vector must be one of F64, F32, F16, BF16"):
        tensors_of(ARCHITECTURES["gpt-oss"], shards.tensors, 1, 32)


def split(folder: Path, **changes: Any) -> Path:
    """A checkpoint of two files."""
    values: dict[str, Any] = {"split.count": [2, 2], "split.no": [0, 1], "split.tensors.count": [2, 2], **changes}
    for index in range(2):
        writer = gguf.GGUFWriter(folder / f"it-{index + 1:05d}-of-00002.gguf", "llama")
        for key, each in values.items():
            writer.add_uint16(key, each[index])
        writer.add_tensor(changes.get("name", f"tensor{index}"), np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / "it-00001-of-00002.gguf"


def test_all_parts_of_a_checkpoint_are_found_by_one(tmp_path: Path) -> None:
    split(tmp_path)
    for name in ("it-00001-of-00002.gguf", "it-00002-of-00002.gguf"):
        found = read_shards(tmp_path / name)
        assert set(found.tensors) == {"tensor0", "tensor1"}
        assert found.first.path.name == "it-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split.count": [2, 3]}, "it-00002-of-00002.gguf: split.count = 3: must be 2"),
        ({"split.no": [0, 0]}, "it-00002-of-00002.gguf: split.no = 0: must be 1"),
        ({"split.tensors.count": [9, 9]}, "split.tensors.count = 9: must be 2"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_shards(split(tmp_path, **changes))


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    path = split(tmp_path)
    (tmp_path / "it-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"it-00002-of-00002\.gguf is missing"):
        read_shards(path)

"""Loading gives the same parameters for every sharding; invalid files raise a CheckpointError that names them."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jswa.errors import CheckpointError, ModelError
from jswa.model.binding import bind, run_dtype
from jswa.model.hf.tensor_map import canonical_name
from jswa.model.moe import Moe
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.convert import convert
from tests.parity.load import Fixture, load_fixture
from tests.parity.weights import write_checkpoint

FLOAT32 = jnp.dtype("float32")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama() -> Fixture:
    """Load a fixture with three layers, grouped heads and an untied head."""
    return load_fixture("llama_gqa")


@pytest.fixture
def folder(llama: Fixture, tmp_path: Path) -> Path:
    """Write a valid checkpoint in one file."""
    write_checkpoint(tmp_path, llama.config, llama.tensors)
    return tmp_path


@pytest.fixture
def sharded(llama: Fixture, tmp_path: Path) -> Path:
    """Write a valid checkpoint in three shards."""
    write_checkpoint(tmp_path, llama.config, llama.tensors, shards=3)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the weight map of a sharded checkpoint."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def load(folder: Path) -> Params:
    """Load the parameters in float32."""
    return load_checkpoint(folder, FLOAT32)[1]


def test_q_k_v_and_gate_up_are_fused_and_transposed(folder: Path, llama: Fixture) -> None:
    """Matrices are [in, out], with q, k, v in that order and gate before up; the embedding is as stored."""
    params, stored = load(folder), llama.tensors
    layer = "model.layers.1"
    qkv = [stored[f"{layer}.self_attn.{x}_proj.weight"].T for x in "qkv"]
    np.testing.assert_array_equal(params["layers.1.attention.qkv"], np.concatenate(qkv, axis=1))
    gate_up = [stored[f"{layer}.mlp.{x}_proj.weight"].T for x in ("gate", "up")]
    np.testing.assert_array_equal(params["layers.1.mlp.gate_up"], np.concatenate(gate_up, axis=1))
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"], stored["lm_head.weight"].T)


def test_a_sharded_checkpoint_gives_the_same_parameters(folder: Path, llama: Fixture, tmp_path: Path) -> None:
    """The distribution of tensors over files does not matter."""
    write_checkpoint(tmp_path / "sharded", llama.config, llama.tensors, shards=4)
    single, spread = load(folder), load(tmp_path / "sharded")
    assert single.keys() == spread.keys()
    for name, value in single.items():
        np.testing.assert_array_equal(value, spread[name])


@pytest.mark.parametrize("stored", ["float16", "float64", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_weights_are_cast_to_the_requested_dtype(folder: Path, stored: str, wanted: str) -> None:
    """Stored values of any floating-point type are rounded once."""
    rewrite(folder, lambda t: t.update({key: value.astype(jnp.dtype(stored)) for key, value in t.items()}))
    params = load_checkpoint(folder, jnp.dtype(wanted))[1]
    assert {value.dtype for value in params.values()} == {jnp.dtype(wanted)}
    source = load_file(folder / FILE)["model.norm.weight"]
    np.testing.assert_array_equal(params["final_norm.weight"], source.astype(jnp.dtype(wanted)))


def drop_q(tensors: dict[str, np.ndarray]) -> None:
    del tensors[Q]


def add_bias(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)


def transpose_down(tensors: dict[str, np.ndarray]) -> None:
    key = "model.layers.0.mlp.down_proj.weight"
    tensors[key] = np.ascontiguousarray(tensors[key].T)


def flatten_q(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q] = tensors[Q].reshape(-1)


def make_q_int(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q] = tensors[Q].astype(np.int8)


def make_norm_bool(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"] > 0


def double_q(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"language_model.{Q}"] = tensors[Q]


def drop_head(tensors: dict[str, np.ndarray]) -> None:
    del tensors["lm_head.weight"]


def add_layer(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q.replace(".1.", ".3.")] = tensors[Q]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_q, f"lacks {Q}"),
        (drop_head, "lacks lm_head.weight"),
        (add_bias, "does not use: model.layers.1.self_attn.q_proj.bias"),
        (add_layer, "does not use: model.layers.3.self_attn.q_proj.weight"),
        (transpose_down, r"model.safetensors: model.layers.0.mlp.down_proj.weight has shape \[96, 64\].*\[64, 96\]"),
        (flatten_q, rf"model.safetensors: {Q} has shape \[4096\].*\[64, 64\]"),
        (make_q_int, f"model.safetensors: {Q} has type I8: must be one of F64, F32, F16, BF16"),
        (make_norm_bool, "model.safetensors: model.norm.weight has type BOOL"),
        (double_q, f"{Q} is stored twice"),
        (dict.clear, "lacks lm_head.weight"),
    ],
)
def test_the_error_names_a_missing_or_wrong_tensor(
    folder: Path, change: Callable[[dict[str, np.ndarray]], object], named: str
) -> None:
    """Every tensor is used exactly once, in the shape that the config requires."""
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=named):
        load(folder)


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def header_past_the_end(data: bytes) -> bytes:
    return struct.pack("<Q", len(data) + 1) + data[8:]


def huge_header(data: bytes) -> bytes:
    return struct.pack("<Q", 2**63) + data[8:]


def broken_header(data: bytes) -> bytes:
    return data[:8] + b"?" + data[9:]


def cut_header(data: bytes) -> bytes:
    return data[:100]


def trailing(data: bytes) -> bytes:
    return data + bytes(64)


DAMAGES = [truncate, header_past_the_end, huge_header, broken_header, cut_header, trailing, lambda _: b"", bytes.upper]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_error_names_a_damaged_file(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    """Truncation and corruption are detected before any value is used."""
    (folder / FILE).write_bytes(damage((folder / FILE).read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)


@given(damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_damage_to_the_header_is_an_error_or_harmless(
    damage: list[tuple[int, int]], llama: Fixture, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A changed byte among the first 400 raises a CheckpointError or changes nothing."""
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        write_checkpoint(folder, llama.config, llama.tensors)
        (folder / FILE).rename(folder / "valid")
    content = bytearray((folder / "valid").read_bytes())
    for offset, byte in damage:
        content[offset] = byte
    (folder / FILE).write_bytes(content)
    with contextlib.suppress(ModelError):
        load(folder)


def test_the_error_names_a_folder_without_weights(folder: Path) -> None:
    """The error has both file names that were tried."""
    (folder / FILE).unlink()
    (folder / "it.gguf").write_bytes(b"GGUF")
    said = r"has neither model\.safetensors nor .*index\.json: it has it\.gguf: name that file"
    with pytest.raises(CheckpointError, match=f"{folder} {said}"):
        load(folder)
    for name in ("nowhere", "0" * 300):  # a name may have 255 bytes
        with pytest.raises(CheckpointError, match=f"{name}: must be a folder"):
            load(folder / name)
    (folder / FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_weight_files_may_be_links_within_the_folder(folder: Path) -> None:
    """They may be relative or absolute, and the folder may be a link too."""
    (folder / "blobs").mkdir()
    for name, target in (("config.json", Path("blobs")), (FILE, folder / "blobs")):
        (folder / name).rename(folder / "blobs" / name)
        (folder / name).symlink_to(target / name)
    (folder / "folder").symlink_to(folder)
    assert load(folder / "folder").keys()


def test_the_error_names_a_missing_shard(sharded: Path) -> None:
    """The index lists a file that does not exist."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors, which is not a file"):
        load(sharded)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", ""])
def test_an_index_must_not_name_files_outside_the_folder(sharded: Path, name: str) -> None:
    """The file is refused even if it exists."""
    (sharded.parent / "outside.safetensors").write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    (sharded / "sub").mkdir()
    (sharded / "sub" / "model.safetensors").write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    reindex(sharded, lambda weights: weights.update({Q: name}))
    with pytest.raises(CheckpointError, match="which is not a file of this checkpoint"):
        load(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    """The loader does not guess which of the two counts."""
    one, two = (sharded / f"model-0000{k}-of-00003.safetensors" for k in (1, 2))
    tensors = load_file(two)
    key, value = next(iter(load_file(one).items()))
    save_file(tensors | {key: value}, two)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00003\.safetensors: {key} is stored twice"):
        load(sharded)


def test_the_error_names_a_damaged_shard(sharded: Path) -> None:
    """The error has the name of the shard, not of the index."""
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(truncate(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is not a readable"):
        load(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", *(f'{{"weight_map": {x}}}' for x in ("[]", '{"a": 3}', "{}"))])
def test_a_damaged_index_is_refused(sharded: Path, content: str) -> None:
    """The error has the name of the index or of missing tensors."""
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json|lacks"):
        load(sharded)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("layers.3.input_layernorm.weight", "model.layers.3.input_layernorm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
        ("model.multi_modal_projector.mm_input_projection_weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_canonical_names_are_the_same_for_all_checkpoint_forms(key: str, name: str | None) -> None:
    """This holds for hub, version-5 and bare names; names of other modalities give None."""
    assert canonical_name(key) == name


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_selection_bias_is_not_rounded_to_16_bits(quantization: str, tmp_path: Path) -> None:
    """Fours that differ by 0.004 are equal in bfloat16: other experts would win. Read from both kinds of folders."""
    fixture = load_fixture("dots1_layer_types_bias")
    name = next(name for name in fixture.tensors if name.endswith("e_score_correction_bias"))
    bias = np.full(fixture.tensors[name].shape, 4.0, np.float32)
    bias[-1] += 0.004
    write_checkpoint(tmp_path / "plain", fixture.config, fixture.tensors | {name: bias})
    convert(tmp_path / "plain", tmp_path / "converted", "bfloat16", quantization)  # type: ignore[arg-type]
    for folder in ("plain", "converted"):
        model, params = load_checkpoint(tmp_path / folder, jnp.dtype("bfloat16"), quantization=quantization)  # type: ignore[arg-type]
        mixture = next(layer.mlp for layer in bind(model, params).layers if isinstance(layer.mlp, Moe))
        assert mixture.selection_bias is not None
        np.testing.assert_array_equal(mixture.selection_bias[...], bias)
        assert run_dtype(params) == jnp.dtype("bfloat16")

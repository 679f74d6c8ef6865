"""Tensors of a tower that are missing, misshaped or unknown are named; names may lack their prefix."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jswa.errors import CheckpointError
from jswa.model.collectives import AXIS
from jswa.model.hf.config import parse_config
from jswa.model.partition import cut_of
from jswa.model.transformer import Params
from jswa.model.vision.config import vision_config_of
from jswa.model.vision.weights import load_tower
from jswa.model.weights.load import load_checkpoint
from tests.parity.images.load import load_images
from tests.parity.weights import write_checkpoint

FIXTURE = load_images("clipped")
TOWER = "model.vision_tower"
Q = f"{TOWER}.encoder.layers.1.self_attn.q_proj"


def load(folder: Path, tensors: dict[str, Any], dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Params:
    """Write a checkpoint and read its tower."""
    write_checkpoint(folder, FIXTURE.config, tensors)
    config = vision_config_of(FIXTURE.config)
    assert config is not None
    return load_tower(folder, config, jnp.dtype(dtype), mesh=mesh)


def test_names_may_lack_the_prefix_of_whole_models(tmp_path: Path) -> None:
    bare = {key.removeprefix("model."): value for key, value in FIXTURE.tensors.items()}
    found, expected = load(tmp_path / "bare", bare), load(tmp_path / "whole", FIXTURE.tensors)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_all_is_held_in_one_type(tmp_path: Path) -> None:
    found = load(tmp_path, FIXTURE.tensors, jnp.bfloat16)
    assert {value.dtype for value in found.values()} == {jnp.dtype(jnp.bfloat16)}
    low, high = (FIXTURE.tensors[f"{Q}.{name}"].astype(jnp.bfloat16) for name in ("input_min", "input_max"))
    assert np.array_equal(found["blocks.1.attention.q.bounds"][:2], [low, high])


def test_each_device_of_a_mesh_has_the_whole_tower(tmp_path: Path) -> None:
    """Names of its parameters must not be such as the decoder's, which are split."""
    found = load(tmp_path, FIXTURE.tensors, mesh=Mesh(np.array(jax.devices()[:1]), (AXIS,)))
    assert all(isinstance(value.sharding, NamedSharding) for value in found.values())
    model = parse_config(FIXTURE.config)
    assert not [name for name, value in found.items() if cut_of(name, value.shape, model, 2) is not None]


@pytest.mark.parametrize(
    "key", [f"{Q}.linear.weight", f"{Q}.output_max", "model.embed_vision.embedding_projection.weight"]
)
def test_a_missing_tensor_is_named(key: str, tmp_path: Path) -> None:
    rest = {name: value for name, value in FIXTURE.tensors.items() if name != key}
    with pytest.raises(CheckpointError, match=f"the checkpoint lacks {key.removeprefix('model.')}"):
        load(tmp_path, rest)


@pytest.mark.parametrize(
    "key", [f"{TOWER}.std_bias", f"{TOWER}.encoder.layers.2.mlp.up_proj.input_min", "model.embed_vision.bias"]
)
def test_an_unknown_tensor_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"does not use: {key.removeprefix('model.')}"):
        load(tmp_path, FIXTURE.tensors | {key: np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (f"{Q}.linear.weight", (64, 31), r"\[64, 31\], the config asks for \[64, 32\]"),
        (f"{Q}.input_min", (1,), r"\[1\], the config asks for \[\]"),
        (f"{TOWER}.patch_embedder.position_embedding_table", (2, 23, 32), r"asks for \[2, 24, 32\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(key: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{key} has shape .*{message}"):
        load(tmp_path, FIXTURE.tensors | {key: np.zeros(shape, np.float32)})


def test_a_tensor_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    tensors = FIXTURE.tensors | {f"{Q}.input_min": np.array(3, np.int32)}
    with pytest.raises(CheckpointError, match=f"{Q}.input_min has type I32: must be one of"):
        load(tmp_path, tensors)


def test_text_and_speech_are_not_looked_at(tmp_path: Path) -> None:
    """Nor does the text model's loader look at the tower."""
    load(tmp_path, FIXTURE.tensors | {"model.audio_tower.x": np.zeros(1, np.float32)})
    config, _ = load_checkpoint(tmp_path, jnp.dtype(jnp.float32))
    assert config.family == "gemma4_text"


def test_a_converted_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jswa.model.vision.weights.is_converted", lambda folder: True)
    with pytest.raises(CheckpointError, match="is converted, without its vision tower"):
        load(tmp_path, FIXTURE.tensors)

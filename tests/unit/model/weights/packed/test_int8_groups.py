"""Matrices in int8 with a scale per group of inputs are held as the checkpoint has them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jswa.errors import WeightsError
from jswa.forms.base.names import SCALES
from jswa.model.partition import cut_of
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.packed.int8_groups import for_devices
from jswa.model.weights.placement import Placement
from jswa.running.staging import WeightsStager, held_shapes
from jswa.storage.convert import convert
from pallas_kernels.int8_groups import Int8GroupRows, Int8Groups, dequantized, dequantized_rows
from tests.support.checkpoints.int8_groups import write_groups

FLOAT32 = jnp.dtype("float32")


def load(folder: Path, quantization: Any = "auto", **options: Any) -> Params:
    """Load parameters in float32."""
    return load_checkpoint(folder, FLOAT32, quantization=quantization, **options)[1]


def numbers(held: Params) -> dict[str, np.ndarray]:
    """Return all parameters, with the numbers of the matrices that are held in groups."""
    names = [name.removesuffix(f".{SCALES}") for name in held if name.endswith(SCALES)]
    own = {name: (held[f"{name}.values"], held[f"{name}.{SCALES}"]) for name in names}
    rest = {key: np.asarray(value) for key, value in held.items() if key.rpartition(".")[0] not in own}
    return rest | {name: np.asarray(widened(name, *arrays)) for name, arrays in own.items()}


def widened(name: str, values: Array, scales: Array) -> Array:
    """Return the numbers of a matrix."""
    if name == "embed":
        return dequantized_rows(Int8GroupRows(values, scales), FLOAT32)
    return dequantized(Int8Groups(values, scales), FLOAT32)


def assert_equal(found: dict[str, np.ndarray], wanted: Params) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_the_numbers_are_those_of_the_checkpoint(scales: str, tmp_path: Path) -> None:
    """Bit for bit; scales keep their type."""
    write_groups(tmp_path, "llama_gqa", {"": 16}, scales)
    held = load(tmp_path)
    linear = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    assert {f"layers.0.{name}.{SCALES}" for name in linear} <= held.keys()
    assert {str(held[f"layers.0.{name}.{SCALES}"].dtype) for name in linear} == {scales}
    assert {str(held[f"layers.0.{name}.values"].dtype) for name in linear} == {"int8"}
    assert_equal(numbers(held), load(tmp_path, "none"))


ENDS = ("model.embed_tokens", "lm_head")


@pytest.mark.parametrize("linear", ["xla", "cpu"])
@pytest.mark.parametrize(("name", "ends"), [("llama_gqa", ENDS), ("llama_gqa", ENDS[:1]), ("llama_tied", ENDS[:1])])
def test_embedding_and_head_are_held_too(linear: Any, name: str, ends: tuple[str, ...], tmp_path: Path) -> None:
    """With a row of scales for each row of the embedding; a converted checkpoint has them."""
    write_groups(tmp_path / "from", name, {"": 32}, ends=ends)
    held = load(tmp_path / "from", linear=linear)
    vocab, width = held["embed.values"].shape
    assert held[f"embed.{SCALES}"].shape == (vocab, width // 32)
    assert (f"lm_head.{SCALES}" in held) == ("lm_head" in ends)
    assert_equal(numbers(held), load(tmp_path / "from", "none"))
    convert(tmp_path / "from", tmp_path / "to", dtype="float32", quantization="auto")
    assert_equal(numbers(load(tmp_path / "to", linear=linear)), load(tmp_path / "from", "none"))


def test_an_embedding_in_smaller_groups_is_widened(tmp_path: Path) -> None:
    """The CPU's products read whole blocks of 32 inputs; a head in panels does not mind."""
    write_groups(tmp_path, "llama_gqa", {"": 16}, ends=ENDS)
    held = load(tmp_path)
    assert "embed" in held
    assert f"lm_head.{SCALES}" in held
    assert_equal(numbers(held), load(tmp_path, "none"))


def test_other_kernels_have_them_widened(tmp_path: Path) -> None:
    """As they have linear layers in this form."""
    write_groups(tmp_path, "llama_gqa", {"": 32}, ends=ENDS)
    assert not any(name.endswith(SCALES) for name in load(tmp_path, linear="mosaic"))


def test_devices_share_the_rows_of_an_embedding(tmp_path: Path) -> None:
    """Each has its part of the vocabulary, with the scales; groups stay as they are."""
    write_groups(tmp_path, "llama_gqa", {"": 32}, ends=ENDS)
    model, held = load_checkpoint(tmp_path, FLOAT32, quantization="auto")
    arrays = {name: np.asarray(held[name]) for name in ("embed.values", f"embed.{SCALES}")}
    cuts = {cut_of(name, array.shape, model, 2) for name, array in arrays.items()}
    assert cuts == {cut_of("embed", arrays["embed.values"].shape, model, 2)} != {None}


def test_groups_of_different_sizes_become_the_smaller_ones(tmp_path: Path) -> None:
    """q, k and v are one matrix here."""
    write_groups(tmp_path, "llama_gqa", {"k_proj": 8, "": 16})
    held = load(tmp_path)
    sizes = {}
    for name in ("qkv", "out"):
        values, scales = (held[f"layers.0.attention.{name}.{end}"] for end in ("values", SCALES))
        sizes[name] = len(values) // len(scales)
    assert sizes == {"qkv": 8, "out": 16}
    assert_equal(numbers(held), load(tmp_path, "none"))


def test_a_converted_checkpoint_has_them_too(tmp_path: Path) -> None:
    write_groups(tmp_path / "from", "llama_gqa", {"": 16})
    convert(tmp_path / "from", tmp_path / "to", dtype="float32", quantization="auto")
    assert_equal(numbers(load(tmp_path / "to")), load(tmp_path / "from", "none"))


@pytest.mark.parametrize(("devices", "group", "expected"), [(2, 16, 16), (4, 32, 16), (8, 64, 8), (1, 32, 32)])
def test_no_group_crosses_devices(devices: int, group: int, expected: int) -> None:
    """Groups become smaller where devices would share one, and the numbers stay."""
    rng = np.random.default_rng(0)
    values = rng.integers(-128, 128, (64, 3), np.int8)
    scales = rng.uniform(0.5, 1, (64 // group, 3)).astype(np.float16)
    found = for_devices("it", {"it.values": values, f"it.{SCALES}": scales}, devices)
    assert 64 // len(found[f"it.{SCALES}"]) == expected
    parts = (np.split(found[f"it.{end}"], devices) for end in ("values", SCALES))
    own = [dequantized(Int8Groups(*map(jnp.asarray, pair)), FLOAT32) for pair in zip(*parts, strict=True)]
    whole = dequantized(Int8Groups(jnp.asarray(values), jnp.asarray(scales)), FLOAT32)
    np.testing.assert_array_equal(np.concatenate(own), whole)


def test_new_weights_are_not_rounded_to_groups(tmp_path: Path) -> None:
    write_groups(tmp_path, "llama_gqa", {"": 16})
    model, held = load_checkpoint(tmp_path, FLOAT32, quantization="auto")
    stager = WeightsStager(model, FLOAT32, Placement(model), held_shapes(held), "auto", "xla", "xla", False)
    new = {name: jnp.asarray(value) for name, value in load(tmp_path, "none").items()}
    with pytest.raises(WeightsError, match="is held in int8 with scales of groups, to which jswa does not round"):
        stager.stage(new)

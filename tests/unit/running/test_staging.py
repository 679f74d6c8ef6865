"""New weights become what loading them from a folder gives; bad ones are refused by name, before anything changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jswa.errors import WeightsError
from jswa.forms.layouts import lay_out
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.placement import Placement
from jswa.running.staging import WeightsStager, held_shapes
from pallas_kernels import Linear
from tests.parity.load import Fixture, load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.packed_integers import CASES, write_both
from tests.support.checkpoints.quantized import plain_tensors, write

BFLOAT16 = jnp.dtype("bfloat16")
NORM = "model.norm.weight"


def load(
    name: str, folder: Path, *, quantization: QuantizationMode = "none", linear: Linear = "xla"
) -> tuple[Fixture, Params, WeightsStager]:
    """Write and load a fixture; return it with its parameters and what stages others like them."""
    fixture = load_fixture(name)
    write_checkpoint(folder, fixture.config, fixture.tensors)
    model, params = load_checkpoint(folder, BFLOAT16, quantization=quantization)
    panels = linear == "cpu"
    lay_out(params, linear=linear, experts=panels)
    placement, held = Placement(model), held_shapes(params)
    return fixture, params, WeightsStager(model, BFLOAT16, placement, held, quantization, "xla", linear, panels)


def require_same(found: Params, wanted: Params) -> None:
    """Require the same parameters, bit for bit and on the same devices."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].sharding == value.sharding, name
        np.testing.assert_array_equal(bits(found[name]), bits(value), name)


def bits(array: Any) -> np.ndarray:
    """The bytes of an array."""
    return np.asarray(array).view(np.uint8)


@pytest.mark.parametrize(
    "name",
    ["llama_gqa", "afmoe_base", "gemma4_unified_shared", "gpt_oss_layer_types_top1", "mimo_v2_flash_value_scale_null"],
)
def test_arrays_become_what_their_files_would(name: str, tmp_path: Path) -> None:
    """Every layout: fused, transposed, stacked, interleaved and folded tensors, in a type other than the engine's."""
    fixture, params, stager = load(name, tmp_path)
    require_same(stager.stage({key: jnp.asarray(value) for key, value in fixture.tensors.items()}), params)


@pytest.mark.parametrize(("quantization", "linear"), [("none", "cpu"), ("int8", "xla"), ("fp8", "xla"), ("fp8", "fp8")])
def test_arrays_get_the_form_in_which_the_engine_holds_them(
    quantization: QuantizationMode, linear: Linear, tmp_path: Path
) -> None:
    """In panels, in 8 bits, and with outputs first."""
    fixture, params, stager = load("llama_gqa", tmp_path, quantization=quantization, linear=linear)
    require_same(stager.stage(iter(fixture.tensors.items())), params)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_linear_layers_in_8_bits_stay_in_tiles(quantization: QuantizationMode, tmp_path: Path) -> None:
    """As the Hopper kernel reads them."""
    config, tensors = plain_tensors("llama_one_layer", hidden_size=128, head_dim=32, intermediate_size=192)
    write(tmp_path, config, tensors)
    model, params = load_checkpoint(tmp_path, BFLOAT16, quantization=quantization)
    lay_out(params, linear="mosaic", experts=False)
    assert "layers.0.mlp.down.tiles" in params
    placement, held = Placement(model), held_shapes(params)
    stager = WeightsStager(model, BFLOAT16, placement, held, quantization, "xla", "mosaic", False)
    for source in (iter(tensors.items()), tmp_path):
        require_same(stager.stage(source), params)


def test_linear_layers_in_4_bits_come_from_folders_alone(tmp_path: Path) -> None:
    """jswa does not round arrays to 4 bits."""
    packed, _ = write_both(tmp_path, CASES["compressed"], "llama_one_layer", hidden_size=128, intermediate_size=192)
    model, params = load_checkpoint(packed, BFLOAT16, quantization="auto")
    lay_out(params, linear="mosaic", experts=False)
    placement, held = Placement(model), held_shapes(params)
    stager = WeightsStager(model, BFLOAT16, placement, held, "auto", "xla", "mosaic", False)
    require_same(stager.stage(packed), params)
    arrays = load_file(tmp_path / "plain" / "model.safetensors")
    with pytest.raises(WeightsError, match="is held in 4 bits, to which jswa does not round"):
        stager.stage(iter(arrays.items()))


def test_experts_in_8_bits_stay_in_tiles(tmp_path: Path) -> None:
    """As the Hopper kernel reads them."""
    config, tensors = plain_tensors("gpt_oss_base", intermediate_size=64)
    write(tmp_path, config, tensors)
    model, params = load_checkpoint(tmp_path, BFLOAT16, quantization="fp8", experts="mosaic")
    assert "layers.0.mlp.down.tiles" in params
    placement, held = Placement(model), held_shapes(params)
    stager = WeightsStager(model, BFLOAT16, placement, held, "fp8", "mosaic", "xla", False)
    require_same(stager.stage(iter(tensors.items())), params)


def test_a_tree_a_folder_and_parameters_are_sources(tmp_path: Path) -> None:
    """Keys on the way to an array are its name; the decoder's own names are names too."""
    fixture, params, stager = load("llama_gqa", tmp_path)
    tree: dict[str, Any] = {}
    for name, value in fixture.tensors.items():
        *way, last = name.split(".")
        node = tree
        for key in way:
            node = node.setdefault(key, {})
        node[last] = value
    for source in (tree, tmp_path, params):
        require_same(stager.stage(source), params)


def test_new_parameters_share_no_memory_with_their_source(tmp_path: Path) -> None:
    """A trainer donates or changes its arrays afterwards."""
    _, params, stager = load("llama_gqa", tmp_path)
    given = {name: jnp.array(value, copy=True) for name, value in params.items()}
    staged = stager.stage(given)
    for value in given.values():
        value.delete()
    require_same(staged, params)


def without(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leave the last norm out."""
    return ((name, value) for name, value in tensors.items() if name != NORM)


@pytest.mark.parametrize(
    ("change", "tensor", "why"),
    [
        (without, NORM, "must be among the new weights"),
        (lambda t: {**t, "model.extra.weight": t[NORM]}, "model.extra.weight", "must be a tensor of the model"),
        (lambda t: [*t.items(), (NORM, t[NORM])], NORM, "must be given once"),
        (lambda t: {**t, f"language_{NORM}": t[NORM]}, None, "must be given once"),
        (lambda t: {**t, NORM: t[NORM][:-1]}, NORM, "has the shape"),
        (lambda t: {**t, NORM: t[NORM].astype(np.int32)}, NORM, "has the type int32"),
        (lambda t: {**t, NORM: 1.0}, NORM, "must be an array, not float"),
        (lambda _: "nowhere", "nowhere", "must be a folder"),
        (lambda _: "0" * 300, "0" * 300, "must be a folder"),
    ],
)
def test_bad_weights_are_refused_by_name(
    change: Callable[[dict[str, Any]], Any], tensor: str | None, why: str, tmp_path: Path
) -> None:
    """The error names the tensor."""
    fixture, _, stager = load("llama_gqa", tmp_path)
    with pytest.raises(WeightsError, match=why) as caught:
        stager.stage(change(dict(fixture.tensors)))
    assert tensor is None or caught.value.value == tensor


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its config differs."""
    _, _, stager = load("llama_gqa", tmp_path / "one")
    load("cohere2_bias_untied", tmp_path / "other")
    with pytest.raises(WeightsError, match="must have the config"):
        stager.stage(tmp_path / "other")

"""`quantization = "w8a8_fp8"`: which matrices it takes, with which bits, and what rounded activations change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jswa.errors import ConfigError
from jswa.forms.base.names import OUTPUTS_FIRST, fp8_names
from jswa.forms.layouts import lay_out, require_form
from jswa.model.layers import linear
from jswa.model.lora import Adapted, lora_product
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.convert import convert
from jswa.storage.hub import TINY
from pallas_kernels.fp8 import Fp8Rows, matmul
from pallas_kernels.quantized import quantize
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.quantized import fp8_block, plain_tensors, write
from tests.support.oracles import dense_logits
from tools.tiny import scores

FLOAT32 = jnp.dtype("float32")
DENSE = ("llama_gqa", "gemma3_text_p2", "phi3_base", "gemma4_text_mix")  # fused, tied, shared and folded matrices


def laid_out(params: Params) -> Params:
    """Return the parameters with the linear layers in float8 as the backend reads them."""
    found = dict(params)
    lay_out(found, linear="fp8", experts=False)
    return found


def rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float8 with a scale per output."""
    return fp8_block(x, (1, x.shape[-1]))


def whole(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float8 with one scale."""
    return fp8_block(x, x.shape)


def write_fp8(folder: Path, name: str, kind: Callable[..., Any], config: dict[str, Any]) -> None:
    """Write a checkpoint whose projections are in float8."""
    plain, tensors = plain_tensors(name)
    for key in [key for key in tensors if key.endswith("_proj.weight") and "layers" in key and "per_layer" not in key]:
        tensors[key], tensors[f"{key}_scale"], _ = kind(tensors[key])
    write(folder, {**plain, "quantization_config": {"quant_method": "fp8", **config}}, tensors)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("kind", [rows, whole])
def test_the_checkpoint_s_numbers_are_kept(name: str, kind: Callable[..., Any], tmp_path: Path) -> None:
    """With one scale per output or tensor nothing is rounded again: the same bytes and scales, transposed."""
    write_fp8(tmp_path, name, kind, {})
    model, params = load_checkpoint(tmp_path, FLOAT32, quantization="auto")
    found, names = laid_out(params), fp8_names(params)
    assert len(names) >= 2 * len(model.layers)
    for base in names:
        np.testing.assert_array_equal(found[f"{base}{OUTPUTS_FIRST}"], params[f"{base}.values"].T, err_msg=base)
        assert found[f"{base}.scales"] is params[f"{base}.scales"]
        assert f"{base}.values" not in found
    assert all(found[key] is params[key] for key in params if key in found)
    require_form(found, "fp8")


def test_blocks_of_scales_are_rounded_again_only_on_request(tmp_path: Path) -> None:
    """They are widened, so that no layer is in float8; `quantization = "fp8"` rounds them."""
    write_fp8(tmp_path, "llama_gqa", lambda x: fp8_block(x, (16, 24)), {"weight_block_size": [16, 24]})
    widened = laid_out(load_checkpoint(tmp_path, FLOAT32, quantization="auto")[1])
    with pytest.raises(ConfigError, match="no linear layer is held in float8"):
        require_form(widened, "fp8")
    require_form(widened, "xla")
    require_form(laid_out(load_checkpoint(tmp_path, FLOAT32, quantization="fp8")[1]), "fp8")


def test_other_forms_and_experts_stay_as_they_are(tmp_path: Path) -> None:
    """Integers, embedding and head, experts; a matrix of a size that the products cannot have is refused by name."""
    fixture = load_fixture("gpt_oss_base")
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    params = load_checkpoint(tmp_path, FLOAT32, quantization="fp8")[1]
    found = laid_out(params)
    assert {"embed.values", "layers.0.mlp.gate_up.values"} <= found.keys()
    assert f"layers.0.attention.qkv{OUTPUTS_FIRST}" in found
    integers = load_checkpoint(tmp_path, FLOAT32, quantization="int8")[1]
    assert laid_out(integers) == integers
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down is \[24, 32\] on each device: both must be multiples"):
        laid_out({"layers.0.mlp.down.values": jnp.zeros((24, 32), jnp.uint8)})


def test_a_converted_checkpoint_has_the_same_bits(tmp_path: Path) -> None:
    """It holds values and scales, whatever the backend, and is laid out when it is loaded."""
    fixture = load_fixture("llama_gqa")
    write_checkpoint(tmp_path / "plain", fixture.config, fixture.tensors)
    convert(tmp_path / "plain", tmp_path / "converted", "float32", "fp8")
    one, other = (
        laid_out(load_checkpoint(tmp_path / folder, FLOAT32, quantization="fp8")[1])
        for folder in ("plain", "converted")
    )
    assert one.keys() == other.keys()
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key], err_msg=key)


def test_adapters_multiply_the_numbers_before_rounding() -> None:
    """An adapter beside a matrix in float8 adds its own product of the activations as they are."""
    rng = np.random.default_rng(0)
    draw = [jnp.asarray(rng.standard_normal(shape), FLOAT32) for shape in ((5, 32), (32, 48), (32, 4), (4, 48))]
    x, matrix, a, b = draw
    stored = quantize(matrix, "fp8")
    base, owner, ids = Fp8Rows(stored.values.T, stored.scales), jnp.array([1, 1, 2, 2]), jnp.array([0, 1, 2, 1, 0])
    adapted = Adapted(base, a, b, owner)
    weight: Any = nnx.Param(adapted)
    expected = matmul(x, base) + lora_product(x, adapted, ids)
    np.testing.assert_array_equal(linear(x, weight, None, ids), expected)
    assert not np.array_equal(expected[1], matmul(x, base)[1])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_text_p2"])
def test_rounded_activations_cost_as_much_as_rounded_weights(name: str, tmp_path: Path) -> None:
    """Of small random models: logits move from those of widened weights by at most what the weights' rounding does."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, plain = load_checkpoint(tmp_path, FLOAT32)
    held = load_checkpoint(tmp_path, FLOAT32, quantization="fp8")[1]
    exact, widened, both = (
        np.asarray(dense_logits(model, params, fixture.tokens)) for params in (plain, held, laid_out(held))
    )
    rounding, more = np.sqrt(((widened - exact) ** 2).mean()), np.sqrt(((both - widened) ** 2).mean())
    print(f"{name}: weights {rounding:.4f}, activations {more:.4f}, of {exact.std():.2f}")
    assert 0.1 * rounding < more < 1.5 * rounding


def test_tiny_predicts_as_well_with_8_bit_factors() -> None:
    """Bits per byte of held-out stories: within 2 % of float32, as with widened weights."""
    model, plain = load_checkpoint(TINY, FLOAT32)
    held = load_checkpoint(TINY, FLOAT32, quantization="fp8")[1]
    texts = scores.held_out_stories(8)
    exact, widened, both = (scores.bits_per_byte(model, params, texts) for params in (plain, held, laid_out(held)))
    print(f"{exact:.4f}, {widened:.4f}, {both:.4f}")
    assert both < 1.02 * exact
    assert both != widened

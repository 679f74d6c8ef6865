"""`linear=mosaic` in `kernels`: which matrices become tiles, with which numbers, and what is refused."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Float

from jswa.errors import ConfigError
from jswa.forms.base.form import MatrixPlace
from jswa.forms.base.names import linear_in_16_bits
from jswa.forms.layouts import lay_out, require_form
from jswa.forms.table import matrix_at
from jswa.model.binding import bind
from jswa.model.layers import linear
from jswa.model.lora import Adapted, lora_product
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.convert import convert
from pallas_kernels.experts import int4_tiles
from pallas_kernels.experts.dense import DensePlain, DenseTiles, fits, matmul
from pallas_kernels.int4 import Int4
from tests.support.checkpoints.packed_integers import CASES, write_both
from tests.support.kernels.device import hopper

BFLOAT16 = jnp.dtype("bfloat16")
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MATRICES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


def laid_out(params: Params) -> Params:
    """Return the parameters with the linear layers as the backend reads them."""
    found = dict(params)
    lay_out(found, linear="mosaic", experts=False)
    return found


def numbers(name: str, params: Params) -> Float[np.ndarray, "K C"]:
    """Return the numbers of a matrix in tiles."""
    tiles = matrix_at(MatrixPlace(name, (0, 0)), params).tiles
    return np.asarray(tiles.numbers())


@pytest.mark.parametrize(
    "case", ["compressed", "compressed symmetric bf16", "compressed channel asymmetric", "awq", "gptq"]
)
def test_packed_integers_keep_their_numbers(case: str, tmp_path: Path) -> None:
    """Rounded to bfloat16 once, bit for bit those of `quantization = none`; a converted folder gives the same tiles."""
    packed, _ = write_both(tmp_path, CASES[case], "llama_one_layer", others={}, one_order=True, **SIZES)
    model, plain = load_checkpoint(packed, BFLOAT16, quantization="none")
    held = load_checkpoint(packed, BFLOAT16, quantization="auto")[1]
    found = laid_out(held)
    require_form(found, "mosaic")
    for name in (f"layers.0.{matrix}" for matrix in MATRICES):
        np.testing.assert_array_equal(numbers(name, found), np.asarray(plain[name].astype(jnp.float32)), err_msg=name)
        assert not [key for key in found if key.startswith(name) and key.endswith((".codes", "_scales", "_zeros"))]
    assert all(found[key] is held[key] for key in held if key in found)
    assert isinstance(bind(model, found, sms=7).layers[0].attention.qkv.get_value(), DenseTiles)
    convert(packed, tmp_path / "converted", "bfloat16", "auto")
    other = laid_out(load_checkpoint(tmp_path / "converted", BFLOAT16, quantization="auto")[1])
    assert other.keys() == found.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value, other[key], err_msg=key)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bits_keep_their_numbers(kind: Any, tmp_path: Path) -> None:
    """Embedding and head stay as they are."""
    _, plain = write_both(tmp_path, CASES["compressed"], "llama_one_layer", others={}, one_order=True, **SIZES)
    held = load_checkpoint(plain, BFLOAT16, quantization=kind)[1]
    found = laid_out(held)
    for name in (f"layers.0.{matrix}" for matrix in MATRICES):
        values = held[f"{name}.values"]
        wide = values.view(jnp.float8_e4m3fn) if kind == "fp8" else values
        np.testing.assert_array_equal(
            numbers(name, found), np.asarray(wide.astype(jnp.float32) * held[f"{name}.scales"][None])
        )
        assert f"{name}.values" not in found
    assert found["embed.values"] is held["embed.values"]
    require_form(found, "mosaic")


@pytest.mark.parametrize(
    ("case", "sizes", "limit"),
    [
        ("compressed act-order", {}, "orders its groups by act-order: must be xla"),
        ("compressed", {"intermediate_size": 96}, r"\[96, 128\] in 3 groups does not fit multiples of 64 and of 32"),
        ("compressed channel", {}, "has scales in float32 that are no sums of two numbers of bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(case: str, sizes: dict[str, Any], limit: str, tmp_path: Path) -> None:
    """No layer runs on another backend silently."""
    packed, _ = write_both(tmp_path, CASES[case], "llama_one_layer", others={}, one_order=True, **{**SIZES, **sizes})
    params = load_checkpoint(packed, BFLOAT16, quantization="auto")[1]
    with pytest.raises(ConfigError, match=rf"kernels = 'linear=mosaic': layers\.0\.\S+ {limit}"):
        laid_out(params)


@pytest.mark.parametrize("sums", ["xla", "cpu"])
def test_layers_in_16_bits_stay_as_they_are(sums: Any, tmp_path: Path) -> None:
    """The kernel reads them; it has the head too in an engine whose rows are computed alone."""
    _, plain = write_both(tmp_path, CASES["compressed"], "llama_one_layer", others={}, one_order=True, **SIZES)
    model, params = load_checkpoint(plain, BFLOAT16)
    found = laid_out(params)
    require_form(found, "mosaic")
    assert all(found[name] is value for name, value in params.items())
    assert sorted(linear_in_16_bits(found)) == sorted(f"layers.0.{matrix}" for matrix in MATRICES)
    decoder = bind(model, found, sms=7, linear="mosaic", sums=sums)
    assert isinstance(decoder.layers[0].attention.out.get_value(), DensePlain)
    assert decoder.lm_head is not None
    assert isinstance(decoder.lm_head.get_value(), DensePlain) == (sums == "cpu" and fits(*found["lm_head"].shape))
    assert not isinstance(bind(model, found).layers[0].attention.out.get_value(), DensePlain)


def test_layers_in_16_bits_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The error names the matrix, its sides and the limit."""
    sizes = {**SIZES, "intermediate_size": 96}
    _, plain = write_both(tmp_path, CASES["compressed"], "llama_one_layer", others={}, one_order=True, **sizes)
    params = laid_out(load_checkpoint(plain, BFLOAT16)[1])
    limit = r"layers\.0\.mlp\.down is \[96, 128\] on each device: both must be multiples of 64, or linear=xla"
    with pytest.raises(ConfigError, match=f"kernels = 'linear=mosaic': {limit}"):
        require_form(params, "mosaic")
    require_form(params, "xla")


def test_adapters_add_their_own_product() -> None:
    """Beside a matrix in tiles, as beside any other."""
    rng = np.random.default_rng(0)
    draw = [jnp.asarray(rng.standard_normal(shape) / 8, BFLOAT16) for shape in ((5, 64), (64, 4), (4, 128))]
    x, a, b = draw
    codes = jnp.asarray(rng.integers(0, 256, (32, 128), np.uint8))
    stored = Int4(codes, jnp.full((2, 128), 0.01, BFLOAT16), jnp.full((2, 128), 8, jnp.uint8))
    base, owner, ids = DenseTiles(int4_tiles.tiles(stored)), jnp.array([1, 1, 2, 2]), jnp.array([0, 1, 2, 1, 0])
    adapted = Adapted(base, a, b, owner)
    weight: Any = nnx.Param(adapted)
    with hopper():
        found, product = linear(x, weight, None, ids), matmul(x, base)
    np.testing.assert_array_equal(found, product + lora_product(x, adapted, ids))
    assert not np.array_equal(found[1], product[1])

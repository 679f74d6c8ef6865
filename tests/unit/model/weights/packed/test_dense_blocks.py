"""Linear layers in e4m3 with scales of blocks: in which modes they stay so, with which numbers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import ConfigError, WeightsError
from jswa.exec.sizing import weight_bytes
from jswa.forms.base.form import MatrixPlace
from jswa.forms.layouts import lay_out, require_form
from jswa.forms.table import matrix_at
from jswa.model.binding import bind
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import parse_quantization
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.placement import Placement
from jswa.running.staging import WeightsStager, held_shapes
from jswa.storage.convert import convert
from pallas_kernels import Linear
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import BlockTiles8
from pallas_kernels.quantized import QuantizedBlocks, dequantized_blocks
from tests.support.checkpoints.quantized import fp8_block, in_blocks, plain_tensors, write

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MATRICES = tuple(f"layers.0.{name}" for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"))


def write_blocks(folder: Path, block: tuple[int, int] = (128, 128), **changes: Any) -> None:
    """Write a checkpoint of one dense layer with random numbers and a scale for each block [out, in]."""
    config, tensors = plain_tensors("llama_one_layer", **{**SIZES, **changes})
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    write(folder, {**config, "quantization_config": method}, in_blocks(tensors, block))


def load(folder: Path, mode: QuantizationMode, linear: Linear = "mosaic", dtype: jnp.dtype = FLOAT32) -> Params:
    """Load parameters."""
    return load_checkpoint(folder, dtype, quantization=mode, linear=linear)[1]


def blocks(params: Params) -> dict[str, QuantizedBlocks]:
    """Return the matrices that are held with scales of blocks."""
    names = [name.removesuffix(".block_scales") for name in params if name.endswith(".block_scales")]
    return {name: QuantizedBlocks(params[f"{name}.values"], params[f"{name}.block_scales"]) for name in names}


def laid_out(params: Params) -> Params:
    """Return the parameters as the backend reads them."""
    found = dict(params)
    lay_out(found, linear="mosaic", experts=False)
    return found


@pytest.mark.parametrize("mode", ["fp8", "auto"])
def test_the_numbers_are_those_of_the_checkpoint(mode: QuantizationMode, tmp_path: Path) -> None:
    """Bit for bit, in tiles too; K and V, of 64 outputs, end within a block of the checkpoint. XLA holds others."""
    write_blocks(tmp_path)
    whole, held = load(tmp_path, "none"), load(tmp_path, mode)
    found = laid_out(held)
    require_form(found, "mosaic")
    assert blocks(held).keys() == set(MATRICES)
    for name, weights in blocks(held).items():
        np.testing.assert_array_equal(dequantized_blocks(weights, FLOAT32), whole[name], err_msg=name)
        assert weights.values.dtype == np.uint8
        tiles = matrix_at(MatrixPlace(name, (0, 0)), found).tiles
        assert isinstance(tiles, BlockTiles8)
        np.testing.assert_array_equal(eight_bits.untiled(tiles).T, whole[name], err_msg=name)
        assert f"{name}.values" not in found
    assert weights_of_blocks(held, "attention.qkv") == (128, 64)
    assert weights_of_blocks(held, "mlp.gate_up") == (128, 128)
    model, _ = load_checkpoint(tmp_path, FLOAT32)
    assert isinstance(bind(model, found, sms=7).layers[0].attention.qkv.get_value(), DenseTiles)
    for linear in ("xla", "fp8", "cpu"):
        assert not blocks(load(tmp_path, mode, linear))


def weights_of_blocks(params: Params, name: str) -> tuple[int, int]:
    """Return inputs and outputs of a block of the layer."""
    values, scales = blocks(params)[f"layers.0.{name}"]
    return values.shape[0] // scales.shape[0], values.shape[1] // scales.shape[1]


def test_slices_of_a_fused_projection_are_put_in_order(tmp_path: Path) -> None:
    """Each of four slices has q, k and v of its heads, and blocks of its own, which do not end where k begins."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "head_dim": 192, "v_head_dim": 128}
    kinds = {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "swa_num_key_value_heads": 4}
    config, tensors = plain_tensors("mimo_v2_flash_base", **sizes, **kinds, **heads)
    prefix = "model.layers.0.self_attn"
    split = [np.split(tensors.pop(f"{prefix}.{name}_proj.weight"), 4) for name in "qkv"]
    fused = np.stack([np.concatenate(rank) for rank in zip(*split, strict=True)])
    codes, scales, _ = fp8_block(fused, (128, 128))
    tensors[f"{prefix}.qkv_proj.weight"] = codes.reshape(-1, 256)
    tensors[f"{prefix}.qkv_proj.weight_scale_inv"] = scales.reshape(-1, 2)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, {**config, "quantization_config": method}, tensors)
    whole, held = load(tmp_path, "none"), load(tmp_path, "auto")
    (name,) = blocks(held)
    np.testing.assert_array_equal(dequantized_blocks(blocks(held)[name], FLOAT32), whole[name])
    assert weights_of_blocks(held, "attention.qkv") == (128, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_checkpoint_keeps_the_blocks(dtype: str, tmp_path: Path) -> None:
    """Each backend gets the bits that it would of the checkpoint itself: those with scales of outputs are rounded."""
    write_blocks(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted", dtype, "fp8")
    kernels: tuple[Linear, ...] = ("xla", "mosaic", "fp8", "cpu")
    for linear in kernels:
        want = load(tmp_path / "source", "fp8", linear, jnp.dtype(dtype))
        for mode in ("auto", "fp8"):
            found = load(tmp_path / "converted", mode, linear, jnp.dtype(dtype))
            assert found.keys() == want.keys()
            for name, value in want.items():
                np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value), err_msg=name)
    with pytest.raises(ConfigError, match=r"is stored as fp8: must be auto or fp8"):
        load(tmp_path / "converted", "none")
    convert(tmp_path / "source", tmp_path / "wide", dtype, "auto")
    assert not blocks(load(tmp_path / "wide", "auto"))


@pytest.mark.parametrize(
    ("block", "limit"),
    [
        ((128, 64), r"has blocks of 64 inputs by 128 outputs and needs multiples of 128 by 64: must be xla"),
        ((32, 128), r"has blocks of 128 inputs by 32 outputs and needs multiples of 128 by 64: must be xla"),
    ],
)
def test_blocks_that_do_not_fit_tiles_are_an_error(block: tuple[int, int], limit: str, tmp_path: Path) -> None:
    """It names the option and the matrix."""
    write_blocks(tmp_path, block)
    with pytest.raises(ConfigError, match=rf"kernels = 'linear=mosaic': layers\.0\.\S+ {limit}"):
        laid_out(load(tmp_path, "fp8"))


def test_weights_count_as_they_are_held(tmp_path: Path) -> None:
    """8 bits for this backend, but for their scales; for others the engine's type if the mode is auto."""
    write_blocks(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    told = parse_config(raw), parse_quantization(raw), "auto", "bfloat16"
    for linear in ("mosaic", "xla"):
        held = load(tmp_path, "auto", linear, BFLOAT16)
        scales = sum(value.nbytes for name, value in held.items() if name.endswith("block_scales"))
        size = sum(value.nbytes for value in held.values()) - scales
        assert weight_bytes(*told, linear=linear) == size  # type: ignore[arg-type]


def test_new_weights_of_a_folder_are_held_so_and_arrays_are_refused(tmp_path: Path) -> None:
    """jswa rounds to a scale per output, and not to blocks."""
    write_blocks(tmp_path)
    model, params = load_checkpoint(tmp_path, BFLOAT16, quantization="fp8", linear="mosaic")
    params = laid_out(params)
    stager = WeightsStager(model, BFLOAT16, Placement(model), held_shapes(params), "fp8", "xla", "mosaic", False)
    staged = stager.stage(tmp_path)
    assert staged.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(np.asarray(staged[name]).view(np.uint8), np.asarray(value).view(np.uint8))
    arrays = {name: np.zeros(shape, np.float32) for name, shape in stager.checkpoint_shapes().items()}
    with pytest.raises(WeightsError, match="is held in e4m3 with scales of blocks, to which jswa does not round"):
        stager.stage(arrays)

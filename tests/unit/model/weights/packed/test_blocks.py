"""Experts in e4m3 with scales of blocks are held as the checkpoint has them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import CheckpointError, ConfigError, WeightsError
from jswa.model.binding import run_dtype
from jswa.model.transformer import Params
from jswa.model.weights.converted import MANIFEST, manifest_digest
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.placement import Placement
from jswa.running.staging import WeightsStager, held_shapes
from jswa.storage.convert import convert
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.api import Implementation
from pallas_kernels.quantized import Quantized, QuantizedBlocks, dequantized, dequantized_blocks
from tests.support.checkpoints.quantized import experts_in_blocks, plain_tensors, write
from tests.support.oracles import dense_logits

FLOAT32 = jnp.dtype("float32")
WHOLE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
}


def write_blocks(folder: Path, name: str, block: tuple[int, int], kind: str = "float32", **changes: Any) -> None:
    """Write a fixture's checkpoint with random numbers, whose experts have a scale for each block [out, in]."""
    config, tensors = plain_tensors(name, **changes)
    tensors = experts_in_blocks(tensors, block, kind)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    write(folder, {**config, "quantization_config": method}, tensors)


def load(folder: Path, mode: QuantizationMode, experts: Implementation = "xla", dtype: jnp.dtype = FLOAT32) -> Params:
    """Load parameters."""
    return load_checkpoint(folder, dtype, quantization=mode, experts=experts)[1]


def stacks(params: Params) -> Iterator[tuple[str, QuantizedBlocks]]:
    """Yield the experts with scales of blocks, as XLA has them."""
    for name in (name.removesuffix(".block_scales") for name in params if name.endswith(".block_scales")):
        yield name, QuantizedBlocks(params[f"{name}.values"], params[f"{name}.block_scales"])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "block", "blocks"),
    [
        ("mimo_v2_flash_base", (16, 16), {"gate_up": (16, 16), "down": (16, 16)}),
        ("mixtral_base", (24, 40), None),  # they divide no matrix
        ("step3p7_base", (32, 16), None),  # a stack for gates, and one for ups
        ("qwen3_moe_base", (1, 16), None),  # groups of inputs of each output
    ],
)
def test_the_numbers_are_those_of_the_checkpoint(
    name: str, block: tuple[int, int], blocks: dict[str, tuple[int, int]] | None, kind: str, tmp_path: Path
) -> None:
    """Bit for bit, gates and ups, in both types of an engine. Dense layers, and mode auto, are as they were."""
    write_blocks(tmp_path, name, block, kind)
    for dtype in (FLOAT32, jnp.dtype("bfloat16")):
        whole, held = load(tmp_path, "none", dtype=dtype), load(tmp_path, "fp8", dtype=dtype)
        assert run_dtype(held) == dtype
        found = dict(stacks(held))
        assert len(found) == 2 * sum(name.endswith(".mlp.router") for name in whole) > 0
        for matrix, weights in found.items():
            assert weights.values.dtype == np.uint8
            np.testing.assert_array_equal(dequantized_blocks(weights, dtype), whole[matrix], err_msg=matrix)
            if blocks is not None:
                sides, counts = weights.values.shape[1:], weights.scales.shape[1:]
                expected = blocks[matrix.rpartition(".")[2]]
                assert tuple(side // count for side, count in zip(sides, counts, strict=True)) == expected
        assert load(tmp_path, "auto", dtype=dtype).keys() == whole.keys()
        assert {name for name in held if name.endswith(".scales")}, "dense layers have a scale per output"


def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    """The decoder runs the stored form; a wrong scale is found."""
    write_blocks(tmp_path, "mimo_v2_flash_base", (16, 16))
    model, _ = load_checkpoint(tmp_path, FLOAT32)
    params = load(tmp_path, "fp8")
    whole = {name: value for name, value in params.items() if ".block_scales" not in name}
    for name, weights in stacks(params):
        whole.pop(f"{name}.values")
        whole[name] = dequantized_blocks(weights, FLOAT32)
    tokens = np.arange(3, 15, dtype=np.int32)
    found, expected = dense_logits(model, params, tokens), dense_logits(model, whole, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    name = next(name for name, _ in stacks(params))
    wrong = params | {f"{name}.block_scales": params[f"{name}.block_scales"] * 1.25}
    assert np.abs(dense_logits(model, wrong, tokens) - expected).max() > 1e-2


def test_hopper_gets_the_same_numbers_in_tiles(tmp_path: Path) -> None:
    """With mode fp8, and with mode auto for the kernel that reads no 16 bits. The default widens, as it is measured."""
    write_blocks(tmp_path / "source", "mimo_v2_flash_base", (128, 128), **WHOLE)
    held = load(tmp_path / "source", "fp8")
    for mode, experts in (("fp8", "mosaic"), ("fp8", "mosaic_overlap"), ("auto", "mosaic_overlap")):
        tiled = load(tmp_path / "source", mode, experts)  # type: ignore[arg-type]
        for name, weights in stacks(held):
            want = eight_bits.block_tiles(weights)
            assert f"{name}.values" not in tiled
            np.testing.assert_array_equal(tiled[f"{name}.tiles"], want.codes)
            np.testing.assert_array_equal(tiled[f"{name}.block_scales"], want.scales)
    assert load(tmp_path / "source", "auto", "mosaic").keys() == load(tmp_path / "source", "none").keys()
    with pytest.raises(ConfigError, match="quantization = 'fp8': experts in 8 bits need experts=xla or"):
        load(tmp_path / "source", "fp8", "triton")


def test_a_converted_checkpoint_keeps_the_blocks(tmp_path: Path) -> None:
    """`jswa convert --quantization fp8`; kernels get what they would of the checkpoint itself."""
    write_blocks(tmp_path / "source", "mimo_v2_flash_base", (128, 128), **WHOLE)
    convert(tmp_path / "source", tmp_path / "converted", "float32", "fp8")
    kernels: tuple[Implementation, ...] = ("xla", "mosaic", "mosaic_overlap")
    for experts in kernels:
        want = load(tmp_path / "source", "fp8", experts)
        for mode in ("auto", "fp8"):
            found = load(tmp_path / "converted", mode, experts)
            assert found.keys() == want.keys()
            for name, value in want.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)
    for mode in ("none", "int8"):
        with pytest.raises(ConfigError, match=r"is stored as fp8: must be auto or fp8"):
            load(tmp_path / "converted", mode)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kernels = 'experts=cpu': .* must be xla, or quantization must be fp8"):
        load(tmp_path / "converted", "auto", "cpu")


@pytest.mark.parametrize("counts", [[3, 2], [0, 1], [-1, 1], ["1", 1], [1]])
def test_a_converted_checkpoint_of_other_blocks_is_refused(counts: list[Any], tmp_path: Path) -> None:
    """Blocks divide a matrix."""
    write_blocks(tmp_path / "source", "mimo_v2_flash_base", (128, 128), **WHOLE)
    convert(tmp_path / "source", tmp_path / "converted", "float32", "fp8")
    name, _ = next(stacks(load(tmp_path / "source", "fp8")))

    manifest = json.loads((tmp_path / "converted" / MANIFEST).read_text())
    entry = manifest["parameters"][f"{name}.block_scales"]
    entry["shape"] = [entry["shape"][0], *counts]
    manifest["sha256"] = manifest_digest(manifest)
    (tmp_path / "converted" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"must list the parameters that config\.json asks for"):
        load(tmp_path / "converted", "auto")


def test_kernels_of_a_cpu_get_a_scale_per_output(tmp_path: Path) -> None:
    """They read no other: of a checkpoint and of a converted one the numbers are rounded a second time."""
    write_blocks(tmp_path / "source", "mimo_v2_flash_base", (16, 16))
    convert(tmp_path / "source", tmp_path / "converted", "float32", "fp8")
    whole = load(tmp_path / "source", "none")
    for folder in ("source", "converted"):
        found = load(tmp_path / folder, "fp8", "cpu")
        assert not list(stacks(found))
        for name, _ in stacks(load(tmp_path / "source", "fp8")):
            weights = Quantized(found[f"{name}.values"], found[f"{name}.scales"])
            error = np.abs(dequantized(weights, FLOAT32) - whole[name]).max()
            assert 0 < error < np.abs(whole[name]).max() / 16


@pytest.mark.parametrize(("block", "shown"), [((128, 64), "64 inputs by 128"), ((32, 128), "128 inputs by 32")])
def test_blocks_that_do_not_fit_tiles_are_an_error(block: tuple[int, int], shown: str, tmp_path: Path) -> None:
    """It names the option and the matrix; XLA runs them."""
    write_blocks(tmp_path, "mimo_v2_flash_base", block, **WHOLE)
    limit = rf"kernels = 'experts=mosaic': layers\..* blocks of {shown} outputs and needs multiples of 128 by 64"
    with pytest.raises(ConfigError, match=limit):
        load(tmp_path, "fp8", "mosaic")
    assert list(stacks(load(tmp_path, "fp8")))


def test_one_block_of_inputs_is_a_scale_per_output(tmp_path: Path) -> None:
    """Then the form is that of any scale per output, and modes and kernels treat it so."""
    write_blocks(tmp_path, "mimo_v2_flash_base", (16, 64))
    held, whole = load(tmp_path, "auto"), load(tmp_path, "none")
    assert not list(stacks(held))
    found = [name.removesuffix(".values") for name in held if name.endswith(".values")]
    assert found
    for name in found:
        weights = Quantized(held[f"{name}.values"], held[f"{name}.scales"])
        np.testing.assert_array_equal(dequantized(weights, FLOAT32), whole[name], err_msg=name)


def test_new_weights_of_a_folder_are_held_so_and_arrays_are_refused(tmp_path: Path) -> None:
    """jswa rounds to a scale per output, and not to blocks."""
    write_blocks(tmp_path, "mimo_v2_flash_base", (16, 16))
    model, params = load_checkpoint(tmp_path, FLOAT32, quantization="fp8")
    stager = WeightsStager(model, FLOAT32, Placement(model), held_shapes(params), "fp8", "xla", "xla", False)
    staged = stager.stage(tmp_path)
    assert staged.keys() == params.keys()
    arrays = {name: np.zeros(shape, np.float32) for name, shape in stager.checkpoint_shapes().items()}
    with pytest.raises(WeightsError, match="is held in e4m3 with scales of blocks, to which jswa does not round"):
        stager.stage(arrays)

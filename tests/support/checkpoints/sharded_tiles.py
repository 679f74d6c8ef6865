"""Linear layers in tiles on several devices: each device lays out, and multiplies, its own part of a matrix."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jswa.exec.mesh import make_mesh, mesh_of, specs_of
from jswa.forms.base.names import OUTPUTS_FIRST, fp8_names
from jswa.forms.layouts import lay_out
from jswa.forms.nvfp4 import ENDS
from jswa.model.collectives import AXIS
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.placement import Placement
from jswa.storage.convert import convert
from pallas_kernels import fp8
from pallas_kernels.experts import nvfp4
from pallas_kernels.experts.dense import DenseTiles, matmul
from pallas_kernels.experts.eight_bits import BlockTiles8, Tiles8
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.experts.nvfp4_tiles import Nvfp4Tiles
from pallas_kernels.int4 import Int4, dequantized
from pallas_kernels.quantized import Quantized, QuantizedBlocks, dequantized_blocks, quantize
from pallas_kernels.quantized import dequantized as dequantized_8_bits
from tests.support.checkpoints.quantized import in_blocks, plain_tensors, write
from tests.support.kernels.device import hopper

INPUTS, OUTPUTS, GROUPS = 256, 384, 8
BLOCKS = 2, 6  # of 128 inputs by 64 outputs, so that no device shares one with another
# Specs of N.codes and N.values [inputs, outputs]: a layer whose inputs are split, and one whose outputs are.
SPECS = {"layers.0.mlp.down": (AXIS, None), "layers.0.attention.qkv": (None, AXIS)}


def check_tiles() -> None:
    """Assert that both devices of two have the numbers of their part, and that their products are its products."""
    mesh, rng = make_mesh(2), np.random.default_rng(0)
    assert mesh is not None
    normal = rng.standard_normal((INPUTS, OUTPUTS)).astype(np.float32)
    scales, zeros = rng.uniform(0.01, 0.02, (GROUPS, OUTPUTS)), rng.integers(6, 11, (GROUPS, OUTPUTS))
    codes = jnp.asarray(rng.integers(0, 256, (INPUTS // 2, OUTPUTS), np.uint8))
    four = Int4(codes, jnp.asarray(scales, jnp.bfloat16), jnp.asarray(zeros, jnp.uint8))
    eight = quantize(jnp.asarray(normal), "int8")
    blocks = QuantizedBlocks(quantize(jnp.asarray(normal), "fp8").values, jnp.asarray(rng.uniform(0.5, 2, BLOCKS)))
    x = jnp.asarray(rng.standard_normal((5, INPUTS)), jnp.bfloat16)
    for name, sides in SPECS.items():
        spread = NamedSharding(mesh, PartitionSpec(*sides))  # type: ignore[no-untyped-call]
        by_outputs = NamedSharding(mesh, PartitionSpec(sides[1]))  # type: ignore[no-untyped-call]
        for weights in (four, eight, blocks, nvfp4.quantize(jnp.asarray(normal))):
            params: Params
            if isinstance(weights, Int4):
                whole = dequantized(weights, jnp.dtype(jnp.bfloat16)).astype(jnp.float32)
                fields = zip(("codes", "group_scales", "group_zeros"), weights[:3], strict=True)
                params = {f"{name}.{field}": jax.device_put(array, spread) for field, array in fields}
            elif isinstance(weights, QuantizedBlocks):
                whole = dequantized_blocks(weights, jnp.dtype(jnp.float32))
                fields = zip(("values", "block_scales"), weights, strict=True)
                params = {f"{name}.{field}": jax.device_put(array, spread) for field, array in fields}
            elif isinstance(weights, Nvfp4):
                whole = nvfp4.dequantized(weights, jnp.dtype(jnp.float32))
                shardings = zip(ENDS, weights, (spread, spread, by_outputs), strict=True)
                params = {f"{name}.{end}": jax.device_put(array, sharding) for end, array, sharding in shardings}
            else:
                whole = dequantized_8_bits(weights, jnp.dtype(jnp.float32))
                placed = jax.device_put(weights.values, spread), jax.device_put(weights.scales, by_outputs)
                params = dict(zip((f"{name}.values", f"{name}.scales"), placed, strict=True))
            lay_out(params, linear="mosaic", experts=False)
            check_parts(params, name, weights, np.asarray(whole), x, axis=sides.index(AXIS))


def check_parts(
    params: Params,
    name: str,
    weights: Int4 | Nvfp4 | Quantized | QuantizedBlocks,
    whole: np.ndarray,
    x: jax.Array,
    axis: int,
) -> None:
    """Assert the numbers and the products of a laid-out matrix, which is split along an axis."""
    forms: dict[type, tuple[Any, tuple[str, ...]]] = {
        Int4: (Int4Tiles, ("int4_tiles",)),
        Nvfp4: (Nvfp4Tiles, ("nvfp4_tiles", "nvfp4_output_scales")),
        Quantized: (Tiles8, ("tiles", "scales")),
        QuantizedBlocks: (BlockTiles8, ("tiles", "block_scales")),
    }
    form, fields = forms[type(weights)]
    arrays = [params.pop(f"{name}.{field}") for field in fields]
    assert not params
    parts = np.split(whole, 2, axis=axis)
    inputs = np.split(np.asarray(x.astype(jnp.float32)), 2, axis=1) if axis == 0 else [np.asarray(x, np.float32)] * 2
    for number, (part, own) in enumerate(zip(parts, inputs, strict=True)):
        shards = [sorted(array.addressable_shards, key=lambda one: one.device.id)[number].data for array in arrays]
        tiles = form(*shards)
        assert np.array_equal(np.asarray(tiles.numbers()), part), f"{name} on device {number}"
        with hopper():
            held = jax.device_put(DenseTiles(tiles), jax.devices()[0])
            found = np.asarray(matmul(jnp.asarray(own, jnp.bfloat16), held).astype(jnp.float32))
        assert np.abs(found - own @ part).max() < 2.0**-7 * np.abs(own @ part).max(), name
    wanted = (specs_of(arrays[0])[0] if len(specs_of(arrays[0])) else None) is not None
    assert wanted == (axis == 1), "outputs are the first axis of tiles"


def check_blocks(folder: Path) -> None:
    """Assert that devices have the numbers of their part of matrices with scales of blocks, also of a converted folder.

    Of four devices two share a KV head, and all cut blocks of the checkpoint.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    config, tensors = plain_tensors("llama_one_layer", **sizes, num_attention_heads=4, num_key_value_heads=2)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source, float32 = folder / "in blocks", jnp.dtype(jnp.float32)
    write(source, {**config, "quantization_config": method}, in_blocks(tensors, (128, 128)))
    convert(source, folder / "converted blocks", "float32", "fp8")
    for devices in (2, 4):
        mesh = make_mesh(devices)
        model, whole = load_checkpoint(source, float32, mesh=mesh)
        for where in (source, folder / "converted blocks"):
            found = load_checkpoint(where, float32, quantization="fp8", linear="mosaic", mesh=mesh)[1]
            names = [name.removesuffix(".values") for name in found if f"{name[:-7]}.block_scales" in found]
            assert len(names) == 4
            for name in names:
                fields = f"{name}.values", f"{name}.block_scales"
                parts = zip(*(Placement(model, mesh).shards(found[field]) for field in fields), strict=True)
                for part, own in zip(parts, Placement(model, mesh).shards(whole[name]), strict=True):
                    assert np.array_equal(dequantized_blocks(QuantizedBlocks(*part), float32), own), name
            if devices == 2:
                lay_out(found, linear="mosaic", experts=False)
                assert all(f"{name}.tiles" in found for name in names)


def check_fp8(shared: Params) -> None:
    """Assert that each device turns its part of a matrix in float8, and multiplies it by its own rounded inputs."""
    laid = {
        f"{name}.{field}": shared[f"{name}.{field}"] for name in fp8_names(shared) for field in ("values", "scales")
    }
    laid = {name: value for name, value in laid.items() if name.startswith("layers.0.")}
    names = fp8_names(laid)
    lay_out(laid, linear="fp8", experts=False)
    for name in names:
        rows, scales = laid[f"{name}{OUTPUTS_FIRST}"], laid[f"{name}.scales"]
        parts = [np.asarray(part.data) for part in rows.addressable_shards]
        for part, stored in zip(parts, shared[f"{name}.values"].addressable_shards, strict=True):
            assert np.array_equal(part, np.asarray(stored.data).T), name
        mesh, specs = mesh_of(rows), (specs_of(rows), specs_of(scales))
        assert mesh is not None
        by_inputs = len(specs[0]) > 1 and specs[0][1] is not None
        spec = PartitionSpec(None, specs[0][1]) if by_inputs else PartitionSpec()  # type: ignore[no-untyped-call]
        x = jax.device_put(np.random.default_rng(0).standard_normal((5, rows.shape[1]), np.float32))
        run = jax.shard_map(
            lambda x, rows, scales: fp8.matmul(x, fp8.Fp8Rows(rows, scales))[None],
            mesh=mesh,
            in_specs=(spec, *specs),
            out_specs=PartitionSpec(*mesh.axis_names),  # type: ignore[no-untyped-call]
            check_vma=False,
        )
        found = np.asarray(jax.jit(run)(x, rows, scales))
        own = np.split(np.asarray(x), mesh.size, axis=1) if by_inputs else [np.asarray(x)] * mesh.size
        for device, (part, scale) in enumerate(zip(parts, scales.addressable_shards, strict=True)):
            expected = fp8.matmul(jnp.asarray(own[device]), fp8.Fp8Rows(jnp.asarray(part), jnp.asarray(scale.data)))
            np.testing.assert_allclose(found[device], expected, rtol=1e-5, atol=1e-5)

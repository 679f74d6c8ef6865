"""Linear layers in tiles on several devices: each device lays out, and multiplies, its own part of a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jswa.exec.mesh import make_mesh, specs_of
from jswa.model.collectives import AXIS
from jswa.model.panels import lay_out
from jswa.model.transformer import Params
from pallas_kernels.experts import eight_bits, int4_tiles
from pallas_kernels.experts.dense import DenseTiles, matmul
from pallas_kernels.experts.eight_bits import Tiles8
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.int4 import Int4, dequantized
from pallas_kernels.quantized import Quantized, quantize
from pallas_kernels.quantized import dequantized as dequantized_8_bits
from tests.support.kernels.device import hopper

INPUTS, OUTPUTS, GROUPS = 256, 384, 8
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
    x = jnp.asarray(rng.standard_normal((5, INPUTS)), jnp.bfloat16)
    for name, sides in SPECS.items():
        spread = NamedSharding(mesh, PartitionSpec(*sides))  # type: ignore[no-untyped-call]
        by_outputs = NamedSharding(mesh, PartitionSpec(sides[1]))  # type: ignore[no-untyped-call]
        for weights in (four, eight):
            params: Params
            if isinstance(weights, Int4):
                whole = dequantized(weights, jnp.dtype(jnp.bfloat16)).astype(jnp.float32)
                fields = zip(("codes", "group_scales", "group_zeros"), weights[:3], strict=True)
                params = {f"{name}.{field}": jax.device_put(array, spread) for field, array in fields}
            else:
                whole = dequantized_8_bits(weights, jnp.dtype(jnp.float32))
                placed = jax.device_put(weights.values, spread), jax.device_put(weights.scales, by_outputs)
                params = dict(zip((f"{name}.values", f"{name}.scales"), placed, strict=True))
            lay_out(params, linear="mosaic", experts=False)
            check_parts(params, name, weights, np.asarray(whole), x, axis=sides.index(AXIS))


def check_parts(
    params: Params, name: str, weights: Int4 | Quantized, whole: np.ndarray, x: jax.Array, axis: int
) -> None:
    """Assert the numbers and the products of a laid-out matrix, which is split along an axis."""
    of_4_bits = isinstance(weights, Int4)
    fields = ("int4_tiles",) if of_4_bits else ("tiles", "scales")
    arrays = [params.pop(f"{name}.{field}") for field in fields]
    assert not params
    parts = np.split(whole, 2, axis=axis)
    inputs = np.split(np.asarray(x.astype(jnp.float32)), 2, axis=1) if axis == 0 else [np.asarray(x, np.float32)] * 2
    for number, (part, own) in enumerate(zip(parts, inputs, strict=True)):
        shards = [sorted(array.addressable_shards, key=lambda one: one.device.id)[number].data for array in arrays]
        tiles = Int4Tiles(*shards) if of_4_bits else Tiles8(*shards)
        untiled = int4_tiles.untiled(tiles) if isinstance(tiles, Int4Tiles) else eight_bits.untiled(tiles)
        assert np.array_equal(np.asarray(untiled).T, part), f"{name} on device {number}"
        with hopper():
            held = jax.device_put(DenseTiles(tiles), jax.devices()[0])
            found = np.asarray(matmul(jnp.asarray(own, jnp.bfloat16), held).astype(jnp.float32))
        assert np.abs(found - own @ part).max() < 2.0**-7 * np.abs(own @ part).max(), name
    wanted = (specs_of(arrays[0])[0] if len(specs_of(arrays[0])) else None) is not None
    assert wanted == (axis == 1), "outputs are the first axis of tiles"

"""Shapes of a model's weights as an engine on Hopper holds them: in 16, 8 or 4 bits, in tiles, beside adapters."""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jswa.architecture import ModelConfig
from jswa.forms.base.names import BLOCK_SCALES, CODES, LINEAR, OUTPUTS_FIRST, SCALES, TILES, ZEROS, fp8_names
from jswa.forms.mxfp4 import MXFP4_JOINED, MXFP4_TILES
from jswa.forms.nvfp4 import ENDS, FACTORS
from jswa.forms.nvfp4 import TILES as NVFP4_TILES
from jswa.model.binding import param_shapes
from jswa.model.lora import adapter_params
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode, reformat
from jswa.model.weights.placement import Placement
from pallas_kernels import Linear
from pallas_kernels.experts import eight_bits, int4_tiles, nvfp4, nvfp4_tiles
from pallas_kernels.experts.api import Implementation as Experts
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Quantized, QuantizedBlocks

BFLOAT16 = jnp.dtype("bfloat16")
GROUP = 128  # inputs that share a scale in 4 bits
# As `QuantizationMode`; int4: packed integers of 4 bits, groups of `GROUP` inputs; nvfp4: as it is stored; fp8_blocks:
# e4m3, scales of blocks.
Held = QuantizationMode | Literal["int4", "nvfp4", "fp8_blocks"]


def held_shapes(
    model: ModelConfig, quantization: Held, linear: Linear, experts: Experts = "mosaic"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of a model's parameters as the engine holds them for these kernels."""
    if quantization == "mxfp4":
        return param_shapes(model, BFLOAT16, MXFP4_JOINED if experts == "mosaic_overlap" else MXFP4_TILES)
    held: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(
        lambda params: _held(model, params, quantization, linear), param_shapes(model, BFLOAT16)
    )
    return _outputs_first(held) if linear == "fp8" else held


def _held(model: ModelConfig, params: Params, mode: Held, linear: Linear) -> Params:
    """Return the parameters as the engine holds them with that quantization."""
    held: Params = {}
    for name, value in params.items():
        if mode == "int4":
            held |= _in_4_bits(name, value, linear) if LINEAR.search(name) else {name: value}
        elif mode == "nvfp4":
            held |= _in_nvfp4(name, value, linear) if LINEAR.search(name) else {name: value}
        elif mode == "fp8_blocks" and LINEAR.search(name) and (value.ndim == 3 or linear == "mosaic"):
            held |= _in_blocks(name, value)
        else:
            rounded: QuantizationMode = "fp8" if mode == "fp8_blocks" else mode
            own = reformat(name, {name: value}, Placement(model), rounded, "mosaic")
            held |= _in_8_bit_tiles(name, own) if linear == "mosaic" and value.ndim == 2 else own
    return held


def _in_8_bit_tiles(name: str, own: Params) -> Params:
    """Return a linear layer's matrix of 8 bits as `lay_out` would lay it out; others as they are."""
    if not LINEAR.search(name) or f"{name}.values" not in own:
        return own
    tiles = eight_bits.tiles(Quantized(own[f"{name}.values"], own[f"{name}.scales"]))
    return {f"{name}.{TILES}": tiles.codes, f"{name}.scales": tiles.scales}


def _in_4_bits(name: str, matrix: jax.Array, linear: Linear) -> Params:
    """Return a matrix of zeros in packed integers of 4 bits; a stack of experts in tiles, and for Mosaic any matrix."""
    *lead, inputs, outputs = matrix.shape
    codes = jnp.zeros((*lead, inputs // 2, outputs), jnp.uint8)
    scales = jnp.zeros((*lead, inputs // GROUP, outputs), BFLOAT16)
    zeros = scales.astype(jnp.uint8)
    if lead or linear == "mosaic":
        return {f"{name}.int4_tiles": int4_tiles.tiles(Int4(codes, scales, zeros)).tiles}
    return {f"{name}.{CODES}": codes, f"{name}.{SCALES}": scales, f"{name}.{ZEROS}": zeros}


def _in_nvfp4(name: str, matrix: jax.Array, linear: Linear) -> Params:
    """Return a matrix of zeros in NVFP4; a stack of experts in tiles, and for Mosaic any matrix."""
    *lead, inputs, outputs = matrix.shape
    codes = jnp.zeros((*lead, inputs // 2, outputs), jnp.uint8)
    scales = jnp.zeros((*lead, inputs // nvfp4.GROUP, outputs), jnp.uint8)
    held = Nvfp4(codes, scales, jnp.ones((*lead, outputs), jnp.float32))
    if lead or linear == "mosaic":
        tiled = nvfp4_tiles.tiles(held)
        return {f"{name}.{NVFP4_TILES}": tiled.tiles, f"{name}.{FACTORS}": tiled.factors}
    return {f"{name}.{end}": array for end, array in zip(ENDS, held, strict=True)}


def _in_blocks(name: str, matrix: jax.Array) -> Params:
    """Return a matrix of zeros in e4m3 and tiles: with scales of blocks, but attention's output."""
    *lead, inputs, outputs = matrix.shape
    values = jnp.zeros(matrix.shape, jnp.uint8)
    if name.endswith("attention.out"):
        codes, scales = eight_bits.tiles(Quantized(values, jnp.ones((*lead, outputs))))
        return {f"{name}.tiles": codes, f"{name}.scales": scales}
    blocks = jnp.ones((*lead, inputs // eight_bits.DEEP, outputs // eight_bits.TILE))
    codes, scales = eight_bits.block_tiles(QuantizedBlocks(values, blocks))
    return {f"{name}.tiles": codes, f"{name}.{BLOCK_SCALES}": scales}


def _outputs_first(held: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes with the linear layers' matrices in float8 as `lay_out` would lay them out."""
    found = dict(held)
    for name in fp8_names(held):
        matrix = found.pop(f"{name}.values")
        found[f"{name}{OUTPUTS_FIRST}"] = jax.ShapeDtypeStruct(matrix.shape[::-1], matrix.dtype)  # type: ignore[no-untyped-call]
    return found


def adapter_shapes(shapes: Mapping[str, jax.ShapeDtypeStruct], rank: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of LoRA adapters for all linear layers; `rank` is the sum of the adapters' ranks."""
    found: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(lambda params: _adapters(params, rank), dict(shapes))
    return found


def _adapters(shapes: Params, rank: int) -> Params:
    found: Params = {}
    for name, shape in shapes.items():
        if rank and LINEAR.search(name) and shape.ndim == 2:
            inputs, outputs = shape.shape
            a, b = jnp.zeros((inputs, rank), BFLOAT16), jnp.zeros((rank, outputs), BFLOAT16)
            found |= adapter_params(name, a, b, jnp.zeros(rank, jnp.int32))
    return found

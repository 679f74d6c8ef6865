"""How the engine holds its matrices: in the run's type, in 8 bits with a scale per output, or in 4 bits (experts).

A matrix N of 8 bits is two parameters, N.values and N.scales (`Quantized`; "embed" is `QuantizedRows`); one of 4 bits
is N.blocks and N.scales (`Mxfp4`), or N.words and N.scales where Hopper's kernel runs (`Mxfp4Tiles`).
"""

import re
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jswa.errors import CheckpointError, ConfigError
from jswa.model.hf.assemble import Read, assemble
from jswa.model.hf.tensor_map import Part, Source
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Packed, Scaled, Weight, read_scales
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.quantize import OUTPUTS_ARE_ROWS, load_rounded, of_outputs
from jswa.model.weights.safetensors_files import Reader
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import BLOCK, TILE, Mxfp4, Mxfp4Tiles, tiles, tiles_hold
from pallas_kernels.quantized import Kind, magnitudes, quantize, quantize_rows

Mode = Literal["none", "auto", "int8", "fp8"]
LINEAR = re.compile(r"\.(attention\.(qkv|out|gate)|gate_up|down)$")
_ENDS = ("embed", "lm_head")
_KINDS: dict[str, Kind] = {"I8": "int8", "F8_E4M3": "fp8"}
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def choose(
    table: Mapping[str, Source], weights: Mapping[str, Weight], shapes: Shapes, mode: Mode, experts: Implementation
) -> dict[str, Kind | Literal["mxfp4"]]:
    """The matrices that are not held in the run's type, and how they are.

    "auto" holds what a checkpoint has in 8 bits with a scale per row, or a single one, and experts in MXFP4 as they
    are; "int8" and "fp8" round linear layers, embedding and head, and keep experts in MXFP4; "none" holds nothing so.
    Hopper's kernel runs experts of 4 bits, not of 8: those are an error where they were asked for.
    """
    if mode == "none":
        return {}
    found: dict[str, Kind | Literal["mxfp4"]] = {}
    linear = [name for name in table if LINEAR.search(name)]
    if mode != "auto":
        found |= {name: mode for name in _ENDS if name in table}
    stacks = [name for name in linear if len(shapes[name].shape) == 3]
    packed = bool(stacks) and all(isinstance(weights[x.key], Packed) for name in stacks for x in table[name].parts)
    for name in linear:
        stored = _stored_kind(table[name], weights)
        if packed and name in stacks:
            found[name] = "mxfp4"
        elif mode != "auto":
            _require_runnable(mode, len(shapes[name].shape), experts)
            found[name] = mode
        elif stored is not None and not (name in stacks and experts == "mosaic"):
            found[name] = stored
    return found


def adopt(name: str, found: Params, where: Placement, mode: Mode, experts: Implementation) -> Params:
    """A matrix as the engine asks for it, from what it was in an earlier run. Raises ConfigError where it cannot be.

    `where`: it is placed already.
    """
    if name in found:
        if mode not in ("int8", "fp8") or not (LINEAR.search(name) or name in _ENDS):
            return found
        _require_runnable(mode, found[name].ndim, experts)
        return _eight(name, found[name], mode, where)
    if f"{name}.blocks" in found:
        held = Mxfp4(found[f"{name}.blocks"], found[f"{name}.scales"])
        kind = "mxfp4"
    else:
        values = found[f"{name}.values"]
        kind = "int8" if values.dtype == np.int8 else "fp8"
        _require_runnable(mode, values.ndim, experts)
    if mode == "none" or (mode != "auto" and kind not in (mode, "mxfp4")):
        raise ConfigError("quantization", mode, f"{name} is stored as {kind}: must be auto or {kind}")
    return _packed(name, held, experts, where) if kind == "mxfp4" else found


def _require_runnable(mode: Mode, axes: int, experts: Implementation) -> None:
    """Raise ConfigError for experts in 8 bits where Hopper's kernel is to run them."""
    if axes == 3 and experts == "mosaic":
        raise ConfigError("quantization", mode, "experts in 8 bits run on moe_backend = xla alone")


def load_held(
    name: str, kind: Kind | Literal["mxfp4"], source: Source, reader: Reader, weights: Mapping[str, Weight],
    shape: jax.ShapeDtypeStruct, read: Read, experts: Implementation, where: Placement,
) -> Params:  # fmt: skip
    """One matrix, as the parameters that it is."""
    if kind == "mxfp4":
        return _load_mxfp4(name, source, reader, weights, shape, experts, where)
    if _stored_kind(source, weights) == kind:
        return _load_codes(name, kind, source, reader, weights, shape, where)
    rounded = load_rounded(kind, source, shape, read)
    return {part: where.put(part, array) for part, array in zip(_names(name), rounded, strict=True)}


def _names(name: str) -> tuple[str, str]:
    """Of the parameters that a matrix of 8 bits is."""
    return f"{name}.values", f"{name}.scales"


def _eight(name: str, weights: jax.Array, kind: Kind, where: Placement) -> Params:
    """Rounded to 8 bits where it is, by scales of whole outputs."""
    parts, (values, scales) = where.parts(weights), _names(name)
    if name == "embed":
        done = [_quantize_rows(part, kind=kind) for part in parts]
    elif where.is_cut(name, weights) and not where.is_cut(scales, weights):
        # Each device has some of every output's inputs.
        if where.mesh is not None and where.mesh.is_multi_process:
            raise ConfigError("quantization", kind, "on several hosts weights are rounded as they are read: convert so")
        most = np.max([np.asarray(_magnitudes(part)) for part in parts], axis=0)
        done = [_quantize(part, kind=kind, largest=jax.device_put(most, part.sharding)) for part in parts]
    else:
        done = [_quantize(part, kind=kind) for part in parts]
    return {
        values: where.join(values, [one.values for one in done]),
        scales: where.join(scales, [one.scales for one in done]),
    }


def _stored_kind(source: Source, weights: Mapping[str, Weight]) -> Kind | None:
    """The kind that a matrix has on disk already, with one scale per output."""
    kinds = set()
    for part in source.parts:
        weight = weights[part.key]
        if not isinstance(weight, Scaled) or weight.zero is not None or weight.block[1] < part.shape[-1]:
            return None
        kinds.add(_KINDS[weight.values.dtype])
    return kinds.pop() if len(kinds) == 1 and source.how in OUTPUTS_ARE_ROWS else None


def _load_codes(
    name: str, kind: Kind, source: Source, reader: Reader, weights: Mapping[str, Weight], shape: jax.ShapeDtypeStruct,
    where: Placement,
) -> Params:  # fmt: skip
    """The bytes as they are, and the scales in the order of the outputs."""

    def codes(part: Part, begin: int, end: int) -> np.ndarray:
        return reader.rows(_scaled(part).values, begin, end).view(values.dtype)

    def factors(part: Part, begin: int, end: int) -> np.ndarray:
        return read_scales(_scaled(part), reader, begin, end)

    def _scaled(part: Part) -> Scaled:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        return weight

    values = empty(shape.shape, np.dtype(np.int8 if kind == "int8" else np.uint8))
    assemble(source, values, codes)
    scales = empty((*shape.shape[:-2], 1, shape.shape[-1]), np.dtype(np.float32))
    assemble(of_outputs(source), scales, factors)
    return {part: where.put(part, array) for part, array in zip(_names(name), (values, scales[..., 0, :]), strict=True)}


def _load_mxfp4(
    name: str, source: Source, reader: Reader, weights: Mapping[str, Weight], shape: jax.ShapeDtypeStruct,
    experts: Implementation, where: Placement,
) -> Params:  # fmt: skip
    """Bytes and exponents [E, C, ...], gates before ups; in tiles for Hopper's kernel."""
    count, inputs, outputs = shape.shape

    def filled(columns: int, of: str) -> np.ndarray:
        out = empty((count, outputs, columns), np.dtype(np.uint8))

        def read(part: Part, begin: int, end: int) -> np.ndarray:
            weight = weights[part.key]
            assert isinstance(weight, Packed)
            return reader.rows(getattr(weight, of), begin, end, columns=columns)

        assemble(source, np.swapaxes(out, 1, 2), read)
        return out

    blocks, scales = filled(inputs // 2, "values"), filled(inputs // BLOCK, "scale")
    held = Mxfp4(where.put(f"{name}.blocks", blocks), where.put(f"{name}.scales", scales))
    return _packed(name, held, experts, where)


def _packed(name: str, held: Mxfp4, experts: Implementation, where: Placement) -> Params:
    """Weights of 4 bits as the kernel takes them. Raises CheckpointError where Hopper's cannot."""
    if experts != "mosaic":
        return {f"{name}.blocks": held.blocks, f"{name}.scales": held.scales}
    parts = map(Mxfp4, where.parts(held.blocks), where.parts(held.scales))
    made = [_tiled(name, part) for part in parts]
    names = f"{name}.words", f"{name}.scales"
    return {one: where.join(one, list(fields)) for one, fields in zip(names, zip(*made, strict=True), strict=True)}


def _tiled(name: str, held: Mxfp4) -> Mxfp4Tiles:
    """What one device has of them."""
    _, outputs, half = held.blocks.shape
    held = _without_idle_scales(held)
    if 2 * half % TILE or outputs % TILE or not bool(_tiles_hold(held.scales)):
        raise CheckpointError(
            f"{name} [{outputs}, {2 * half}] in MXFP4 does not fit Hopper's kernel, which takes multiples of {TILE} "
            "and scales from 2^-93 to 2^33: choose quantization = none or moe_backend = xla"
        )
    made: Mxfp4Tiles = _tiles(held)
    return made


@jax.jit
def _without_idle_scales(held: Mxfp4) -> Mxfp4:
    """The same numbers, where 32 zeros have the scale 1: theirs may be one that the kernel's tiles cannot hold."""
    codes = held.blocks.reshape(*held.scales.shape, BLOCK // 2) & 0x77
    return held._replace(scales=jnp.where((codes == 0).all(axis=-1), jnp.uint8(127), held.scales))


_quantize, _quantize_rows = (jax.jit(function, static_argnames="kind") for function in (quantize, quantize_rows))
_magnitudes = jax.jit(magnitudes)
_tiles, _tiles_hold = jax.jit(tiles), jax.jit(tiles_hold)

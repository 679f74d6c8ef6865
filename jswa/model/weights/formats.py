"""Storage formats of matrices in device memory: the engine's dtype, 8 bits, 4 bits, or MXFP4 (experts).

A matrix N in 8 bits is two parameters, N.values and N.scales (`Quantized`; "embed" is `QuantizedRows`), or for the
Hopper kernels N.tiles and N.scales (`Tiles8`); with scales of blocks see `packed.blocks`. An MXFP4 matrix is N.blocks
and N.scales (`Mxfp4`), or for those kernels N.words and N.scales (`Mxfp4Tiles`) or N.joined (`Mxfp4Joined`). Integers
of 4 bits: see `packed.int4`; for those kernels they are N.int4_tiles (`Int4Tiles`).
"""

import logging
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jswa.errors import CheckpointError, ConfigError
from jswa.forms.base.names import BLOCK_SCALES, CODES, ENDS, GROUP_OF, LINEAR, SCALES, ZEROS, Linear
from jswa.forms.tiles import eight_bits_limit, int4_limit
from jswa.model.hf.assemble import Read, assemble
from jswa.model.hf.tensor_map import Part, Source
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Packed, Scaled, Weight, read_scales
from jswa.model.weights.packed.blocks import Blocks, blocks_for_kernel, blocks_of, load_blocks, stored_values
from jswa.model.weights.packed.int4 import Groups, groups_of, is_4_bit, load_int4
from jswa.model.weights.placement import Placement, empty, expert_by_expert
from jswa.model.weights.quantize import OUTPUTS_ARE_ROWS, load_quantized, of_outputs
from jswa.model.weights.safetensors_files import Reader
from pallas_kernels.experts import eight_bits, int4_tiles
from pallas_kernels.experts.api import HOPPER, Implementation
from pallas_kernels.experts.eight_bits import Tiles8
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.mxfp4 import BLOCK, TILE, Mxfp4, Mxfp4Joined, Mxfp4Tiles, joined, tiles, tiles_hold
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Kind, Quantized, magnitudes, quantize, quantize_rows

QuantizationMode = Literal["none", "auto", "int8", "fp8", "mxfp4"]
_KINDS: dict[str, Kind] = {"I8": "int8", "F8_E4M3": "fp8"}
Shapes = Mapping[str, jax.ShapeDtypeStruct]
Format = Kind | Literal["mxfp4"] | Groups | Blocks  # Groups: integers of 4 bits
_log = logging.getLogger("jswa")


def choose_formats(
    table: Mapping[str, Source],
    weights: Mapping[str, Weight],
    shapes: Shapes,
    mode: QuantizationMode,
    experts: Implementation,
    reader: Reader,
    linear: Linear = "xla",
) -> dict[str, Format]:
    """Return the storage format of each matrix that is not stored in the engine's dtype.

    Mode "auto" leaves three kinds of matrices as the checkpoint has them: 8 bits with one scale or a scale per row,
    packed integers of 4 bits, and MXFP4 experts. "int8" and "fp8" quantize linear layers, embedding and head, and leave
    MXFP4 experts as they are. "none" stores everything in the engine's dtype. "mxfp4" is "auto" for checkpoints that
    have their experts in MXFP4. Experts for kernels that are the default of a device ("mosaic") or read no other
    form ("triton") are held in the engine's dtype unless they are in MXFP4 or the mode names 8 bits: no GPU has
    measured the others yet. Experts in e4m3 with scales of blocks stay so in mode "fp8", but for the kernels of a CPU,
    and in mode "auto" for the kernel that reads no 16 bits ("mosaic_overlap"). So do linear layers in both modes if
    "mosaic" runs them (`linear`). Raises ConfigError for other checkpoints in mode "mxfp4", and for experts in 8 bits
    if Triton's kernel runs them.
    """
    if mode == "none":
        return {}
    found: dict[str, Format] = {}
    matrices = [name for name in table if LINEAR.search(name)]
    if mode in ("int8", "fp8"):
        found |= {name: mode for name in ENDS if name in table}
    stacks = [name for name in matrices if len(shapes[name].shape) == 3]
    packed = bool(stacks) and all(isinstance(weights[x.key], Packed) for name in stacks for x in table[name].parts)
    for name in stacks:
        _require_mxfp4(name, mode, stored=packed)
    for name in matrices:
        if packed and name in stacks:
            found[name] = "mxfp4"
        elif mode in ("int8", "fp8"):
            _require_runnable(mode, len(shapes[name].shape), experts)
            kept = mode == "fp8" and (experts != "cpu" if name in stacks else linear == "mosaic")
            found[name] = (blocks_of(table[name], weights) if kept else None) or mode
        elif name not in stacks or experts not in ("mosaic", "triton"):
            kept = experts == "mosaic_overlap" if name in stacks else linear == "mosaic"
            blocks = blocks_of(table[name], weights) if kept else None
            stored = blocks or _stored_format(name, table[name], weights, reader)
            found |= {} if stored is None else {name: stored}
    return found


def reformat(name: str, found: Params, placement: Placement, mode: QuantizationMode, experts: Implementation) -> Params:
    """Return a matrix in the storage format that the engine asks for.

    Raises ConfigError if its current format does not allow that.

    Args:
        found: the matrix as one or two parameters that are on the devices already.
    """
    if name in found:
        _require_mxfp4(name, mode, stored=not (LINEAR.search(name) and found[name].ndim == 3))
        if mode not in ("int8", "fp8") or not (LINEAR.search(name) or name in ENDS):
            return found
        _require_runnable(mode, found[name].ndim, experts)
        return _for_kernel(name, _quantize_on_devices(name, found[name], mode, placement), experts, placement)
    if f"{name}.{CODES}" in found:
        _require_stored_so(name, mode, found[f"{name}.{CODES}"].ndim, experts)
        return _int4_for_kernel(name, found, experts, placement)
    if f"{name}.blocks" in found:
        blocks = Mxfp4(found[f"{name}.blocks"], found[f"{name}.scales"])
        kind = "mxfp4"
    else:
        values = found[f"{name}.values"]
        kind = "int8" if values.dtype == np.int8 else "fp8"
    in_blocks = f"{name}.{BLOCK_SCALES}" in found
    if mode == "none" or (mode != "auto" and kind not in (mode, "mxfp4")):
        raise ConfigError("quantization", mode, f"{name} is stored as {kind}: must be auto or {kind}")
    if kind == "mxfp4":
        return _mxfp4_params(name, blocks, experts, placement)
    _require_runnable(mode, values.ndim, experts)
    if in_blocks and values.ndim == 2:
        return found
    if in_blocks and mode == "auto" and experts == "cpu":
        limit = f"{name} has a scale per block, which it cannot read: must be xla, or quantization must be fp8"
        raise ConfigError("moe_backend", experts, limit)
    return (blocks_for_kernel if in_blocks else _for_kernel)(name, found, experts, placement)


def _require_stored_so(name: str, mode: QuantizationMode, axes: int, experts: Implementation) -> None:
    """Raise ConfigError if a matrix of 4 bits should be held in another form, or its kernel cannot read it."""
    if mode not in ("auto", "mxfp4"):
        raise ConfigError("quantization", mode, f"{name} is stored in 4 bits: must be auto")
    if axes == 3 and experts in ("mosaic", "triton"):
        raise ConfigError("moe_backend", experts, f"{name} is stored in 4-bit integers: must be xla or mosaic_overlap")


def _require_mxfp4(name: str, mode: QuantizationMode, *, stored: bool) -> None:
    """Raise ConfigError if experts should be in MXFP4 and the checkpoint does not store them so."""
    if mode == "mxfp4" and not stored:
        limit = f"{name} is not stored in MXFP4, and jswa does not round to it: must be auto, none, int8 or fp8"
        raise ConfigError("quantization", mode, limit)


def _require_runnable(mode: QuantizationMode, axes: int, experts: Implementation) -> None:
    """Raise ConfigError for experts in 8 bits if Triton's kernel is to run them."""
    if axes == 3 and experts == "triton":
        raise ConfigError("quantization", mode, "experts in 8 bits need moe_backend = xla or mosaic")


def load_matrix(
    name: str, kind: Format, source: Source, reader: Reader, weights: Mapping[str, Weight],
    shape: jax.ShapeDtypeStruct, read: Read, experts: Implementation, placement: Placement,
) -> Params:  # fmt: skip
    """Read one matrix from a checkpoint in the given storage format, and return its parameters."""
    if isinstance(kind, Groups):
        int4 = load_int4(name, kind, source, reader, weights, shape, placement)
        return _int4_for_kernel(name, int4, experts, placement)
    if isinstance(kind, Blocks):
        found = load_blocks(name, kind, source, reader, weights, shape, placement)
        return blocks_for_kernel(name, found, experts, placement)
    if kind == "mxfp4":
        return _load_mxfp4(name, source, reader, weights, shape, experts, placement)
    if _stored_kind(source, weights) == kind:
        found = _load_codes(name, kind, source, reader, weights, shape, placement)
    else:
        arrays = load_quantized(kind, source, shape, read)
        found = {field: placement.put(field, array) for field, array in zip(_names(name), arrays, strict=True)}
    return _for_kernel(name, found, experts, placement)


def _names(name: str) -> tuple[str, str]:
    """Return the names of the two parameters of a matrix in 8 bits."""
    return f"{name}.values", f"{name}.scales"


def _quantize_on_devices(name: str, weights: jax.Array, kind: Kind, placement: Placement) -> Params:
    """Quantize a matrix to 8 bits on its devices, with one scale per output of the whole matrix."""
    shards, (values, scales) = placement.shards(weights), _names(name)
    if name == "embed":
        quantized = [_quantize_rows(shard, kind=kind) for shard in shards]
    elif placement.input_shards(name, weights.shape) > 1:
        # So an output's scale needs the magnitudes of all devices.
        if placement.mesh is not None and placement.mesh.is_multi_process:
            limit = "weights that are loaded already cannot be quantized on several hosts: convert the checkpoint so"
            raise ConfigError("quantization", kind, limit)
        most = np.max([np.asarray(_magnitudes(shard)) for shard in shards], axis=0)
        quantized = [_quantize(shard, kind=kind, largest=jax.device_put(most, shard.sharding)) for shard in shards]
    else:
        quantized = [_quantize(shard, kind=kind) for shard in shards]
    return {
        values: placement.from_shards(values, [one.values for one in quantized]),
        scales: placement.from_shards(scales, [one.scales for one in quantized]),
    }


def _stored_kind(source: Source, weights: Mapping[str, Weight]) -> Kind | None:
    """Return the 8-bit type of a matrix that the checkpoint stores with one scale per output, else None."""
    kinds = set()
    for part in source.parts:
        weight = weights[part.key]
        if not isinstance(weight, Scaled) or weight.zero is not None or weight.block[1] < part.shape[-1]:
            return None
        kinds.add(_KINDS[weight.values.dtype])
    return kinds.pop() if len(kinds) == 1 and source.layout in OUTPUTS_ARE_ROWS else None


def _stored_format(name: str, source: Source, weights: Mapping[str, Weight], reader: Reader) -> Format | None:
    """Return the format of a matrix that is held as the checkpoint stores it, else None."""
    stored = _stored_kind(source, weights)
    if stored is not None or not is_4_bit(source, weights):
        return stored
    groups = groups_of(source, weights, reader)
    if groups is None:
        why = "its tensors have an odd number of inputs, or differ in their groups of inputs"
        _log.warning("%s is not held in 4 bits: %s", name, why)
    return groups


def _load_codes(
    name: str, kind: Kind, source: Source, reader: Reader, weights: Mapping[str, Weight], shape: jax.ShapeDtypeStruct,
    placement: Placement,
) -> Params:  # fmt: skip
    """Read a matrix that the checkpoint has in 8 bits: its bytes unchanged, and its scales in the order of outputs."""

    def factors(part: Part, begin: int, end: int) -> np.ndarray:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        return read_scales(weight, reader, begin, end)

    values = stored_values(source, reader, weights, shape, np.dtype(np.int8 if kind == "int8" else np.uint8))
    scales = empty((*shape.shape[:-2], 1, shape.shape[-1]), np.dtype(np.float32))
    assemble(of_outputs(source), scales, factors)
    arrays = values, scales[..., 0, :]
    return {field: placement.put(field, array) for field, array in zip(_names(name), arrays, strict=True)}


def _for_kernel(name: str, found: Params, experts: Implementation, placement: Placement) -> Params:
    """Return a matrix in 8 bits as its kernel reads it: experts in tiles for the Hopper kernel.

    Raises ConfigError if they do not fit it.
    """
    values, scales = (found[field] for field in _names(name))
    if values.ndim != 3 or experts not in HOPPER:
        return found
    if (limit := eight_bits_limit((values.shape[1], values.shape[2]))) is not None:
        raise ConfigError("moe_backend", experts, f"{name} {limit}: must be xla")
    shards = zip(*map(placement.shards, (values, scales)), strict=True)
    tiled: list[Tiles8] = [expert_by_expert(eight_bits.tiles, Quantized(*shard)) for shard in shards]
    return placement.from_each((f"{name}.tiles", f"{name}.scales"), tiled)


def _int4_for_kernel(name: str, found: Params, experts: Implementation, placement: Placement) -> Params:
    """Return integers of 4 bits as their kernel reads them: experts in tiles for the Hopper kernel.

    Raises ConfigError if they do not fit it.
    """
    arrays = [found.get(f"{name}.{field}") for field in (CODES, SCALES, ZEROS)]
    codes, scales, zeros = (array for array in arrays if array is not None)
    if codes.ndim != 3 or experts not in HOPPER:
        return found
    sides, act_order = (2 * codes.shape[1], codes.shape[2]), f"{name}.{GROUP_OF}" in found
    limit = int4_limit(sides, scales.shape[1], placement.shards(scales), act_order=act_order)
    if limit is not None:
        raise ConfigError("moe_backend", experts, f"{name} {limit}: must be xla")
    shards = zip(*map(placement.shards, (codes, scales, zeros)), strict=True)
    tiled: list[Int4Tiles] = [expert_by_expert(int4_tiles.tiles, Int4(*shard)) for shard in shards]
    field = f"{name}.int4_tiles"
    return {field: placement.from_shards(field, [one.tiles for one in tiled])}


def _load_mxfp4(
    name: str, source: Source, reader: Reader, weights: Mapping[str, Weight], shape: jax.ShapeDtypeStruct,
    experts: Implementation, placement: Placement,
) -> Params:  # fmt: skip
    """Read MXFP4 blocks and exponents [E, C, ...], gates before ups; the Hopper kernel gets them in tiles."""
    count, inputs, outputs = shape.shape

    def read_all(columns: int, field: str) -> np.ndarray:
        out = empty((count, outputs, columns), np.dtype(np.uint8))

        def read(part: Part, begin: int, end: int) -> np.ndarray:
            weight = weights[part.key]
            assert isinstance(weight, Packed)
            return reader.rows(getattr(weight, field), begin, end, columns=columns)

        assemble(source, np.swapaxes(out, 1, 2), read)
        return out

    blocks, scales = read_all(inputs // 2, "values"), read_all(inputs // BLOCK, "scale")
    matrices = Mxfp4(placement.put(f"{name}.blocks", blocks), placement.put(f"{name}.scales", scales))
    return _mxfp4_params(name, matrices, experts, placement)


def _mxfp4_params(name: str, matrices: Mxfp4, experts: Implementation, placement: Placement) -> Params:
    """Return MXFP4 matrices in the form that the kernel reads. Raises CheckpointError if the Hopper kernel cannot.

    Raises ConfigError for Triton's kernel, which reads none.
    """
    if experts == "triton":
        limit = f"{name} is in MXFP4, which it does not read: choose quantization = none or moe_backend = xla"
        raise ConfigError("moe_backend", experts, limit)
    if experts not in HOPPER:
        return {f"{name}.blocks": matrices.blocks, f"{name}.scales": matrices.scales}
    shards = map(Mxfp4, placement.shards(matrices.blocks), placement.shards(matrices.scales))
    tiled: list[Mxfp4Tiles] | list[Mxfp4Joined] = [_tiled(name, shard) for shard in shards]
    names: tuple[str, ...] = f"{name}.words", f"{name}.scales"
    if experts == "mosaic_overlap":
        tiled, names = [expert_by_expert(joined, shard) for shard in tiled], (f"{name}.joined",)
    return placement.from_each(names, tiled)


def _tiled(name: str, shard: Mxfp4) -> Mxfp4Tiles:
    """Return the tiles of one device's shard."""
    _, outputs, half = shard.blocks.shape
    shard = _without_zero_block_scales(shard)
    if 2 * half % TILE or outputs % TILE or not bool(_tiles_hold(shard.scales)):
        raise CheckpointError(
            f"{name} [{outputs}, {2 * half}] in MXFP4 does not fit the Hopper kernel, which needs multiples of {TILE} "
            "and scales from 2^-93 to 2^33: choose quantization = none or moe_backend = xla"
        )
    tiled: Mxfp4Tiles = expert_by_expert(tiles, shard)
    return tiled


@jax.jit
def _without_zero_block_scales(matrices: Mxfp4) -> Mxfp4:
    """Return the same numbers with scale 1 for blocks of zeros; tiles may be unable to represent their own scales."""
    codes = matrices.blocks.reshape(*matrices.scales.shape, BLOCK // 2) & 0x77
    return matrices._replace(scales=jnp.where((codes == 0).all(axis=-1), jnp.uint8(127), matrices.scales))


_quantize, _quantize_rows = (jax.jit(function, static_argnames="kind") for function in (quantize, quantize_rows))
_magnitudes = jax.jit(magnitudes)
_tiles_hold = jax.jit(tiles_hold)

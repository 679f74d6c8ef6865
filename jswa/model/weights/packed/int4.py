"""Matrices of 4 bits in device memory: N.codes, N.group_scales and N.group_zeros, as `pallas_kernels.int4` reads them.

Where the groups are not runs of neighbouring inputs ("act-order"), N.group_of is the group of each input. The order of
the inputs stays, so that sums are those of the dequantized matrix.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32, Shaped

from jswa.errors import CheckpointError, ConfigError
from jswa.forms.base.names import CODES, GROUP_OF, SCALES, ZEROS
from jswa.forms.int4 import INT4
from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import Source, TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.packed.integers import Grouped, groups_of_inputs, unpack
from jswa.model.weights.packed.reading import Reading, StoredMatrix
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.quantize import OUTPUTS_ARE_ROWS, of_outputs
from jswa.model.weights.safetensors_files import TYPES, TensorReader
from pallas_kernels import Linear

_log = logging.getLogger("jswa")
Arrays = dict[str, Shaped[np.ndarray, "..."]]  # the parameters of one matrix in host memory, by the ends of their names


class Int4Groups(NamedTuple):
    """How the groups of a matrix of 4 bits are held.

    Attributes:
        number: scales per output.
        run: neighbouring inputs that share a scale; None: `group_of` is held.
    """

    number: int
    run: int | None


def _stored(matrix: StoredMatrix) -> Int4Groups | None:
    """Return how a matrix is held in 4 bits, if all of its tensors are; the log says if it cannot."""
    found = [matrix.weights[part.key] for part in matrix.source.parts]
    if not all(isinstance(weight, Grouped) and weight.bits == 4 for weight in found):
        return None
    groups = _groups_of(matrix.source, matrix.weights, matrix.reader)
    if groups is None:
        why = "its tensors have an odd number of inputs, or differ in their groups of inputs"
        _log.warning("%s is not held in 4 bits: %s", matrix.name, why)
    return groups


def _groups_of(source: Source, weights: Mapping[str, object], reader: TensorReader) -> Int4Groups | None:
    """Return how a matrix of 4 bits can be held so, or None if it cannot.

    It can if inputs come in pairs, and if groups are runs of neighbours in all tensors or the same in all tensors. The
    tensors that name the group of each input are read.
    """
    inputs = source.parts[0].shape[-1]
    if source.layout not in OUTPUTS_ARE_ROWS or inputs % 2:
        return None
    tables = {part.key: _table(source, part, _grouped(weights, part), reader) for part in source.parts}
    counts = {_grouped(weights, part).groups for part in source.parts}
    run = int(np.gcd.reduce([_run(table) for table in tables.values()]))
    if inputs // run <= max(counts):
        return Int4Groups(inputs // run, run)
    pairs = ((tables[part.key], tables[one.parts[0].key]) for one in _matrices(source) for part in one.parts)
    return Int4Groups(counts.pop(), None) if len(counts) == 1 and all(np.array_equal(*pair) for pair in pairs) else None


def _load(matrix: StoredMatrix, groups: Int4Groups, placement: Placement) -> Params:
    """Read a matrix, or a stack of experts, whose tensors have 4 bits, and return its parameters."""
    name, source, reader, weights, shape, _ = matrix
    *lead, inputs, outputs = shape.shape
    kinds = {TYPES[_grouped(weights, part).scale.dtype] for part in source.parts}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    arrays: Arrays = {
        CODES: empty((*lead, inputs // 2, outputs), np.dtype(np.uint8)),
        SCALES: empty((*lead, groups.number, outputs), np.dtype(np.float32) if kind == np.float64 else kind),
        ZEROS: empty((*lead, groups.number, outputs), np.dtype(np.uint8)),
    }
    if groups.run is None:
        arrays[GROUP_OF] = empty((*lead, inputs), np.dtype(np.int32))
    for index, one in enumerate(_matrices(source)):
        _fill({field: array[index] if lead else array for field, array in arrays.items()}, groups, one, weights, reader)
    arrays = for_devices(name, arrays, placement.input_shards(f"{name}.{CODES}", arrays[CODES].shape))
    return {f"{name}.{field}": placement.put(f"{name}.{field}", array) for field, array in arrays.items()}


def _fitted(name: str, arrays: Arrays, _: jax.ShapeDtypeStruct, placement: Placement, __: Linear) -> Arrays:
    codes = f"{name}.{CODES}"
    devices = placement.input_shards(codes, arrays[codes].shape)
    own = for_devices(name, {key.rpartition(".")[2]: array for key, array in arrays.items()}, devices)
    return {f"{name}.{end}": array for end, array in own.items()}


def for_devices(name: str, arrays: Arrays, devices: int) -> Arrays:
    """Return the parameters of a matrix whose inputs are split over so many devices, such that no group crosses them.

    Either runs become shorter, or each device gets all groups. Raises ConfigError if devices would share a pair of
    inputs, and CheckpointError if an input has a group that is not there.
    """
    codes, scales, zeros, table = (arrays.get(field) for field in (CODES, SCALES, ZEROS, GROUP_OF))
    assert codes is not None
    assert scales is not None
    assert zeros is not None
    count = scales.shape[-2]
    if table is not None and (table.min() < 0 or table.max() >= count):
        raise CheckpointError(f"{name}.{GROUP_OF} names group {table.max()}: there are {count}")
    inputs = 2 * codes.shape[-2]
    if devices == 1:
        return arrays
    if inputs % (2 * devices):
        raise ConfigError("tensor_parallel_size", devices, f"must divide {inputs // 2}, the pairs of inputs of {name}")
    table = np.arange(inputs, dtype=np.int32) // (inputs // count) if table is None else table
    run = int(np.gcd(_run(table), inputs // devices))
    if inputs // run <= devices * count:
        own = table[::run]
        return {CODES: codes, SCALES: scales[own], ZEROS: zeros[own]}
    return {CODES: codes, SCALES: np.tile(scales, (devices, 1)), ZEROS: np.tile(zeros, (devices, 1)), GROUP_OF: table}


def _fill(
    arrays: Arrays, groups: Int4Groups, source: Source, weights: Mapping[str, object], reader: TensorReader
) -> None:
    """Fill the arrays of one matrix."""
    found = {part.key: unpack(_grouped(weights, part), reader) for part in source.parts}
    wide = np.empty((2 * arrays[CODES].shape[0], arrays[CODES].shape[1]), np.uint8)
    assemble(source, wide, lambda part, begin, end: found[part.key].codes[begin:end])
    np.bitwise_or(wide[::2], wide[1::2] << 4, out=arrays[CODES])
    tables = {part.key: _table(source, part, _grouped(weights, part), reader) for part in source.parts}
    own = {key: slice(None) if groups.run is None else table[:: groups.run] for key, table in tables.items()}
    outputs = of_outputs(source, groups.number)
    assemble(outputs, arrays[SCALES], lambda part, begin, end: found[part.key].scales[begin:end, own[part.key]])
    assemble(outputs, arrays[ZEROS], lambda part, begin, end: found[part.key].zeros[begin:end, own[part.key]])
    if groups.run is None:
        arrays[GROUP_OF][...] = tables[source.parts[0].key]


def _matrices(source: Source) -> list[Source]:
    """Return the source of each matrix of a stack, or of the only one."""
    if source.layout != "experts":
        return [source]
    starts = range(0, len(source.parts), source.per_expert)
    return [Source(source.parts[start : start + source.per_expert], "matrix") for start in starts]


def _table(source: Source, part: TensorPart, weight: Grouped, reader: TensorReader) -> Int32[np.ndarray, " in"]:
    """Return the group of each input, in the order of the parameter's inputs."""
    table = groups_of_inputs(weight, reader)
    if source.layout != "columns":  # the others keep the order of inputs
        return table
    out: Int32[np.ndarray, "in 1"] = np.empty((len(table), 1), np.int32)
    assemble(source._replace(parts=(part._replace(shape=(1, len(table))),)), out, lambda *_: table[None])
    return out[:, 0]


def _run(table: Int32[np.ndarray, " in"]) -> int:
    """Return the largest number such that each run of so many inputs has one group."""
    return int(np.gcd.reduce(np.flatnonzero(np.diff(table)) + 1, initial=len(table)))


def _grouped(weights: Mapping[str, object], part: TensorPart) -> Grouped:
    weight = weights[part.key]
    assert isinstance(weight, Grouped)
    return weight


READING = Reading(INT4, _stored, _load, fitted=_fitted)

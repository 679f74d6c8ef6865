"""Integers of 4 or 8 bits that a checkpoint packs in int32: compressed-tensors, GPTQ and AWQ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped, UInt8

from jswa.errors import CheckpointError
from jswa.model.hf.quantization import Quantization
from jswa.model.hf.source import TensorPart
from jswa.model.weights.safetensors_files import FLOATS, Tensor, TensorReader


@dataclass(frozen=True)
class Grouped:
    """A tensor of integers of 4 or 8 bits, packed in int32, with scales and zero points per output and group of inputs.

    Attributes:
        outputs, inputs: shape of the matrix.
        bits: of a number.
        values: compressed-tensors [out, in · bits / 32]; GPTQ [in · bits / 32, out]; AWQ [in, out · bits / 32].
        scale: compressed-tensors [out, G]; GPTQ and AWQ [G, out].
        zero: compressed-tensors [out · bits / 32, G]; GPTQ and AWQ [G, out · bits / 32]; None: 0.
        group_of: group of each input, [in]; None: groups of neighbours.
        form: whose packing it is.
        zero_offset: added to stored zero points. compressed-tensors stores numbers and zero points with 2^(bits - 1)
            added; GPTQ's first format stores zero points less 1.
    """

    outputs: int
    inputs: int
    bits: int
    values: Tensor
    scale: Tensor
    zero: Tensor | None
    group_of: Tensor | None
    form: Literal["compressed-tensors", "gptq", "awq"]
    zero_offset: int = 0

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.scale.shape[1 if self.form == "compressed-tensors" else 0]


class Unpacked(NamedTuple):
    """The numbers of a `Grouped` in host memory, by output."""

    codes: UInt8[np.ndarray, "out in"]
    scales: Float[np.ndarray, "out G"]  # in the stored type; float32 for F64
    zeros: Float32[np.ndarray, "out G"]
    group_of: Int32[np.ndarray, " in"]

    def rows(self, begin: int, end: int) -> Float32[np.ndarray, "rows in"]:
        """Return the weights of outputs [begin, end)."""
        out: Float32[np.ndarray, "rows in"] = self.codes[begin:end].astype(np.float32)
        out -= self.zeros[begin:end][:, self.group_of]
        out *= self.scales[begin:end].astype(np.float32)[:, self.group_of]
        return out


def resolve_grouped(
    part: TensorPart, names: tuple[str, ...], tensors: Mapping[str, Tensor], quantization: Quantization
) -> Grouped:
    """Return a weight of packed integers; bits and groups follow from the shapes.

    Raises CheckpointError if the shapes or types of its tensors do not fit each other.
    """
    outputs, inputs = part.shape
    values, scale = tensors[names[0]], tensors[names[1]]
    by_row = names[0].endswith("_packed")
    form: Literal["compressed-tensors", "gptq", "awq"] = (
        "compressed-tensors" if by_row else "awq" if quantization.method == "awq" else "gptq"
    )

    def words(count: int, bits: int) -> int:
        return -(-count * bits // 32)

    def packed(bits: int) -> tuple[int, int]:
        if form == "awq":
            return inputs, words(outputs, bits)
        return (outputs, words(inputs, bits)) if by_row else (words(inputs, bits), outputs)

    values.require_shape(packed(4), packed(8))
    bits = 4 if values.shape == packed(4) else 8
    groups = scale.shape[1 if by_row else 0] if len(scale.shape) == 2 else 0
    if not 0 < groups <= inputs:
        raise CheckpointError(f"{scale.where} has shape {list(scale.shape)}: must have groups of inputs")
    scale.require_shape((outputs, groups) if by_row else (groups, outputs), by=f"{part.key} asks for")
    scale.require_type(*FLOATS)
    zero = next((tensors[name] for name in names if name.endswith(("zero_point", "qzeros"))), None)
    if zero is not None:
        zero.require_shape(
            (words(outputs, bits), groups) if by_row else (groups, words(outputs, bits)), by="its scales ask for"
        )
        zero.require_type("I32")
    group_of = next((tensors[name] for name in names if name.endswith("g_idx")), None)
    if group_of is not None:
        group_of.require_shape((inputs,))
        group_of.require_type("I32")
    elif -(-inputs // -(-inputs // groups)) != groups:
        raise CheckpointError(f"{scale.where} has {groups} groups, which {inputs} inputs cannot be divided into")
    return Grouped(outputs, inputs, bits, values, scale, zero, group_of, form, quantization.zero_offset)


def unpack(weight: Grouped, reader: TensorReader) -> Unpacked:
    """Read all of a weight of packed integers. Raises CheckpointError if an input names a group that is not there."""
    bits, by_row = weight.bits, weight.form == "compressed-tensors"
    scales = _matrix(weight.scale, reader)
    scales = scales.astype(np.float32) if scales.dtype == np.float64 else scales
    codes, zeros = _matrix(weight.values, reader), _matrix(weight.zero, reader) if weight.zero else None
    middle = np.float32(2 ** (bits - 1))
    if by_row:
        codes = _fields(codes, bits)
        zeros = np.full(scales.shape, middle, np.float32) if zeros is None else _fields(zeros.T, bits).T
    else:
        awq = weight.form == "awq"
        codes = _fields(codes, bits, interleaved=True) if awq else _fields(codes.T, bits).T
        codes, scales = codes.T, scales.T
        zeros = (
            _fields(zeros, bits, interleaved=awq).T if zeros is not None else np.full(scales.shape, middle, np.float32)
        )
    zeros = zeros[: weight.outputs].astype(np.float32) + (weight.zero_offset if weight.zero else 0)
    return Unpacked(
        np.ascontiguousarray(codes[: weight.outputs, : weight.inputs]), scales, zeros, groups_of_inputs(weight, reader)
    )


def groups_of_inputs(weight: Grouped, reader: TensorReader) -> Int32[np.ndarray, " in"]:
    """Return the group of each input. Raises CheckpointError if the checkpoint names one that is not there."""
    if weight.group_of is None:
        return np.arange(weight.inputs, dtype=np.int32) // -(-weight.inputs // weight.groups)
    group_of: Int32[np.ndarray, " in"] = reader.rows(weight.group_of, 0, 1, columns=weight.inputs)[0]
    if group_of.min() < 0 or group_of.max() >= weight.groups:
        raise CheckpointError(f"{weight.group_of.where} names group {group_of.max()}: there are {weight.groups}")
    return group_of


def _matrix(tensor: Tensor, reader: TensorReader) -> Shaped[np.ndarray, "R C"]:
    return reader.rows(tensor, 0, tensor.shape[0])


def _fields(words: Int32[np.ndarray, "R C"], bits: int, *, interleaved: bool = False) -> UInt8[np.ndarray, "R N"]:
    """Return the numbers in rows of int32, the lowest bits first; AWQ has even numbers in the low half of a word."""
    order = np.arange(32 // bits)
    if interleaved:
        order = order.reshape(2, -1).T.reshape(-1)
    fields = np.empty((*words.shape, len(order)), np.uint8)
    for index, place in enumerate(order):  # one by one, because all of them in 32 bits would be four times the memory
        fields[..., index] = (words.view(np.uint32) >> np.uint32(bits * place)) & np.uint32(2**bits - 1)
    return fields.reshape(len(words), -1)

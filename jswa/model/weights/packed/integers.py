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
        group: inputs that share a scale, if they are neighbours.
        zero_offset: 1 for GPTQ's first format, which stores zero points less 1; otherwise 0. compressed-tensors stores
            numbers and zero points with 2^(bits - 1) added.
    """

    outputs: int
    inputs: int
    bits: int
    values: Tensor
    scale: Tensor
    zero: Tensor | None
    group_of: Tensor | None
    form: Literal["compressed-tensors", "gptq", "awq"]
    group: int
    zero_offset: int = 0

    @property
    def middle(self) -> int:
        """The zero point of a symmetric tensor."""
        return 1 << self.bits - 1

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
    label = quantization.schemes.label(part.key) if quantization.schemes is not None else None
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

    values.require_shape(*map(packed, (4, 8) if label is None else (label.bits,)), by="the config asks for")
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
    elif label is not None and label.act_order:
        raise CheckpointError(f"{values.where}: the config says act-order, and no g_idx names the group of each input")
    size = -(-inputs // groups) if label is None or label.group is None else label.group or inputs
    if -(-inputs // size) != groups:
        raise CheckpointError(
            f"{scale.where} has {groups} groups: {inputs} inputs in groups of {size} need another number"
        )
    return Grouped(outputs, inputs, bits, values, scale, zero, group_of, form, size, quantization.zero_offset)


def unpack(weight: Grouped, reader: TensorReader) -> Unpacked:
    """Read all of a weight of packed integers. Raises CheckpointError if an input names a group that is not there."""
    bits, by_row = weight.bits, weight.form == "compressed-tensors"
    scales = _matrix(weight.scale, reader)
    scales = scales.astype(np.float32) if scales.dtype == np.float64 else scales
    codes = _matrix(weight.values, reader)
    if by_row:
        codes = _fields(codes, bits)
    else:
        awq = weight.form == "awq"
        codes = (_fields(codes, bits, interleaved=True) if awq else _fields(codes.T, bits).T).T
        scales = scales.T
    return Unpacked(
        np.ascontiguousarray(codes[: weight.outputs, : weight.inputs]),
        scales,
        zero_points(weight, reader).astype(np.float32),
        groups_of_inputs(weight, reader),
    )


def zero_points(weight: Grouped, reader: TensorReader) -> UInt8[np.ndarray, "out G"]:
    """Return the zero points of a weight of packed integers.

    GPTQ's first format stores words of zero points less 1 each, as GPTQModel writes them: a zero point of 0 borrows
    from the next one, so that 1 is added to whole words.
    """
    if weight.zero is None:
        return np.full((weight.outputs, weight.groups), weight.middle, np.uint8)
    words = _matrix(weight.zero, reader)
    if weight.form == "compressed-tensors":
        found = _fields(words.T, weight.bits)
    else:
        ones = np.uint32(weight.zero_offset * (2**32 - 1) // (2**weight.bits - 1))
        found = _fields((words.view(np.uint32) + ones).view(np.int32), weight.bits, interleaved=weight.form == "awq")
    return found[:, : weight.outputs].T


def groups_of_inputs(weight: Grouped, reader: TensorReader) -> Int32[np.ndarray, " in"]:
    """Return the group of each input. Raises CheckpointError if the checkpoint names one that is not there."""
    neighbours = np.arange(weight.inputs, dtype=np.int32) // weight.group
    if weight.group_of is None:
        return neighbours
    group_of: Int32[np.ndarray, " in"] = reader.rows(weight.group_of, 0, 1, columns=weight.inputs)[0]
    if (group_of == -1).all():  # compressed-tensors had no order for it
        return neighbours
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

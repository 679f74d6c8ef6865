"""The header of a GGUF file, an untrusted input: checked before anything is read or allocated by its numbers.

A file consists of a magic, a version, the number of tensors and of metadata entries, the metadata (key, type, value),
the tensors (name, sizes, type, offset), and the tensors' bytes from the next multiple of the alignment on. All numbers
are little-endian. The gguf package names types and their blocks; its own reader trusts the file.
"""

import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jswa.errors import CheckpointError
from jswa.gguf.file.cursor import Cursor, Readable
from jswa.gguf.file.types import blocks
from jswa.storage.checkpoint_files import open_file
from jswa.storage.json_object import label, shown

Value = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

_VERSIONS = (2, 3)  # they differ only in files of big-endian machines
_MAX_ENTRIES, _MAX_TENSORS, _MAX_RANK, _MAX_NAME = 2**16, 200_000, 4, 1024
_MAX_ALIGNMENT = 2**20
_INT64_MAX = 2**63 - 1
_ARRAY, _STRING = 9, 8


class GgufTensor(NamedTuple):
    """A tensor as a header describes it.

    Attributes:
        path: the file.
        name: llama.cpp's name.
        type: name of the type, such as "Q4_0".
        shape: with the axis whose numbers lie next to each other last, as NumPy has it.
        begin: its first byte, counted from the start of the file.
        size: its bytes.
    """

    path: Path
    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def where(self) -> str:
        """File and name, for error texts."""
        return f"{self.path.name}: {label(self.name)}"


class Gguf(NamedTuple):
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> Gguf:
    """Return the checked metadata and tensors of one GGUF file.

    Raises CheckpointError that names the file, the key or tensor, the value and the limit: the file is no GGUF of
    version 2 or 3, a count or length exceeds the file or a limit, a string is not UTF-8, a key or tensor occurs twice,
    a type is unknown, or a tensor does not fit into the file or overlaps another.
    """
    with open_file(path) as file:
        return header_of(file, os.fstat(file.fileno()).st_size, path)


def header_of(file: Readable, size: int, path: Path) -> Gguf:
    """Return what `read_gguf` returns, of a file of `size` bytes that is read from its first byte on.

    Raises CheckpointError as `read_gguf` does.
    """
    cursor = Cursor(file, size, path.name)
    tensors, entries = _counts(cursor)
    metadata: dict[str, Value] = {}
    for _ in range(entries):
        key = cursor.string(_MAX_NAME, "a key of the metadata")
        if key in metadata:
            raise CheckpointError(f"{path.name}: metadata key {label(key)} occurs twice")
        metadata[key] = _value(cursor, key)
    found: dict[str, GgufTensor] = {}
    for _ in range(tensors):
        tensor = _tensor(cursor, path)
        if tensor.name in found:
            raise CheckpointError(f"{tensor.where} is stored twice in this file")
        found[tensor.name] = tensor
    alignment = _alignment(metadata, path.name)
    start = -(-cursor.at // alignment) * alignment
    return Gguf(path, metadata, _placed(found, start, size, alignment))


def _counts(cursor: Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata entries."""
    magic = cursor.take(4, "the magic")
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.where} is not a GGUF file: it starts with {shown(magic)}: must be b'GGUF'")
    version = cursor.number("I", "version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        also = ": files of big-endian machines are not read" if swapped else ""
        raise CheckpointError(f"{cursor.where}: GGUF version {version}: must be one of {_VERSIONS}{also}")
    tensors, entries = cursor.number("Q", "tensor count"), cursor.number("Q", "metadata count")
    for what, count, most in (("tensors", tensors, _MAX_TENSORS), ("metadata entries", entries, _MAX_ENTRIES)):
        if count > most:
            raise CheckpointError(f"{cursor.where} has {count} {what}: must have at most {most}")
    return tensors, entries


def _value(cursor: Cursor, key: str) -> Value:
    """Return the value of a metadata entry."""
    kind = cursor.number("I", f"type of {label(key)}")
    if kind == _STRING:
        return cursor.string(None, label(key))
    if kind != _ARRAY:
        found: list[Value] = cursor.scalars(kind, 1, label(key))
        return found[0]
    inner, count = cursor.number("I", f"type of {label(key)}"), cursor.number("Q", f"length of {label(key)}")
    if inner == _ARRAY:
        raise CheckpointError(f"{cursor.where}: {label(key)} is an array of arrays: these are not read")
    return cursor.strings(count, label(key)) if inner == _STRING else cursor.scalars(inner, count, label(key))


def _tensor(cursor: Cursor, path: Path) -> GgufTensor:
    """Return one entry of the tensors; `begin` is still counted from the start of the tensors' bytes."""
    name = cursor.string(_MAX_NAME, "the name of a tensor")
    where = f"{path.name}: {label(name)}"
    rank = cursor.number("I", f"number of axes of {label(name)}")
    if not 1 <= rank <= _MAX_RANK:
        raise CheckpointError(f"{where} has {rank} axes: must have 1 to {_MAX_RANK}")
    sizes = [cursor.number("Q", f"sizes of {label(name)}") for _ in range(rank)]
    kind, offset = cursor.number("I", f"type of {label(name)}"), cursor.number("Q", f"offset of {label(name)}")
    if kind not in blocks():
        known = ", ".join(block.name for block in blocks().values())
        raise CheckpointError(f"{where} has type {kind}: must be one of {known}")
    block = blocks()[kind]
    if min(sizes) < 1 or math.prod(sizes) > _INT64_MAX // block.size:
        raise CheckpointError(f"{where}: shape = {shown(sizes)}: must be sizes from 1, of less than 2^63 bytes")
    if sizes[0] % block.numbers:
        limit = f"must be a multiple of {block.numbers} for {block.name}"
        raise CheckpointError(f"{where} has rows of {sizes[0]} numbers: {limit}")
    size = math.prod(sizes) // block.numbers * block.size
    return GgufTensor(path, name, block.name, tuple(reversed(sizes)), offset, size)


def _alignment(metadata: Mapping[str, Value], where: str) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        limit = f"must be a power of two up to {_MAX_ALIGNMENT}"
        raise CheckpointError(f"{where}: general.alignment = {shown(value)}: {limit}")
    return value


def _placed(tensors: Mapping[str, GgufTensor], start: int, size: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors with `begin` counted from the start of the file, which has `size` bytes."""
    placed = {}
    for name, tensor in tensors.items():
        begin = start + tensor.begin
        if tensor.begin % alignment or begin + tensor.size > size:
            raise CheckpointError(
                f"{tensor.where}: offset = {tensor.begin}: must be a multiple of {alignment}, and {tensor.size} bytes "
                f"from it must fit into the {max(size - start, 0)} bytes after the header"
            )
        placed[name] = tensor._replace(begin=begin)
    for before, after in pairwise(sorted(placed.values(), key=lambda tensor: tensor.begin)):
        if before.begin + before.size > after.begin:
            raise CheckpointError(f"{after.where} overlaps {label(before.name)}")
    return placed

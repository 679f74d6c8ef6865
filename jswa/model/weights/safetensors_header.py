"""The header of a safetensors file, an untrusted input: checked before anything is read or allocated.

A file consists of 8 bytes of header length (little-endian), the header, and the tensors' bytes. The header is a JSON
object {name: {"dtype", "shape", "data_offsets": [begin, end]}} with offsets from the header's end; it may also have a
key `__metadata__` with an object of strings. The safetensors library makes most of these checks too, but its errors
name no key.
"""

import math
import os
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jswa.errors import CheckpointError
from jswa.storage.checkpoint_files import open_file
from jswa.storage.json_object import MAX_BYTES, label, parse_object, shown

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_MAX_RANK = 32
_INT64_MAX = 2**63 - 1
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


class StoredTensor(NamedTuple):
    """A tensor as a header describes it; its bytes are [begin, end), counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, most: int = MAX_BYTES) -> dict[str, StoredTensor]:
    """Return the checked tensors of a safetensors file, whose header may have `most` bytes, by name.

    Raises CheckpointError that names the file, the key, the value and the limit, in these cases: the header does not
    fit in the file; it is not a JSON object, or has a key twice; a type, shape or offset is invalid; tensors overlap,
    leave gaps, or do not end with the file.
    """
    where = f"{path.name} is not a readable safetensors file"
    header, size = _header_bytes(path, most, where)
    if not header.startswith(b"{"):
        raise CheckpointError(f"{where}: its header starts with {shown(header[:8])}: must start with {{")
    raw = parse_object(header, f"{where}: its header")
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{where}: {_METADATA} = {shown(metadata)}: must be an object of strings")
    tensors = {key: _stored(entry, size, f"{where}: {label(key)}") for key, entry in raw.items()}
    _require_full(tensors, size, where)
    return tensors


def _header_bytes(path: Path, most: int, where: str) -> tuple[bytes, int]:
    """Return the header and the number of bytes after it."""
    try:
        with open_weights(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            rest = size - 8
            if rest < 0:
                raise CheckpointError(f"{where}: it has {size} bytes: must have at least 8")
            if length > rest:
                raise CheckpointError(f"{where}: header length = {length}: must be at most {rest}, the bytes after it")
            if length > most:
                raise CheckpointError(f"{where}: header length = {length}: must be at most {most}")
            return file.read(length), rest - length
    except OSError as error:
        raise CheckpointError(f"{where}: {error}") from error


def open_weights(path: Path) -> FileIO:
    """Open a safetensors file; see `open_file`. Raises CheckpointError."""
    try:
        return open_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error


def _stored(entry: Any, size: int, where: str) -> StoredTensor:
    """Check one entry; `size` is the number of bytes of all tensors. Raises CheckpointError."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise CheckpointError(f"{where} = {shown(entry)}: must be an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where}: dtype = {shown(dtype)}: must be one of {', '.join(sorted(BITS))}")
    # The safetensors library multiplies in 64 bits; in Python a product of many large numbers would take very long.
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_RANK
        or not all(_is_int(n) and 0 <= n <= _INT64_MAX for n in shape)
        or math.prod(max(n, 1) for n in shape) * BITS[dtype] > _INT64_MAX
    ):
        raise CheckpointError(
            f"{where}: shape = {shown(shape)}: must be at most {_MAX_RANK} whole numbers from 0, of less than 2^63 bits"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_int(n) for n in offsets):
        raise CheckpointError(f"{where}: data_offsets = {shown(offsets)}: must be two whole numbers")
    begin, end = offsets
    if not 0 <= begin <= end <= size:
        raise CheckpointError(
            f"{where}: data_offsets = {shown(offsets)}: must rise from 0 to at most {size}, the bytes after the header"
        )
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{where}: data_offsets = {offsets}: must span {bits} / 8 bytes, the size of {dtype} {shown(shape)}"
        )
    return StoredTensor(dtype, tuple(shape), begin, end)


def _require_full(tensors: dict[str, StoredTensor], size: int, where: str) -> None:
    """Raise CheckpointError unless every byte after the header belongs to exactly one tensor."""
    start = ("the header", StoredTensor("", (), 0, 0))
    ordered = [start, *sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))]
    for (before, previous), (key, stored) in pairwise(ordered):
        if stored.begin != previous.end:
            what = "overlap" if stored.begin < previous.end else "leave a gap after"
            raise CheckpointError(
                f"{where}: {label(key)}: data_offsets = {[stored.begin, stored.end]} {what} those of {label(before)}: "
                f"must begin at {previous.end}"
            )
    last, stored = ordered[-1]
    if stored.end != size:
        raise CheckpointError(f"{where}: {size - stored.end} bytes follow {label(last)}: must be 0")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Reading numbers, strings and arrays of a GGUF header one after the other, without trust in its lengths."""

import struct
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jswa.errors import CheckpointError
from jswa.storage.json_object import shown

_MAX_HEADER = 2**28  # bytes; a vocabulary of 256k tokens with 512k merges takes about 2^24
_MAX_VALUES = 2**22  # in all arrays together: a string takes about 60 bytes once read
_FIRST = 2**20
# By llama.cpp's number of a type of metadata.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_BOOL = 7


@runtime_checkable
class Readable(Protocol):
    """Bytes that are read one after the other; none are left if none come."""

    def read(self, count: int, /) -> bytes | None:
        """Return the next bytes, at most `count`."""


class Cursor:
    """A position in the header of a file. `at` is the next byte, `where` the file's name in errors."""

    def __init__(self, file: Readable, size: int, where: str) -> None:
        """Start at the first byte; `size` is the file's."""
        self.at, self.where = 0, where
        self._file, self._size = file, size
        self._data, self._values = bytearray(), 0

    def take(self, count: int, what: str) -> bytes:
        """Return the next bytes. Raises CheckpointError if the file or the longest header ends before."""
        self._need(count, what)
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, form: str, what: str) -> int:
        """Return the next number; `form` is that of struct."""
        form = f"<{form}"
        self._need(struct.calcsize(form), what)
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def string(self, most: int | None, what: str) -> str:
        """Return the next string, of at most `most` bytes. Raises CheckpointError if it is longer or not UTF-8."""
        length = self.number("Q", f"length of {what}")
        if most is not None and length > most:
            raise CheckpointError(f"{self.where}: {what} has {length} bytes: must have at most {most}")
        return self._decoded(self.take(length, what), what)

    def strings(self, count: int, what: str) -> list[str]:
        """Return the next strings."""
        self._count(count, 8, what)
        found = []
        for _ in range(count):
            if len(self._data) < self.at + 8:
                self._need(8, what)
            end = self.at + 8 + int.from_bytes(self._data[self.at : self.at + 8], "little")
            if len(self._data) < end:
                self._need(end - self.at, what)
            try:
                found.append(self._data[self.at + 8 : end].decode())
            except UnicodeDecodeError:
                self._decoded(bytes(self._data[self.at + 8 : end]), f"{what}, entry {len(found)}")
            self.at = end
        return found

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        """Return the next numbers or booleans of a type of metadata.

        Raises CheckpointError for another type, a boolean that is neither 0 nor 1, and more than the file holds.
        """
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.where}: {what} has type {kind}: must be one of {sorted(_SCALARS)}, 8 and 9")
        dtype = _SCALARS[kind]
        self._count(count, dtype.itemsize, what)
        values = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind == _BOOL:
            if count and values.max() > 1:
                raise CheckpointError(f"{self.where}: {what} has a byte of {values.max()}: booleans must be 0 or 1")
            return list(values.astype(bool).tolist())
        if dtype == np.float32:
            # The shortest decimal of a float32 is what its author wrote: 1e-06, not 9.999999974752427e-07.
            return [float(str(one)) for one in values] if count < 4096 else list(values.tolist())
        return list(values.tolist())

    def _decoded(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.where}: {what} = {shown(data)} is not UTF-8: {error.reason}") from error

    def _count(self, count: int, least: int, what: str) -> None:
        """Count the values of an array, each of which has at least `least` bytes. Raises CheckpointError."""
        if count > (self._size - self.at) // least:
            raise CheckpointError(f"{self.where}: {what} has {count} entries, more than the rest of the file can hold")
        self._values += count
        if self._values > _MAX_VALUES:
            raise CheckpointError(
                f"{self.where}: arrays of more than {_MAX_VALUES} values together: {what} is too long"
            )

    def _need(self, count: int, what: str) -> None:
        """Read until `count` bytes follow the position."""
        end = self.at + count
        if end > min(self._size, _MAX_HEADER):
            limit = f"the file has {self._size} bytes" if end > self._size else f"a header has at most {_MAX_HEADER}"
            raise CheckpointError(f"{self.where}: {what} ends at byte {shown(end)}: {limit}")
        while len(self._data) < end:
            try:
                more = self._file.read(max(end - len(self._data), len(self._data), _FIRST))
            except OSError as error:
                raise CheckpointError(f"{self.where} cannot be read: {error}") from error
            if not more:
                raise CheckpointError(f"{self.where}: {what} cannot be read: the file is shorter than it was")
            self._data += more

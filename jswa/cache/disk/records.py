"""The file of a record: some pages of one text, by the digests of the text up to the end of each page.

    magic, length of the header (4 bytes), header (JSON), SHA-256 of the header, rows, SHA-256 of the rows

A row is one slot, of one lane and device; rows of a lane lie together. A file holds no token and no salt, only digests
of them. Checksums detect damage, not forgery: others must not be able to write to the folder.
"""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

SUFFIX, PARTIAL = ".kv", ".part"
_MAGIC = b"jswa kv 1\n"
_LENGTH = struct.Struct("<I")
_DIGEST = 32
_MOST_HEADER = 2**24

Key = tuple[str, bytes]  # "full" or "local", digest of the text up to the end of the page
Lanes = list[Shaped[np.ndarray, "rows elems"]]  # by lane, and in each lane by device


class RecordGeometry(NamedTuple):
    """The sizes and the identity that all records of an engine share.

    Attributes:
        identity: digest of all that must be equal for a page to be valid: model, weights, dtype, layout.
        page_size: tokens of a page.
        pages_per_slab: rows of a local page; a full page is one row.
        lanes: arrays that a slot has a row in.
        elems, dtype: of a row.
    """

    identity: str
    page_size: int
    pages_per_slab: int
    lanes: int
    elems: int
    dtype: np.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in all lanes."""
        return self.lanes * self.elems * self.dtype.itemsize

    def rows(self, key: Key) -> int:
        """Return the rows of a page."""
        return 1 if key[0] == "full" else self.pages_per_slab


class Tail(NamedTuple):
    """A last page that is filled in part: the digest of the text before it, and the number of its tokens."""

    before: bytes
    tokens: int


@dataclass(eq=False)
class DiskRecord:
    """Pages of one text.

    Attributes:
        identity: as in `RecordGeometry`.
        tree: digest of the identity and the salt.
        first: digest of the first page of the text.
        pages: in the order of their rows; each text has its pages in one record at a time.
        tail: if the last pages are filled in part.
        size: bytes of the file.
        ready: whether the file is complete.
    """

    identity: str
    tree: bytes
    first: bytes
    pages: tuple[Key, ...]
    tail: Tail | None
    size: int = 0
    ready: bool = False

    @property
    def said(self) -> dict[str, Any]:
        """What the header says, as `parsed` takes it."""
        return {
            "identity": self.identity,
            "tree": self.tree.hex(),
            "first": self.first.hex(),
            "pages": [[kind, key.hex()] for kind, key in self.pages],
            "tail": None if self.tail is None else [self.tail.before.hex(), self.tail.tokens],
        }

    @cached_property
    def header(self) -> bytes:
        """The header of the file."""
        return json.dumps(self.said).encode()

    @cached_property
    def name(self) -> str:
        """Name of the file: a digest of its header."""
        return hashlib.sha256(self.header).hexdigest()[:40] + SUFFIX


def parsed(said: dict[str, Any], size: int = 0) -> DiskRecord:
    """Return the record of a header, in a file of `size` bytes. Raises what a header of other JSON leads to."""
    tail = said["tail"]
    return DiskRecord(
        said["identity"],
        bytes.fromhex(said["tree"]),
        bytes.fromhex(said["first"]),
        tuple((kind, bytes.fromhex(key)) for kind, key in said["pages"]),
        None if tail is None else Tail(bytes.fromhex(tail[0]), tail[1]),
        size,
        ready=True,
    )


def page_keys(tree: bytes, tokens: Int[np.ndarray, " T"], page_size: int) -> list[bytes]:
    """Return by page the digest of a text up to the end of the page; the last page may be filled in part."""
    keys, key = list[bytes](), tree
    data, step = np.ascontiguousarray(tokens, np.int32).tobytes(), 4 * page_size
    for start in range(0, len(data), step):
        key = next_key(key, data[start : start + step])
        keys.append(key)
    return keys


def next_key(before: bytes, page: bytes) -> bytes:
    """Return the digest of a text whose last page has these tokens, as bytes of int32."""
    return hashlib.blake2b(before + page, digest_size=16).digest()


def tree_digest(identity: str, salt: str) -> bytes:
    """Return the digest of a tree: texts of other salts have other digests."""
    return hashlib.blake2b(f"{identity}\0{salt}".encode(errors="surrogatepass"), digest_size=16).digest()


def size_of(record: DiskRecord, geometry: RecordGeometry) -> int:
    """Return the bytes of the file."""
    rows = sum(geometry.rows(key) for key in record.pages)
    return len(_begin(record.header)) + rows * geometry.slot_bytes + _DIGEST


def write_record(path: Path, record: DiskRecord, lanes: Lanes) -> None:
    """Write a file under a temporary name, then rename it. Raises OSError, and leaves no file then."""
    body, staging = hashlib.sha256(), path.with_suffix(PARTIAL)
    try:
        # Readable by this user only.
        with os.fdopen(os.open(staging, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(_begin(record.header))
            for lane in lanes:
                rows = np.ascontiguousarray(lane).view(np.uint8).reshape(-1)
                body.update(rows)
                file.write(rows)
            file.write(body.digest())
        staging.rename(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> DiskRecord:
    """Read the header of a file. Raises ValueError if it is torn or another's, OSError if it cannot be read."""
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC) + _LENGTH.size)
        if not begin.startswith(_MAGIC) or len(begin) < len(_MAGIC) + _LENGTH.size:
            raise ValueError("is not a file of pages")
        (length,) = _LENGTH.unpack(begin[len(_MAGIC) :])
        text = file.read(min(length, _MOST_HEADER))
        if hashlib.sha256(text).digest() != file.read(_DIGEST):
            raise ValueError("has a torn header")
        size = os.fstat(file.fileno()).st_size
    record = parsed(json.loads(text), size)
    if record.header != text or record.name != path.name:
        raise ValueError("is not what its name says")
    return record


def read_rows(path: Path, wanted: DiskRecord, geometry: RecordGeometry) -> Lanes:
    """Read the rows of a record. Raises ValueError if the file is torn or another's, OSError if it cannot be read."""
    data = path.read_bytes()
    if len(data) != wanted.size:
        raise ValueError(f"has {len(data)} bytes in place of {wanted.size}")
    begin = _begin(wanted.header)
    if not data.startswith(begin):
        raise ValueError("has another header")
    body = memoryview(data)[len(begin) : -_DIGEST]
    if hashlib.sha256(body).digest() != data[-_DIGEST:]:
        raise ValueError("has torn rows")
    return list(np.frombuffer(body, geometry.dtype).reshape(geometry.lanes, -1, geometry.elems))


def rows_of(record: DiskRecord, geometry: RecordGeometry) -> Sequence[int]:
    """Return the first row of each page."""
    at, starts = 0, []
    for key in record.pages:
        starts.append(at)
        at += geometry.rows(key)
    return starts


def _begin(header: bytes) -> bytes:
    """Return the file up to its rows."""
    return _MAGIC + _LENGTH.pack(len(header)) + header + hashlib.sha256(header).digest()

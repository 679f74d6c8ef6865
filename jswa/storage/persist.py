"""A prefix cache on disk.

    path/manifest.json   the identity of model, weights, dtype, layout and salt; checksums of every file
    path/arrays/         as orbax writes them: the record of all pages (cache/disk/records.py), its header, to which
                         the texts are added, and its rows by lane

A cache is written to a temporary folder and renamed once it is complete. Loading reads and checks all of it before the
engine changes. Every byte is hashed once, in its file, before orbax reads it: orbax logs noise when it fails.
Checksums detect damage, not forgery: load only caches that you trust.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.cache.disk.records import DiskRecord, Key, RecordGeometry, page_keys, parsed, rows_of
from jswa.cache.host.texts import Pages
from jswa.cache.layout import KVLayout
from jswa.cache.prefix.radix import common_prefix
from jswa.errors import CacheFileError
from jswa.exec.host_pages import Contents
from jswa.storage.folders import write_folder
from jswa.storage.identity import Identity, digest_of, record_geometry
from jswa.storage.snapshot import SavedText, check

FORMAT, VERSION = "jswa prefix cache", 3  # up to version 2 the tree was columns of numbers
_MANIFEST, _ARRAYS, _HEADER = "manifest.json", "arrays", "header"
_MANIFEST_BYTES = 2**20
_NO_TOKENS, _ROOT = np.zeros(0, np.int32), b""  # of the keys: the identity has the salt


def save(path: str | Path, texts: list[SavedText], contents: Contents, facts: Identity) -> None:
    """Write a cache. It replaces a cache at `path` once it is complete; any other file there is left alone.

    Raises CacheFileError, and leaves `path` as it was.
    """
    with _told(path, "cannot be saved"):
        target = Path(path).resolve()
        _require_replaceable(target)
        arrays = {_HEADER: np.frombuffer(_header(texts, facts), np.uint8)}
        if len(contents[0]):  # orbax does not store empty arrays
            arrays |= {_lane(number): lane.view(np.uint8) for number, lane in enumerate(contents)}
        # Readable by this user only: the files contain texts and their KV.
        write_folder(target, lambda folder: write_files(folder, arrays, facts), mode=0o700)


def load(
    path: str | Path, facts: Identity, layout: KVLayout, dtype: np.dtype, vocab: int
) -> tuple[list[SavedText], Contents]:
    """Read a cache and check all of it. Raises CacheFileError with the reason if it is damaged or of another engine."""
    with _told(path, "is torn"):
        folder, geometry = Path(path), record_geometry(facts, layout, dtype)
        manifest = _read_manifest(folder)
        _require_same(folder, manifest.get("identity"), facts)
        if manifest.get("sha256") != manifest_digest(manifest):
            raise CacheFileError(f"{path}: {_MANIFEST} does not agree with its checksum")
        _require_files(folder, manifest.get("files"))
        arrays = _read_arrays(folder, {_HEADER, *map(_lane, range(geometry.lanes))})
        texts, rows = _parsed(arrays.pop(_HEADER).tobytes(), geometry)
        check(texts, layout, vocab)
        shape = rows, geometry.elems * geometry.dtype.itemsize
        lanes = [arrays.get(_lane(number), np.zeros((0, shape[1]), np.uint8)) for number in range(geometry.lanes)]
        if any(lane.shape != shape for lane in lanes):
            raise CacheFileError(f"{path}: the cache is torn: pages have the wrong size, not {shape}")
        return texts, [lane.view(geometry.dtype) for lane in lanes]


@contextmanager
def _told(path: str | Path, what: str) -> Iterator[None]:
    """Turn any error of orbax, JSON, NumPy or the file system into a CacheFileError."""
    try:
        yield
    except CacheFileError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise CacheFileError(f"{path}: the cache {what}: {type(error).__name__}: {reason}") from error


def _header(texts: list[SavedText], facts: Identity) -> bytes:
    """Return the header of the record of all pages, with the texts: each without what it shares with the one before."""
    pages, own, before = dict[int, Key](), [], _NO_TOKENS
    for text, keys in zip(texts, _keys([text.tokens for text in texts], int(facts["page_size"])), strict=True):
        for kind in ("full", "local"):
            rows = zip(getattr(text.pages, kind).tolist(), keys, strict=True)
            pages |= {row: (kind, key) for row, key in rows if row}
        shared = common_prefix(before, text.tokens)
        tokens = base64.b64encode(text.tokens[shared:].astype(np.int32).tobytes()).decode()
        own.append([shared, tokens, text.age, text.hits, text.windows])
        before = text.tokens
    record = DiskRecord(digest_of(facts), _ROOT, b"", tuple(pages[row] for row in sorted(pages)), None)
    return json.dumps({**record.said, "texts": own}).encode()


def _parsed(header: bytes, geometry: RecordGeometry) -> tuple[list[SavedText], int]:
    """Return the texts that a header has, and the number of rows. Raises what a header of other JSON leads to."""
    said = json.loads(header)
    record, tokens, texts = parsed(said), [_NO_TOKENS], list[SavedText]()
    if record.identity != geometry.identity:
        raise ValueError("its pages are of another engine")
    row_of = dict(zip(record.pages, rows_of(record, geometry), strict=True))
    for shared, more, *_ in said["texts"]:
        if not 0 <= shared <= len(tokens[-1]):
            raise ValueError("a text shares more than the one before has")
        tokens.append(np.concatenate([tokens[-1][:shared], np.frombuffer(base64.b64decode(more), np.int32)]))
    keys_of = _keys(tokens[1:], geometry.page_size)
    for (*_, age, hits, windows), text, keys in zip(said["texts"], tokens[1:], keys_of, strict=True):
        rows = [np.array([1 + row_of.get((kind, key), -1) for key in keys], np.intp) for kind in ("full", "local")]
        marks = [(end, branch, last, uses) for end, branch, last, uses in windows]
        texts.append(SavedText(text, Pages(*rows), age, hits, marks))
    return texts, sum(geometry.rows(key) for key in record.pages)


def _keys(texts: list[Int[np.ndarray, " T"]], page_size: int) -> Iterator[list[bytes]]:
    """Yield the keys of the pages of each text."""
    before, keys = _NO_TOKENS, list[bytes]()
    for tokens in texts:
        whole = common_prefix(before, tokens) // page_size
        more = page_keys(keys[whole - 1] if whole else _ROOT, tokens[whole * page_size :], page_size)
        before, keys = tokens, keys[:whole] + more
        yield keys


def _lane(number: int) -> str:
    return f"lane_{number:03}"


def write_files(folder: Path, arrays: dict[str, np.ndarray], facts: Identity) -> None:
    """Write the files of a cache to a folder."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / _ARRAYS, args=ocp.args.PyTreeSave(arrays))
    manifest = {"format": FORMAT, "identity": facts, "files": _file_digests(folder)}
    manifest["sha256"] = manifest_digest(manifest)
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _require_replaceable(path: Path) -> None:
    """Raise CacheFileError if `path` holds anything but a saved cache, whole or torn."""
    if not os.path.lexists(path):
        return
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {""}
    if not names:
        return
    if not names <= {_MANIFEST, _ARRAYS} or _read_manifest(path).get("format") != FORMAT:
        raise CacheFileError(f"{path} is not a saved cache: it is left alone; choose another path, or delete it")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise CacheFileError(f"{path} is not a saved cache: it has no {_MANIFEST}")
    with file.open("rb") as stream:
        text = stream.read(_MANIFEST_BYTES)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(f"{path}: {_MANIFEST} is torn: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CacheFileError(f"{path} is not a saved cache: its {_MANIFEST} is another's")
    return manifest


def _require_same(path: Path, theirs: object, ours: Identity) -> None:
    """Raise CacheFileError for the first field in which a cache differs from what this engine needs."""
    found = theirs if isinstance(theirs, dict) else {}
    # An option that only one of them has, such as an adapter, is named before the digests that it changes too.
    more, fewer = sorted((found, ours), key=len, reverse=True)
    for name in dict.fromkeys((*more, *fewer)):
        if found.get(name) != ours.get(name):
            shown = repr(found.get(name))
            shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
            raise CacheFileError(f"{path}: {name[:80]} of the cache is {shown}, this engine's is {ours.get(name)!r}")


def _read_arrays(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a cache by name, after checking that they have these names, are of bytes and fit memory."""
    import orbax.checkpoint as ocp

    folder = path.resolve() / _ARRAYS
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata.tree
        if not {_HEADER} <= set(stored) <= names or any(array.dtype != np.uint8 for array in stored.values()):
            raise ValueError("its arrays are not those of a cache of this engine")
        size = sum(math.prod(array.shape) for array in stored.values())
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise CacheFileError(f"{path}: the cache of {size} bytes is larger than this machine's memory")
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
        restore = ocp.args.PyTreeRestore(item=dict.fromkeys(stored, 0), restore_args=as_numpy)
        arrays: dict[str, np.ndarray] = checkpointer.restore(folder, args=restore)
    return arrays


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own `sha256`."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _file_digests(folder: Path) -> dict[str, str]:
    """Return the checksums of the files below `arrays`, by path."""
    digests = {}
    for path in sorted((folder / _ARRAYS).rglob("*")):
        if path.is_file():
            with path.open("rb") as stream:
                digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _require_files(folder: Path, listed: object) -> None:
    """Raise CacheFileError if the files differ from the manifest in any byte."""
    wanted = listed if isinstance(listed, dict) else {}
    found = _file_digests(folder)
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise CacheFileError(f"{folder}: the file {name[:100]} is missing")
        if found[name] != wanted.get(name):
            raise CacheFileError(f"{folder}: the file {name} is torn, or does not belong there")

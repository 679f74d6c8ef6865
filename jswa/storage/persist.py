"""A prefix cache on disk.

    path/manifest.json   the identity of model, weights, dtype, layout and salt; arrays; checksums of every file
    path/arrays/         the arrays, as orbax writes them

A cache is written to a temporary folder and renamed once it is complete. Loading reads and checks all of it before the
engine changes. Every byte is hashed once, in its file, before orbax reads it: orbax logs noise when it fails.
Checksums detect damage, not forgery: load only caches that you trust.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.cache.prefix.radix import root_key
from jswa.config import Limits
from jswa.errors import CacheFileError
from jswa.model.lora import without_adapters
from jswa.model.transformer import Params
from jswa.storage.folders import write_folder
from jswa.storage.page_copies import Contents
from jswa.storage.snapshot import CacheSnapshot, check

FORMAT, VERSION = "jswa prefix cache", 2
_MANIFEST, _ARRAYS = "manifest.json", "arrays"
_MANIFEST_BYTES = 2**20
_SAMPLES = 64
_TYPES = {"tokens": "int32", "local": "uint8", "window_branch": "uint8"}  # other columns of a snapshot are int64

Identity = dict[str, str]


def identity(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    dtype: np.dtype,
    salt: str,
    *,
    deterministic: str = "",
    adapter: str = "",
) -> Identity:
    """Return the facts that must be equal for a saved cache to be valid, in the order of comparison.

    Args:
        deterministic: what else the bits of the KV depend on, if the engine is deterministic.
        adapter: digest of the LoRA adapter that the texts ran with, if any. Other adapters are ignored.
    """
    own = {"adapter": adapter} if adapter else {}
    return {
        "version": str(VERSION),
        "dtype": str(dtype),
        "page_size": str(layout.page_size),
        "tensor_parallel_size": str(layout.devices),
        "model": _sha256(repr(model).encode()),
        "weights": weights_digest(without_adapters(params)),
        "layout": repr(dataclasses.replace(layout, layers=())),
        "deterministic": deterministic,
        **own,
        "salt": _sha256(root_key(salt, adapter or None).encode(errors="surrogatepass")),
    }


def bits_of(limits: Limits) -> str:
    """Return the further conditions of the KV's bits if the engine is deterministic, else an empty string."""
    if not limits.deterministic:
        return ""
    # The shape of the step, if there is one, and the compiler.
    shape = f"{limits.max_rows} rows, {limits.max_tokens} tokens" if limits.one_bucket else "rows alone"
    return f"{shape}, jax {jax.__version__}, {jax.devices()[0].device_kind}"


def save(path: str | Path, snapshot: CacheSnapshot, contents: Contents, identity: Identity) -> None:
    """Write a cache. It replaces a cache at `path` once it is complete; any other file there is left alone.

    Raises CacheFileError, and leaves `path` as it was.
    """

    def write() -> None:
        target = Path(path).resolve()
        _require_replaceable(target)
        # Readable by this user only: the files contain texts and their KV.
        write_folder(target, lambda folder: _write(folder, _to_arrays(snapshot, contents), identity), mode=0o700)

    _guard(path, "cannot be saved", write)


def load(
    path: str | Path, identity: Identity, layout: KVLayout, dtype: np.dtype, vocab: int
) -> tuple[CacheSnapshot, Contents]:
    """Read a cache and check all of it. Raises CacheFileError with the reason if it is damaged or of another engine."""

    def read() -> tuple[CacheSnapshot, Contents]:
        folder = Path(path)
        manifest = _read_manifest(folder)
        _require_same(folder, manifest.get("identity"), identity)
        listed = manifest.get("arrays")
        if manifest.get("sha256") != manifest_digest(manifest) or not isinstance(listed, dict):
            raise CacheFileError(f"{path}: {_MANIFEST} does not agree with its checksum")
        _require_files(folder, manifest.get("files"))
        types = _types(layout, dtype)
        if not set(listed) <= set(types):
            raise CacheFileError(f"{path}: {_MANIFEST} lists arrays that no cache has")
        arrays = _read_arrays(folder, listed)
        for name, array in arrays.items():
            if _describe(array) != listed[name] or str(array.dtype) != types[name]:
                raise CacheFileError(f"{path}: the array {name!r} is torn")
        return _from_arrays(arrays, layout, dtype, vocab)

    return _guard(path, "is torn", read)


def _guard[T](path: str | Path, what: str, action: Callable[[], T]) -> T:
    """Run an action; turn any error of orbax, JSON, NumPy or the file system into a CacheFileError."""
    try:
        return action()
    except CacheFileError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise CacheFileError(f"{path}: the cache {what}: {type(error).__name__}: {reason}") from error


def _to_arrays(snapshot: CacheSnapshot, contents: Contents) -> dict[str, np.ndarray]:
    """Return all arrays by name, as bits. Empty arrays are left out: orbax does not store them."""
    arrays = {
        f.name: getattr(snapshot, f.name).astype(_TYPES.get(f.name, "int64")) for f in dataclasses.fields(snapshot)
    }
    for number, lane in enumerate(contents):
        arrays[_lane(number)] = lane.view(f"uint{8 * lane.itemsize}")
    arrays["sizes"] = _sizes(snapshot)
    return {name: array for name, array in arrays.items() if array.size}


def _from_arrays(
    arrays: dict[str, np.ndarray], layout: KVLayout, dtype: np.dtype, vocab: int
) -> tuple[CacheSnapshot, Contents]:
    """Rebuild snapshot and contents. Raises ValueError for arrays that cannot have been saved."""
    types = _types(layout, dtype)
    columns = {f.name: arrays.get(f.name, np.zeros(0, types[f.name])) for f in dataclasses.fields(CacheSnapshot)}
    if any(column.ndim != 1 for column in columns.values()):
        raise ValueError("an array has a wrong shape")
    for name in ("local", "window_branch"):
        columns[name] = columns[name].astype(bool)
    snapshot = CacheSnapshot(**columns)
    check(snapshot, layout, vocab)
    if arrays["sizes"].tolist() != _sizes(snapshot).tolist():
        raise ValueError("arrays are missing")
    slots = len(snapshot.local) * (layout.full is not None) + layout.pages_per_slab * int(snapshot.local.sum())
    shape = (slots, layout.slab_elems // layout.pages_per_slab)
    numbers = range(layout.num_lanes * layout.devices)
    lanes = [arrays.get(_lane(n), np.zeros((0, shape[1]), types[_lane(n)])) for n in numbers]
    if any(lane.shape != shape for lane in lanes):
        raise ValueError(f"pages have the wrong size, not {shape}")
    return snapshot, [lane.view(dtype) for lane in lanes]


def _types(layout: KVLayout, dtype: np.dtype) -> dict[str, str]:
    """Return the type on disk of every array that a cache may have."""
    columns = {f.name: _TYPES.get(f.name, "int64") for f in dataclasses.fields(CacheSnapshot)}
    lanes = {_lane(number): f"uint{8 * dtype.itemsize}" for number in range(layout.num_lanes * layout.devices)}
    return columns | lanes | {"sizes": "int64"}


def _lane(number: int) -> str:
    return f"lane_{number:03}"


def _sizes(snapshot: CacheSnapshot) -> np.ndarray:
    """Return the lengths of the columns: an array that even the cache of an empty tree has."""
    return np.array([len(getattr(snapshot, f.name)) for f in dataclasses.fields(snapshot)], np.int64)


def _write(folder: Path, arrays: dict[str, np.ndarray], identity: Identity) -> None:
    """Write a cache to a folder."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / _ARRAYS, args=ocp.args.PyTreeSave(arrays))
    listed = {name: _describe(array) for name, array in arrays.items()}
    manifest = {"format": FORMAT, "identity": identity, "arrays": listed, "files": _file_digests(folder)}
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
    for name, value in ours.items():
        if found.get(name) != value:
            shown = repr(found.get(name))
            shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
            raise CacheFileError(f"{path}: {name} of the cache is {shown}, this engine's is {value!r}")


def _read_arrays(path: Path, listed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Read the listed arrays, after checking that their sizes agree with the manifest and fit memory."""
    import orbax.checkpoint as ocp

    folder = path.resolve() / _ARRAYS
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata.tree
        shapes = {name: list(stored[name].shape) for name in listed}
        if shapes != {name: entry["shape"] for name, entry in listed.items()}:
            raise CacheFileError(f"{path}: the arrays are not those that {_MANIFEST} lists")
        size = sum(int(np.prod(shapes[name], dtype=object)) * np.dtype(stored[name].dtype).itemsize for name in listed)
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise CacheFileError(f"{path}: the cache of {size} bytes is larger than this machine's memory")
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in listed}
        restore = ocp.args.PyTreeRestore(item=dict.fromkeys(listed, 0), restore_args=as_numpy)
        arrays: dict[str, np.ndarray] = checkpointer.restore(folder, args=restore)
    return arrays


def _describe(array: np.ndarray) -> dict[str, Any]:
    """Return shape and type of an array, as in the manifest."""
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own `sha256`."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return _sha256(json.dumps(said, sort_keys=True).encode())


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


def weights_digest(params: Params) -> str:
    """Return a digest of names, shapes, types and up to 64 evenly spaced elements of every parameter."""
    digest = hashlib.sha256()
    # Sample shard by shard: no device ever holds a whole parameter.
    samples = jax.device_get({name: [_sample(x.data) for x in _shards(value)] for name, value in params.items()})
    for name, value in sorted(params.items()):
        digest.update(f"{name} {value.shape} {value.dtype}\n".encode())
        for sample in samples[name]:
            digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()


def _shards(value: jax.Array) -> list[Any]:
    """Return the shards of an array without replicas."""
    return [shard for shard in value.addressable_shards if shard.replica_id == 0]


@jax.jit
def _sample(value: jax.Array) -> jax.Array:
    flat = value.reshape(-1)
    return jax.lax.slice(flat, [0], [flat.size], [max(1, -(-flat.size // _SAMPLES))])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

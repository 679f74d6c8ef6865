"""Parameters as the engine holds them, on disk: what `jswa convert` writes beside a model's config and tokenizer.

    folder/jswa_weights.json   whose parameters they are, and of each the shape, type and checksum
    folder/weights/            the parameters, by name, as orbax writes them

Nothing has to be cast, put together or transposed, so a start takes as long as the bytes take to be read. Orbax is told
to write each parameter as one plain run of bytes (zarr 2, no compression, one chunk), which is read here without orbax;
orbax itself can restore the folder `weights` with any sharding. Checksums find what is torn; they do not tell who wrote
it: load only what you would run.
"""

import dataclasses
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.json_object import read_object, shown
from jswa.model.place import empty, load_all, placed
from jswa.model.transformer import Params, param_shapes

MANIFEST, WEIGHTS = "jswa_weights.json", "weights"
FORMAT, VERSION = "jswa weights", 1
_CHUNK_BYTES = 2**19
_DTYPES = ("float32", "bfloat16", "float16")


def is_converted(folder: Path) -> bool:
    """Whether a folder has parameters in this form."""
    return os.path.lexists(folder / MANIFEST)


def write_converted(folder: Path, model: ModelConfig, params: Params) -> None:
    """Write the parameters and their manifest into a new folder."""
    import orbax.checkpoint as ocp  # a fifth of a second, and only here

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.resolve() / WEIGHTS, args=ocp.args.PyTreeSave(params))
    entries = {}
    for name, value in params.items():
        if _read_zarray(folder, name) != _zarray(value.shape, np.dtype(value.dtype)):
            raise CheckpointError(f"orbax has written {name} in a form that jswa cannot read: {folder}")
        checksum = _read(folder, name, empty(value.shape, np.dtype(value.dtype)))
        entries[name] = {"shape": list(value.shape), "dtype": str(value.dtype), "crc32": checksum}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": _identity(model),
        "tied": model.tie_embeddings,
        "parameters": entries,
    }
    manifest["sha256"] = _digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def load_converted(folder: Path, model: ModelConfig, dtype: jnp.dtype) -> tuple[ModelConfig, Params]:
    """The parameters of a folder whose config says `model`, cast to `dtype` where they are of another type.

    Raises CheckpointError with the reason where they are torn, of another model, or of another version of jswa.
    """
    manifest = _read_manifest(folder)
    model = dataclasses.replace(model, tie_embeddings=manifest.get("tied") is True)
    if manifest.get("model") != _identity(model):
        raise CheckpointError(
            f"{folder}: {MANIFEST} is of another model than config.json, or was written by another version of jswa: "
            "convert the checkpoint again"
        )
    shapes = param_shapes(model, dtype)
    stored = _entries(folder, manifest.get("parameters"), shapes)

    def load(name: str) -> jax.Array:
        kind, checksum = stored[name]
        array = empty(shapes[name].shape, kind)
        if _read(folder, name, array) != checksum:
            raise CheckpointError(f"{folder}: the parameter {name} is torn: it does not agree with its checksum")
        if kind != dtype:
            cast = empty(array.shape, np.dtype(dtype))
            cast[...] = array
            array = cast
        return placed(array)

    return model, load_all(load, shapes)


def _entries(folder: Path, entries: object, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[np.dtype, int]]:
    """Type and checksum of each parameter, whose files are as long as they must be. Raises CheckpointError."""
    if not isinstance(entries, dict) or entries.keys() != shapes.keys():
        raise CheckpointError(f"{folder}: {MANIFEST} does not list the parameters that config.json asks for")
    found: dict[str, tuple[np.dtype, int]] = {}
    for name, shape in shapes.items():
        entry = entries[name] if isinstance(entries[name], dict) else {}
        kind, checksum = entry.get("dtype"), entry.get("crc32")
        if entry.get("shape") != list(shape.shape) or kind not in _DTYPES or not isinstance(checksum, int):
            raise CheckpointError(
                f"{folder}: {MANIFEST} has {name} = {shown(entry)}: must be of shape {list(shape.shape)}, of a type of "
                f"{', '.join(_DTYPES)}, and have a checksum"
            )
        found[name] = jnp.dtype(kind), checksum
        file = _file(folder, name, len(shape.shape))
        if _read_zarray(folder, name) != _zarray(shape.shape, found[name][0]):
            raise CheckpointError(f"{folder}: {file.with_name('.zarray')} is torn, or another's")
        size, length = shape.size * found[name][0].itemsize, _length(file)
        if length != size:
            raise CheckpointError(f"{folder}: the parameter {name} is torn: its file has {length} bytes, not {size}")
    return found


def _read(folder: Path, name: str, out: Shaped[np.ndarray, "..."]) -> int:
    """Fill an array with a parameter's bytes; returns their checksum. Raises CheckpointError."""
    view = memoryview(out.reshape(-1).view(np.uint8))
    done = checksum = 0
    try:
        with _file(folder, name, out.ndim).open("rb", buffering=0) as file:
            while done < len(view):
                count = file.readinto(view[done : done + _CHUNK_BYTES])
                if not count:
                    raise CheckpointError(f"{folder}: the parameter {name} is torn: its file ends at {done} bytes")
                checksum = zlib.crc32(view[done : done + count], checksum)  # while the cache holds them
                done += count
    except OSError as error:
        raise CheckpointError(f"{folder}: the parameter {name} cannot be read: {error}") from error
    return checksum


def _file(folder: Path, name: str, axes: int) -> Path:
    """The one chunk of a parameter."""
    return folder / WEIGHTS / name / ".".join("0" * axes)


def _length(path: Path) -> int:
    """Bytes of a regular file; -1 where there is none."""
    return path.stat().st_size if path.is_file() else -1


def _zarray(shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """Zarr's description of an array in one chunk of plain bytes."""
    kind = {"float32": "<f4", "float16": "<f2"}.get(dtype.name, dtype.name)
    return {
        "chunks": list(shape),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": kind,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }


def _read_zarray(folder: Path, name: str) -> dict[str, Any]:
    return read_object(folder / WEIGHTS / name / ".zarray")


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_object(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: {MANIFEST} is another's: format = {shown(manifest.get('format'))}")
    if manifest.get("version") != VERSION:
        found = shown(manifest.get("version"))
        raise CheckpointError(f"{folder}: {MANIFEST}: version = {found}: must be {VERSION}: convert it again")
    if manifest.get("sha256") != _digest(manifest):
        raise CheckpointError(f"{folder}: {MANIFEST} is torn: it does not agree with its checksum")
    return manifest


def _identity(model: ModelConfig) -> str:
    """What decides how parameters are laid out and read; not where texts end, nor how long they may be."""
    same = dataclasses.replace(model, eos_token_ids=(), max_position=0)
    return hashlib.sha256(repr(same).encode()).hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

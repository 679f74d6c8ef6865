"""Converted checkpoints: parameters as the engine stores them, which `jswa convert` writes beside config and tokenizer.

    folder/jswa_weights.json   manifest: identity of the model; shape, dtype and checksum of each parameter
    folder/weights/            the parameters by name, as orbax writes them

No tensor has to be cast, fused or transposed, so loading takes as long as reading the bytes. Orbax writes each
parameter as one chunk of plain bytes (zarr 2, no compression), and this module reads it without orbax. Orbax itself can
restore the folder `weights` with any sharding. Checksums detect damage but do not authenticate the author: load only
folders that you trust.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Shaped

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.forms.base.form import FLOATS, Form, ScaleCounts, Spec, key_of
from jswa.forms.plain import PLAIN
from jswa.forms.table import FORMS, form_at
from jswa.model.attention import scales_name
from jswa.model.binding import param_shapes
from jswa.model.transformer import Params
from jswa.model.weights.packed.table import READINGS
from jswa.model.weights.placement import Placement, empty, load_all
from jswa.storage.checkpoint_files import open_file
from jswa.storage.json_object import read_object, shown
from pallas_kernels import Linear

MANIFEST, WEIGHTS = "jswa_weights.json", "weights"
FORMAT, VERSION = "jswa weights", 1
_CHUNK_BYTES = 2**19


def is_converted(folder: Path) -> bool:
    """Return whether a folder is a converted checkpoint."""
    return os.path.lexists(folder / MANIFEST)


def write_converted(folder: Path, model: ModelConfig, params: Params) -> None:
    """Write the parameters and their manifest into a new folder.

    Raises CheckpointError if orbax has written an array in a form that jswa cannot read.
    """
    import orbax.checkpoint as ocp  # takes 0.2 s, and only conversion needs it

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    noise = logging.getLogger("absl")  # orbax warns that it skips a step that this format does not have
    level = noise.level
    noise.setLevel(logging.ERROR)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.resolve() / WEIGHTS, args=ocp.args.PyTreeSave(params))
    finally:
        noise.setLevel(level)
    entries = {}
    for name, value in params.items():
        if _read_zarray(folder, name) != _zarray(value.shape, np.dtype(value.dtype)):
            raise CheckpointError(f"{folder}: orbax has written {name} in a form that jswa cannot read")
        checksum = _read(folder, name, empty(value.shape, np.dtype(value.dtype)))
        entries[name] = {"shape": list(value.shape), "dtype": str(value.dtype), "crc32": checksum}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": _identity(model),
        "tied": model.tie_embeddings,
        "parameters": entries,
    }
    manifest["sha256"] = manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def load_converted(
    folder: Path,
    model: ModelConfig,
    dtype: jnp.dtype,
    reformat: Callable[[str, Params, Placement], Params],
    mesh: Mesh | None = None,
    linear: Linear = "xla",
) -> tuple[ModelConfig, Params]:
    """Load the parameters of a converted checkpoint.

    Raises CheckpointError with the reason if the folder is damaged, or was written for another model or by another
    version of jswa.

    Args:
        model: the folder's config.
        dtype: floating-point parameters of another dtype are cast to it.
        reformat: changes the storage format of a matrix (`formats.reformat`).
        mesh: each of its devices gets its tensor parallel shard.
        linear: the kernel of linear layers. But for "mosaic" those with scales of blocks get a scale per output.
    """
    manifest = _read_manifest(folder)
    model = dataclasses.replace(model, tie_embeddings=manifest.get("tied") is True)
    if manifest.get("model") != _identity(model):
        raise CheckpointError(
            f"{folder}: {MANIFEST} does not belong to config.json, or was written by another version of jswa: "
            "convert the checkpoint again"
        )
    shapes = param_shapes(model, dtype)
    shapes |= _kv_scale_shapes(model, manifest.get("parameters"))
    entries, placement = _entries(folder, manifest.get("parameters"), shapes), Placement(model, mesh)

    def read(entry: _Entry) -> Shaped[np.ndarray, "..."]:
        array = empty(entry.shape, entry.dtype)
        if _read(folder, entry.name, array) != entry.checksum:
            raise CheckpointError(f"{folder}: the parameter {entry.name} is damaged: its checksum does not match")
        own = shapes[entry.name].dtype if entry.name in shapes else entry.dtype  # a quantized matrix is not in shapes
        if entry.dtype.name in FLOATS and entry.dtype != own:
            cast = empty(array.shape, np.dtype(own))
            cast[...] = array
            array = cast
        return array

    def load(name: str) -> Params:
        arrays = {entry.name: read(entry) for entry in entries[name]}
        form, _ = form_at(name, arrays)
        fitted = next((reading.fitted for reading in READINGS if reading.form is form), None)
        if fitted is not None:
            arrays = fitted(name, arrays, shapes[name], placement, linear)
        return reformat(name, {key: placement.put(key, array) for key, array in arrays.items()}, placement)

    return model, load_all(load, shapes)


class _Entry(NamedTuple):
    """One parameter of the manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    checksum: int


def _candidates(name: str, shape: tuple[int, ...], listed: Mapping[str, object]) -> list[dict[str, Spec]]:
    """Return what the arrays of a matrix may be, by their names: one candidate for each form."""
    if name.endswith(".scales"):
        return [{name: Spec(shape, ("float32",))}]
    if len(shape) < 2:
        return [{name: Spec(shape, FLOATS)}]
    found: list[dict[str, Spec]] = []
    for form in FORMS:
        counts = _counts(form, name, len(shape), listed) if form is PLAIN or form.scheme else None
        specs = None if counts is None else form.specs(name, shape, counts)
        found += [] if specs is None else [{key_of(name, end): spec for end, spec in specs.items()}]
    return found


def _counts(form: Form, name: str, axes: int, listed: Mapping[str, object]) -> ScaleCounts | None:
    """Return how many scales a matrix has by the manifest; None if it should say so and does not."""
    if not form.counted:
        return ScaleCounts()
    entry = listed.get(key_of(name, form.counted))
    found = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(found, list) or len(found) != axes or not all(isinstance(n, int) and n > 0 for n in found[-2:]):
        return None
    groups, shares = found[-2:]
    return ScaleCounts(groups, shares, any(key_of(name, end) in listed for end in form.optional))


def _kv_scale_shapes(model: ModelConfig, listed: object) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the KV scales that the manifest lists; a checkpoint may have none."""
    names = listed if isinstance(listed, dict) else {}
    heads = {scales_name(index): layer.attention.num_kv_heads for index, layer in enumerate(model.layers)}
    return {name: jax.ShapeDtypeStruct((2, n), jnp.float32) for name, n in heads.items() if name in names}  # type: ignore[no-untyped-call]


def _entries(folder: Path, listed: object, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, list[_Entry]]:
    """Return the checked entries of each matrix of the model. Raises CheckpointError."""
    listed = listed if isinstance(listed, dict) else {}
    found: dict[str, list[_Entry]] = {}
    for name, shape in shapes.items():
        candidates = _candidates(name, shape.shape, listed)
        form = next((specs for specs in candidates if specs.keys() <= listed.keys()), {})
        found[name] = [_entry(folder, one, listed[one], *form[one]) for one in form]
    known = {entry.name for entries in found.values() for entry in entries}
    if not all(found.values()) or known != listed.keys():
        raise CheckpointError(f"{folder}: {MANIFEST} must list the parameters that config.json asks for")
    return found


def _entry(folder: Path, name: str, listed: object, shape: tuple[int, ...], kinds: tuple[str, ...]) -> _Entry:
    """Check one entry of the manifest against the expected shape and dtypes, and against its files."""
    entry = listed if isinstance(listed, dict) else {}
    kind, checksum = entry.get("dtype"), entry.get("crc32")
    if entry.get("shape") != list(shape) or kind not in kinds or not isinstance(checksum, int):
        raise CheckpointError(
            f"{folder}: {MANIFEST}: {name} = {shown(listed)}: must have shape {list(shape)}, type "
            f"{' or '.join(kinds)} and a checksum"
        )
    dtype, file = np.dtype(jnp.dtype(kind)), _file(folder, name, len(shape))
    if _read_zarray(folder, name) != _zarray(shape, dtype):
        raise CheckpointError(f"{folder}: {file.with_name('.zarray')} is damaged")
    size, length = math.prod(shape) * dtype.itemsize, _length(file)
    if length != size:
        raise CheckpointError(
            f"{folder}: the parameter {name} is damaged: its file has {length} bytes, must have {size}"
        )
    return _Entry(name, shape, dtype, checksum)


def _read(folder: Path, name: str, out: Shaped[np.ndarray, "..."]) -> int:
    """Read a parameter's bytes into an array, and return their checksum. Raises CheckpointError."""
    view = memoryview(out.reshape(-1).view(np.uint8))
    done = checksum = 0
    try:
        with open_file(_file(folder, name, out.ndim), folder) as file:
            while done < len(view):
                count = file.readinto(view[done : done + _CHUNK_BYTES])
                if not count:
                    raise CheckpointError(f"{folder}: the parameter {name} is damaged: its file ends at {done} bytes")
                checksum = zlib.crc32(view[done : done + count], checksum)  # while they are in the CPU cache
                done += count
    except OSError as error:
        raise CheckpointError(f"{folder}: the parameter {name} cannot be read: {error}") from error
    return checksum


def _file(folder: Path, name: str, axes: int) -> Path:
    """Return the path of a parameter's only chunk."""
    return folder / WEIGHTS / name / ".".join("0" * axes)


def _length(path: Path) -> int:
    """Return the size of a regular file in bytes; -1 if there is none."""
    return path.stat().st_size if path.is_file() else -1


def _zarray(shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """Return zarr's description of an array in one chunk of plain bytes."""
    kind = {"float32": "<f4", "float16": "<f2", "int8": "|i1", "uint8": "|u1", "int32": "<i4"}.get(
        dtype.name, dtype.name
    )
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
    return read_object(folder / WEIGHTS / name / ".zarray", folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_object(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: {MANIFEST}: format = {shown(manifest.get('format'))}: must be {FORMAT}")
    if manifest.get("version") != VERSION:
        found = shown(manifest.get("version"))
        raise CheckpointError(
            f"{folder}: {MANIFEST}: version = {found}: must be {VERSION}: convert the checkpoint again"
        )
    if manifest.get("sha256") != manifest_digest(manifest):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged: its checksum does not match")
    return manifest


def _identity(model: ModelConfig) -> str:
    """Return a digest of the config, without end tokens and maximum length, which do not concern the parameters."""
    same = dataclasses.replace(model, eos_token_ids=(), max_position=0)
    return hashlib.sha256(repr(same).encode()).hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own `sha256`."""
    signed = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(signed, sort_keys=True).encode()).hexdigest()

"""The tensors of a checkpoint folder, checked as a whole, and a reader of rows: safetensors files, or a GGUF's view."""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jswa.errors import CheckpointError
from jswa.gguf.checkpoint import read_checkpoint
from jswa.gguf.file.names import shard_names
from jswa.gguf.made import Made, Turned, read_made
from jswa.gguf.pointer import pointed
from jswa.model.hf.tensor_map import canonical_name
from jswa.model.weights.safetensors_header import StoredTensor, open_weights, read_header
from jswa.storage.checkpoint_files import open_file, read_into
from jswa.storage.hub import INDEX, SINGLE
from jswa.storage.json_object import label, read_object, shown

_BLOCK = 2**16  # bytes
# ml_dtypes, because NumPy itself has neither bfloat16 nor float8, and safetensors' NumPy reader fails on float8.
TYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),  # exponents; see `dequantize`
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
FLOATS = ("F64", "F32", "F16", "BF16")


class Tensor(NamedTuple):
    """One tensor of a safetensors file that is not read yet; or, with `made`, one that is made of GGUF tensors."""

    path: Path
    key: str
    stored: StoredTensor
    made: Made | None = None

    @property
    def where(self) -> str:
        """File and key, for error texts."""
        return f"{self.path.name}: {label(self.key)}"

    @property
    def dtype(self) -> str:
        """The type, as safetensors names it."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""
        return self.stored.shape

    def require_shape(self, *shapes: tuple[int, ...], by: str = "the config asks for") -> None:
        """Raise CheckpointError unless the shape is one of these; `by` says in the error where they come from."""
        if self.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise CheckpointError(f"{self.where} has shape {shown(list(self.shape))}, {by} {wanted}")

    def require_type(self, *types: str) -> None:
        """Raise CheckpointError unless the type is one of these."""
        if self.dtype not in types:
            raise CheckpointError(f"{self.where} has type {self.dtype}: must be one of {', '.join(types)}")


def stored_tensors(folder: Path, name_of: Callable[[str], str | None] = canonical_name) -> dict[str, Tensor]:
    """Return all tensors that a text decoder may need, by canonical name, as the headers describe them.

    Args:
        name_of: returns a tensor's canonical name, or None if it is not needed.

    Raises CheckpointError that names file and key if a header is invalid, if a tensor is stored twice, or if the index
    and the files disagree.
    """
    gguf = pointed(folder)
    if gguf is not None:
        return _made_tensors(gguf, name_of)
    weight_map = _weight_map(folder)
    listed: dict[str, list[str]] = {} if weight_map else {SINGLE: []}
    for key, file in weight_map.items():
        listed.setdefault(file, []).append(key)
    tensors: dict[str, Tensor] = {}
    seen: dict[str, str] = {}  # includes tensors that a text decoder does not need
    for file in sorted(listed):
        header = read_header(folder / file)
        for key, stored in header.items():
            name = name_of(key)
            first = seen.get(key) or (tensors[name].path.name if name in tensors else None)
            if first is not None:
                raise CheckpointError(f"{file}: {label(key)} is stored twice in this checkpoint, first in {first}")
            if weight_map.get(key, file) != file:
                raise CheckpointError(f"{file}: {label(key)} is here, but {INDEX} maps it to {weight_map[key]}")
            seen[key] = file
            if name is not None:
                tensors[name] = Tensor(folder / file, key, stored)
        for key in listed[file]:
            if key not in header:
                raise CheckpointError(f"{INDEX}: weight_map maps {label(key)} to {file}, which does not have it")
    return tensors


def _made_tensors(gguf: Path, name_of: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Return the tensors of a GGUF checkpoint."""
    found = {}
    for key, made in read_checkpoint(gguf).tensors.items():
        if (name := name_of(key)) is not None:
            if made.values:  # the metadata have the numbers
                found[name] = Tensor(gguf, key, StoredTensor(made.dtype, made.shape, 0, 0), made)
                continue
            source = made.sources[0]
            stored = StoredTensor(made.dtype, made.shape, source.begin, source.begin + source.size)
            found[name] = Tensor(source.path, source.name, stored, made)
    return found


def weights_fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and some bytes of the weight files, to check that hosts have the same files.

    Three blocks of each file are read; they nearly always differ between two trainings of one architecture. Raises
    CheckpointError if a file cannot be read.
    """
    digest = hashlib.sha256()
    files = [*folder.glob("*.safetensors"), *(folder / "weights").rglob("*")]  # `jswa convert` writes the latter
    gguf = pointed(folder)
    if gguf is not None:
        files, folder = [gguf.with_name(name) for name in shard_names(gguf.name)], gguf.parent
    for path in sorted(path for path in files if path.is_file()):
        try:
            with open_file(path, folder) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.relative_to(folder)} {size}\n".encode())
                for start in (0, size // 2, size - _BLOCK):
                    file.seek(max(0, start))
                    digest.update(file.read(_BLOCK))
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    return digest.hexdigest()


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the index's file names by tensor; empty for a checkpoint of one file."""
    index = folder / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(folder / SINGLE):
            found = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".gguf", ".pt", ".pth")]
            also = f": it has {found[0]}, and jswa reads weights in safetensors only" if found else ""
            if found and found[0].endswith(".gguf"):
                also = f": it has {found[0]}: name that file in place of its folder"
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{also}")
        return {}
    weight_map = read_object(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(f"{INDEX}: weight_map = {shown(weight_map)}: must map tensor names to file names")
    for file, key in {file: key for key, file in weight_map.items()}.items():
        # A file may be a link to another folder, as in the hub's cache, but a name must not leave the folder.
        if file in ("", ".", "..") or os.path.basename(file) != file or not os.path.isfile(folder / file):
            raise CheckpointError(
                f"{INDEX}: weight_map maps {label(key)} to {label(file)}, which is not a file of this checkpoint"
            )
    return weight_map


class TensorReader:
    """A context manager that keeps the files open and reads rows of tensors from any thread.

    It reads files instead of mapping them: if a mapped file is truncated, access to it kills the process, and mapped
    pages count as memory of the process.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._paths = sorted({tensor.path for tensor in tensors.values() if tensor.made is None})
        made = (tensor.made for tensor in tensors.values() if tensor.made is not None)
        self._gguf_paths = sorted({source.path for one in made for source in one.sources})
        self._files: dict[Path, tuple[int, int]] = {}
        self._gguf: dict[Path, int] = {}
        self._turned: dict[Made, Turned] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "TensorReader":
        with ExitStack() as stack:
            for path in self._paths:
                try:
                    descriptor = stack.enter_context(open_weights(path)).fileno()
                    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
                except OSError as error:
                    raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error
                self._files[path] = descriptor, 8 + length
            for path in self._gguf_paths:
                self._gguf[path] = stack.enter_context(open_file(path)).fileno()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rows(self, tensor: Tensor, begin: int, end: int, *, columns: int | None = None) -> Shaped[np.ndarray, "R C"]:
        """Return rows [begin, end) of the tensor as a matrix.

        Args:
            columns: width of the matrix; by default the size of the tensor's last axis.

        Raises CheckpointError if the file is too short.
        """
        columns = columns or (tensor.shape[-1] if tensor.shape else 1)
        if tensor.made is not None:
            return read_made(tensor.made, self._gguf, begin, end, columns, self._turned)
        dtype = TYPES[tensor.dtype]
        size = dtype.itemsize * columns
        out = np.empty((end - begin) * size, np.uint8)
        descriptor, start = self._files[tensor.path]
        read_into(memoryview(out), descriptor, start + tensor.stored.begin + begin * size, tensor.where)
        return out.view(dtype).reshape(end - begin, columns)

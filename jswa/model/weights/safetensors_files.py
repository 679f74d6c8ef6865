"""The weight files of a checkpoint folder: which tensors they hold, checked as a whole, and their bytes."""

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jswa.errors import CheckpointError
from jswa.model.hf.tensor_map import canonical_name
from jswa.model.weights.safetensors_header import Stored, read_header
from jswa.storage.json_object import label, read_object, shown

_BLOCK = 2**16  # bytes
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# NumPy's own names would not do: safetensors' NumPy reader fails on float8, which NumPy alone does not have.
TYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),  # exponents: see `dequantize`
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}


class Tensor(NamedTuple):
    """One tensor of a safetensors file, not read yet."""

    path: Path
    key: str
    stored: Stored

    @property
    def where(self) -> str:
        """File and key, for errors."""
        return f"{self.path.name}: {label(self.key)}"

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.stored.shape

    def require_shape(self, *shapes: tuple[int, ...], by: str = "the config asks for") -> None:
        """Raise CheckpointError for any other shape than these."""
        if self.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise CheckpointError(f"{self.where} has shape {shown(list(self.shape))}, {by} {wanted}")

    def require_type(self, *types: str) -> None:
        """Raise CheckpointError for any other type than these."""
        if self.dtype not in types:
            raise CheckpointError(f"{self.where} has type {self.dtype}, must be one of {', '.join(types)}")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors that a text decoder may need, by canonical name, as the headers describe them.

    Raises CheckpointError, naming file and key, where a header is wrong, where a tensor is stored twice, or where the
    index and the files disagree.
    """
    places = _weight_map(folder)
    promised: dict[str, list[str]] = {} if places else {_SINGLE: []}
    for key, file in places.items():
        promised.setdefault(file, []).append(key)
    tensors: dict[str, Tensor] = {}
    seen: dict[str, str] = {}  # also of what a text decoder does not need: no file counts twice
    for file in sorted(promised):
        header = read_header(folder / file)
        for key, stored in header.items():
            name = canonical_name(key)
            first = seen.get(key) or (tensors[name].path.name if name in tensors else None)
            if first is not None:
                raise CheckpointError(f"{file}: {label(key)} is stored twice in this checkpoint, first in {first}")
            if places.get(key, file) != file:
                raise CheckpointError(f"{file}: {label(key)} is here, but {_INDEX} places it in {places[key]}")
            seen[key] = file
            if name is not None:
                tensors[name] = Tensor(folder / file, key, stored)
        for key in promised[file]:
            if key not in header:
                raise CheckpointError(f"{_INDEX}: weight_map places {label(key)} in {file}, which does not hold it")
    return tensors


def weights_fingerprint(folder: Path) -> str:
    """Names, sizes and some bytes of the weight files: whether hosts have the same, without reading all of them.

    Three blocks of each file: checkpoints of one shape that were trained differently differ in most of them. Raises
    CheckpointError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    files = [*folder.glob("*.safetensors"), *(folder / "weights").rglob("*")]  # `jswa convert` writes the latter
    for path in sorted(path for path in files if path.is_file()):
        try:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size}\n".encode())
            with path.open("rb") as file:
                for start in (0, size // 2, size - _BLOCK):
                    file.seek(max(0, start))
                    digest.update(file.read(_BLOCK))
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    return digest.hexdigest()


def _weight_map(folder: Path) -> dict[str, str]:
    """File names by tensor, from the index; empty for a checkpoint of one file."""
    index = folder / _INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(folder / _SINGLE):
            raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        return {}
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{_INDEX}: weight_map = {shown(places)}: must map tensor names to file names")
    for file, key in {file: key for key, file in places.items()}.items():
        # A file of the folder may be a link to anywhere, as in the hub's cache; a name may not lead out of it.
        if file in ("", ".", "..") or os.path.basename(file) != file or not os.path.isfile(folder / file):
            raise CheckpointError(
                f"{_INDEX}: weight_map places {label(key)} in {label(file)}, which is not a file of this checkpoint"
            )
    return places


class Reader:
    """Reads tensors' rows, from any thread. A context manager, which holds the files open.

    Plain reads and not a memory map: a map of a file that is cut while it is read ends the process, and its pages count
    as the process's memory.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._paths = sorted({tensor.path for tensor in tensors.values()})
        self._files: dict[Path, tuple[int, int]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Reader":
        with ExitStack() as stack:
            for path in self._paths:
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                    stack.callback(os.close, descriptor)
                    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
                except OSError as error:
                    raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error
                self._files[path] = descriptor, 8 + length
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rows(self, tensor: Tensor, begin: int, end: int, *, columns: int | None = None) -> Shaped[np.ndarray, "R C"]:
        """Rows [begin, end) of the tensor as a matrix of so many columns, or else those of its last axis.

        Raises CheckpointError where the file ends before they do.
        """
        columns = columns or (tensor.shape[-1] if tensor.shape else 1)
        dtype = TYPES[tensor.dtype]
        size = dtype.itemsize * columns
        out = np.empty((end - begin) * size, np.uint8)
        descriptor, start = self._files[tensor.path]
        view, offset, done = memoryview(out), start + tensor.stored.begin + begin * size, 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{tensor.where} cannot be read: {error}") from error
            if count == 0:
                raise CheckpointError(f"{tensor.where} cannot be read: the file is shorter than it was")
            done += count
        return out.view(dtype).reshape(end - begin, columns)

"""Weights that another process hands over: a safetensors file in shared memory, with a checksum of each tensor.

    trainer:  with handed_over(params) as path:
                  …ask the engine's process to update_weights(path)…
    engine:   dict(read_handed_over(path))

The metadata of the file have a key `crc32`: a JSON object of the CRC-32 of each tensor's bytes, by name. Checksums
detect a file that was not written whole or has changed since, but do not authenticate who wrote it.
"""

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors.numpy import save_file

from jswa.errors import CheckpointError
from jswa.model.weights.safetensors_files import TYPES, Tensor, TensorReader
from jswa.model.weights.safetensors_header import read_header
from jswa.storage.checkpoint_files import open_file
from jswa.storage.json_object import label, parse_object, shown

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the folder that is made there belongs to this user alone)
_KEY = "crc32"


@contextmanager
def handed_over(params: Mapping[str, Any], folder: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Write arrays into a new file, yield its path for `update_weights` of another process, and delete it at the end.

    Args:
        params: arrays on the host or on devices, by the names of a Hugging Face checkpoint or the decoder's own. They
            are copied, so the trainer may go on with them.
        folder: where a folder is made that only this user may read. By default in shared memory.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in params.items()}
    sums = {name: _checksum(array) for name, array in arrays.items()}
    own = Path(tempfile.mkdtemp(prefix="jswa-weights-", dir=folder))
    try:
        path = own / "model.safetensors"
        save_file(arrays, path, metadata={_KEY: json.dumps(sums)})
        yield path
    finally:
        shutil.rmtree(own)


def read_handed_over(path: Path) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Yield name and array of each tensor, once its checksum is right.

    Raises CheckpointError that names the tensor if its bytes do not have the checksum, or if there is none.
    """
    header = read_header(path)
    with open_file(path) as file:  # `read_header` has checked what is read here
        metadata = parse_object(file.read(int.from_bytes(file.read(8), "little")), path.name).get("__metadata__", {})
    text = metadata.get(_KEY)
    if text is None:
        raise CheckpointError(f"{path.name} has no checksums: must be written by handed_over")
    sums = parse_object(text.encode(), f"{path.name}: {_KEY}")
    tensors = {name: Tensor(path, name, stored) for name, stored in header.items()}
    for tensor in tensors.values():
        tensor.require_type(*TYPES)
    with TensorReader(tensors) as reader:
        for name, tensor in tensors.items():
            rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
            array = reader.rows(tensor, 0, rows).reshape(tensor.shape)
            if _checksum(array) != sums.get(name):
                limit = f"its bytes must have the CRC-32 {shown(sums.get(name))}"
                raise CheckpointError(f"{path.name}: {label(name)} is damaged: {limit}")
            yield name, array


def _checksum(array: Shaped[np.ndarray, "..."]) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8))

"""Rows of GGUF tensors, read from the file and turned into numbers."""

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from jswa.errors import CheckpointError
from jswa.gguf.file.header import GgufTensor
from jswa.gguf.file.types import numbers, row_bytes
from jswa.storage.checkpoint_files import open_file, read_into
from jswa.storage.json_object import shown


def read_rows(descriptor: int, tensor: GgufTensor, begin: int, end: int, columns: int) -> UInt8[np.ndarray, "R B"]:
    """Return the bytes of rows [begin, end) of `columns` numbers. Raises CheckpointError if the file is too short."""
    size = row_bytes(tensor.type, columns)
    out = np.empty((end - begin) * size, np.uint8)
    assert begin * size + len(out) <= tensor.size, "rows outside the tensor"
    read_into(memoryview(out), descriptor, tensor.begin + begin * size, tensor.where)
    return out.reshape(end - begin, size)


def vector(tensor: GgufTensor, size: int) -> Float32[np.ndarray, " n"]:
    """Return a tensor of `size` numbers in float32. Raises CheckpointError if it has another shape or type."""
    if tensor.type != "F32" or tensor.shape != (size,):
        limit = f"must be F32 of shape [{size}]"
        raise CheckpointError(f"{tensor.where} has type {tensor.type}, shape {shown(list(tensor.shape))}: {limit}")
    with open_file(tensor.path) as file:
        found: Shaped[np.ndarray, " n"] = numbers("F32", read_rows(file.fileno(), tensor, 0, 1, size))[0]
    if not (np.isfinite(found) & (found > 0)).all():
        raise CheckpointError(f"{tensor.where}: must have finite numbers above 0")
    return found.astype(np.float32)

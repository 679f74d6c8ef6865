"""A tensor of the Hugging Face checkpoint, made of rows of GGUF tensors: what a converter has done is undone here."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jswa.errors import CheckpointError
from jswa.gguf.file.header import GgufTensor
from jswa.gguf.file.rows import read_rows
from jswa.gguf.file.types import PARTS, PLAIN
from jswa.storage.json_object import shown

Rows = Int[np.ndarray, " rows"]
# Returns, for row numbers of a tensor, the number of the source that has each row, and the row's number there.
Order = Callable[[Rows], tuple[Rows, Rows]]


class Made(NamedTuple):
    """How a tensor is made of GGUF tensors.

    Attributes:
        dtype: the type, as safetensors names it.
        shape: the shape.
        sources: the GGUF tensors, which have the same type if `part` is not "numbers".
        columns: numbers that keep together in the sources: those of a row, or 1.
        order: where each such row is.
        part: what of the sources: their "numbers", or a part of their blocks (`types.PARTS`).
        turned: each matrix of a stack is stored with rows and columns exchanged; `order` then counts stored rows.
        shift: is added to each number.
        values: the numbers themselves, for a tensor that the file has in its metadata: there are no sources then.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    columns: int
    order: Order
    part: str = "numbers"
    turned: bool = False
    shift: float = 0.0
    values: tuple[float, ...] = ()


def dtype_of(*tensors: GgufTensor) -> str:
    """Return the type that tensors together have: their own if it is plain and the same, else F32."""
    kinds = {tensor.type for tensor in tensors}
    kind = kinds.pop()
    return kind if not kinds and kind in PLAIN else "F32"


def plain(tensor: GgufTensor) -> Made:
    """Return a tensor as it is stored."""
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return Made(dtype_of(tensor), tensor.shape, (tensor,), columns, partial(from_row, 0))


def of_value(value: float, shape: tuple[int, ...]) -> Made:
    """Return a tensor of one number that the metadata have."""
    return Made("F32", shape, (), 1, partial(from_row, 0), values=(value,))


def slice_of(tensor: GgufTensor, index: int) -> Made:
    """Return one matrix of a stack."""
    first = index * tensor.shape[1]
    return Made(dtype_of(tensor), tensor.shape[1:], (tensor,), tensor.shape[2], partial(from_row, first))


def count_of(tensor: GgufTensor) -> int:
    """Return the matrices of a stack. Raises CheckpointError if the tensor is none."""
    if len(tensor.shape) != 3 or tensor.shape[0] > 4096:
        limit = "must be a stack of at most 4096 matrices"
        raise CheckpointError(f"{tensor.where} has shape {shown(list(tensor.shape))}: {limit}")
    return tensor.shape[0]


def from_row(first: int, rows: Rows) -> tuple[Rows, Rows]:
    """Return where rows are in one source, from its row `first` on."""
    return np.zeros_like(rows), rows + first


class Turned(NamedTuple):
    """The matrix of a stack that was read last, with rows and columns exchanged, and its number."""

    number: int
    matrix: Shaped[np.ndarray, "rows columns"]


def read_made(
    made: Made, files: Mapping[Path, int], begin: int, end: int, columns: int, last: dict[Made, Turned]
) -> Shaped[np.ndarray, "R C"]:
    """Return rows [begin, end) of a tensor seen as a matrix of `columns` columns, in the tensor's type.

    Args:
        files: descriptors of the sources' files.
        last: keeps a turned matrix, until its last row is read.

    Raises CheckpointError if a file is too short.
    """
    if made.values:
        return np.array(made.values, PLAIN[made.dtype])[begin * columns : end * columns].reshape(end - begin, columns)
    if not made.turned:
        each = columns // made.columns if made.part == "numbers" else 1
        return _gathered(made, files, np.arange(begin * each, end * each)).reshape(end - begin, columns)
    height, out, row = made.shape[-2], [], begin
    while row < end:
        index, first = divmod(row, height)
        until = min(height, first + end - row)
        out.append(_turned(made, files, index, last)[first:until])
        row += until - first
    if end == height * made.shape[0]:
        last.pop(made, None)
    return np.concatenate(out)


def _turned(made: Made, files: Mapping[Path, int], index: int, last: dict[Made, Turned]) -> Shaped[np.ndarray, "R C"]:
    known = last.get(made)
    if known is None or known.number != index:
        width = made.shape[-1]
        stored = _gathered(made, files, np.arange(index * width, (index + 1) * width))
        known = last[made] = Turned(index, np.ascontiguousarray(stored.T))
    return known.matrix


def _gathered(made: Made, files: Mapping[Path, int], rows: Rows) -> Shaped[np.ndarray, "rows columns"]:
    """Return these rows of the sources, in the tensor's type. Per source, what lies between them is read too."""
    which, row = made.order(rows)
    take = PARTS[made.part]
    out: Shaped[np.ndarray, "rows columns"] | None = None
    for index, source in enumerate(made.sources):
        chosen = np.flatnonzero(which == index)
        if not len(chosen):
            continue
        first, until = int(row[chosen].min()), int(row[chosen].max()) + 1
        found = take(made.dtype, source.type, read_rows(files[source.path], source, first, until, made.columns))
        if len(made.sources) == 1:
            out = found if _rises(row) else found[row - first]
        else:
            out = np.empty((len(rows), found.shape[1]), found.dtype) if out is None else out
            out[chosen] = found[row[chosen] - first]
    assert out is not None, "no rows"
    return out + out.dtype.type(made.shift) if made.shift else out


def _rises(row: Rows) -> bool:
    return bool((np.diff(row) == 1).all())

"""Assembly of one parameter from its checkpoint tensors, a few rows at a time; see `Source`."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from jswa.model.hf.source import Fold, Source, TensorPart

Read = Callable[
    [TensorPart, int, int], Shaped[np.ndarray, "rows columns"]
]  # reads rows [begin, end) of a tensor as a matrix
_CHUNK_BYTES = 2**21
_LINE = 32  # rows of 16-bit numbers that fill a cache line in a transposed copy


class _Panel(NamedTuple):
    """The target of a tensor's rows: each entry of the view's first axis gets `each` rows, starting at row `begin`."""

    part: TensorPart
    begin: int
    view: Shaped[np.ndarray, "entries ..."]
    each: int = 1


def assemble(source: Source, out: Shaped[np.ndarray, "..."], read: Read) -> None:
    """Fill `out`, an array of the parameter's shape and dtype.

    Memory holds one chunk of rows at a time, or whole tensors if the layout reorders rows.
    """
    if source.folds or source.layout in ("columns", "product", "rank_slices"):
        out[...] = _reordered(source, [_whole(part, read) for part in source.parts])
        return
    for panel in _panels(source, out):
        columns = panel.part.shape[-1] if panel.part.shape else 1
        step = max(1, _CHUNK_BYTES // (out.dtype.itemsize * columns * panel.each))
        step = max(_LINE, step // _LINE * _LINE)
        for entry in range(0, len(panel.view), step):
            view = panel.view[entry : entry + step]
            begin = panel.begin + entry * panel.each
            rows = read(panel.part, begin, begin + len(view) * panel.each)
            _copy(view, rows.astype(out.dtype, copy=False).reshape(view.shape))


def _panels(source: Source, out: Shaped[np.ndarray, "..."]) -> Iterator[_Panel]:
    """Yield the targets of all tensors of a source that keeps the order of rows."""
    begin = 0
    for index, part in enumerate(source.parts):
        rows = part.shape[-2] if len(part.shape) > 1 else 1
        if source.layout == "experts":
            begin = 0 if index % source.per_expert == 0 else begin
            yield _Panel(part, 0, out[index // source.per_expert].T[begin : begin + rows])
        elif source.layout == "matrix":
            yield _Panel(part, 0, out.T[begin : begin + rows])
        elif source.layout == "interleaved":
            halves = out.reshape(-1, 2, out.shape[-1] // 2)
            yield _Panel(part, 0, np.swapaxes(halves, 1, 2))
        elif source.layout in ("transposed", "transposed_interleaved"):
            for expert, matrix in enumerate(out):
                if source.layout == "transposed":
                    yield _Panel(part, expert * rows, matrix.T[begin : begin + rows])
                else:
                    pairs = matrix.reshape(len(matrix), 2, rows // 2).transpose(2, 1, 0)
                    yield _Panel(part, expert * rows, pairs, each=2)
        elif len(part.shape) < 2:
            rows = part.shape[0] if part.shape else 1
            yield _Panel(part, 0, out[None, begin : begin + rows])
        else:
            yield _Panel(part, 0, out[begin : begin + part.shape[0]].reshape(-1, part.shape[-1]))
            rows = part.shape[0]
        begin += rows


def _copy(view: Shaped[np.ndarray, "entries ..."], rows: Shaped[np.ndarray, "entries ..."]) -> None:
    """Copy rows into the view as bits; if the view is transposed, in blocks that fit in the CPU cache."""
    bits = f"u{view.itemsize}"
    view, rows = view.view(bits), rows.view(bits)
    step = len(view) if view.strides[-1] == view.itemsize else _LINE
    for begin in range(0, len(view), step):
        view[begin : begin + step] = rows[begin : begin + step]


def _whole(part: TensorPart, read: Read) -> Shaped[np.ndarray, "..."]:
    rows = int(np.prod(part.shape[:-1], dtype=np.int64))
    return read(part, 0, rows).reshape(part.shape)


def _reordered(source: Source, tensors: list[np.ndarray]) -> Shaped[np.ndarray, "..."]:
    """Return a parameter whose rows or columns are reordered."""
    if source.layout == "columns":
        return _folded(tensors[0].T, source.folds[0])
    tensors = [*map(_folded, tensors, source.folds), *tensors[len(source.folds) :]]
    if source.layout == "product":
        rotated = source.folds[0].rotated
        one, other = (tensor.astype(np.float32) for tensor in tensors)  # a bfloat16 product would round twice
        return np.concatenate([one[:rotated], one[rotated:] * other[rotated:]])
    stacked = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    if source.layout == "rank_slices":
        q, k, _ = (rows // source.slices for rows in source.rows)
        rows = np.split(stacked.reshape(source.slices, -1, *stacked.shape[1:]), [q, q + k], axis=1)
        return np.concatenate([part.reshape(-1, *stacked.shape[1:]) for part in rows]).T
    return stacked.T if source.layout == "matrix" else stacked


def _folded(x: Shaped[np.ndarray, "rows ..."], fold: Fold) -> Shaped[np.ndarray, "rows ..."]:
    """Return x with the rows of each head reordered by the fold."""
    half, turned = fold.head_dim // 2, fold.rotated // 2
    rotated = [*range(turned), *range(half, half + turned)]
    rest = [*range(turned, half), *range(half + turned, fold.head_dim)]
    order = rotated + rest if fold.first else rest + rotated
    return x.reshape(-1, fold.head_dim, *x.shape[1:])[:, order].reshape(x.shape)

"""One parameter from its checkpoint tensors, a few rows at a time; see `Source`."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from jswa.model.hf.tensor_map import SLICES, Fold, Part, Source

Read = Callable[[Part, int, int], Shaped[np.ndarray, "rows columns"]]  # rows [begin, end) of a part as a matrix
_CHUNK_BYTES = 2**21
_LINE = 32  # rows of 16-bit numbers that fill a cache line of a transposed copy


class _Panel(NamedTuple):
    """Where rows of a part go: `each` rows from `begin` on to every entry of the view's first axis."""

    part: Part
    begin: int
    view: Shaped[np.ndarray, "entries ..."]
    each: int = 1


def assemble(source: Source, out: Shaped[np.ndarray, "..."], read: Read) -> None:
    """Fill `out`, of the parameter's shape and type. Holds a chunk of rows, or where they are reordered whole parts."""
    if source.folds or source.how in ("columns", "product", "sliced"):
        out[...] = _reordered(source, [_whole(part, read) for part in source.parts])
        return
    for panel in _panels(source, out):
        columns = panel.part.shape[-1]
        step = max(1, _CHUNK_BYTES // (out.dtype.itemsize * columns * panel.each))
        step = max(_LINE, step // _LINE * _LINE)
        for entry in range(0, len(panel.view), step):
            view = panel.view[entry : entry + step]
            begin = panel.begin + entry * panel.each
            rows = read(panel.part, begin, begin + len(view) * panel.each)
            _copy(view, rows.astype(out.dtype, copy=False).reshape(view.shape))


def _panels(source: Source, out: Shaped[np.ndarray, "..."]) -> Iterator[_Panel]:
    """The parts of a source whose rows keep their order."""
    begin = 0
    for index, part in enumerate(source.parts):
        rows = part.shape[-2] if len(part.shape) > 1 else 1
        if source.how == "experts":
            begin = 0 if index % source.per_expert == 0 else begin
            yield _Panel(part, 0, out[index // source.per_expert].T[begin : begin + rows])
        elif source.how == "matrix":
            yield _Panel(part, 0, out.T[begin : begin + rows])
        elif source.how == "interleaved":
            halves = out.reshape(-1, 2, out.shape[-1] // 2)
            yield _Panel(part, 0, np.swapaxes(halves, 1, 2))
        elif source.how in ("transposed", "turned"):
            for expert, matrix in enumerate(out):
                if source.how == "transposed":
                    yield _Panel(part, expert * rows, matrix.T[begin : begin + rows])
                else:
                    turns = matrix.reshape(len(matrix), 2, rows // 2).transpose(2, 1, 0)
                    yield _Panel(part, expert * rows, turns, each=2)
        elif len(part.shape) == 1:
            yield _Panel(part, 0, out[None, begin : begin + part.shape[0]])
            rows = part.shape[0]
        else:
            yield _Panel(part, 0, out[begin : begin + part.shape[0]].reshape(-1, part.shape[-1]))
            rows = part.shape[0]
        begin += rows


def _copy(view: Shaped[np.ndarray, "entries ..."], rows: Shaped[np.ndarray, "entries ..."]) -> None:
    """view[...] = rows, as bits, in pieces that the cache holds where the view is a transposed one."""
    bits = f"u{view.itemsize}"
    view, rows = view.view(bits), rows.view(bits)
    step = len(view) if view.strides[-1] == view.itemsize else _LINE
    for begin in range(0, len(view), step):
        view[begin : begin + step] = rows[begin : begin + step]


def _whole(part: Part, read: Read) -> Shaped[np.ndarray, "..."]:
    rows = int(np.prod(part.shape[:-1], dtype=np.int64))
    return read(part, 0, rows).reshape(part.shape)


def _reordered(source: Source, pieces: list[np.ndarray]) -> Shaped[np.ndarray, "..."]:
    """A parameter whose rows or columns are put in another order."""
    if source.how == "columns":
        return _folded(pieces[0].T, source.folds[0])
    pieces = [*map(_folded, pieces, source.folds), *pieces[len(source.folds) :]]
    if source.how == "product":
        rotated = source.folds[0].rotated
        one, other = (piece.astype(np.float32) for piece in pieces)  # a product in bfloat16 would round once more
        return np.concatenate([one[:rotated], one[rotated:] * other[rotated:]])
    stacked = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if source.how == "sliced":
        rows = np.split(stacked.reshape(SLICES, -1, *stacked.shape[1:]), _bounds(source.rows), axis=1)
        return np.concatenate([part.reshape(-1, *stacked.shape[1:]) for part in rows]).T
    return stacked.T if source.how == "matrix" else stacked


def _bounds(rows: tuple[int, ...]) -> list[int]:
    """Where k and v begin in one slice."""
    q, k, _ = (n // SLICES for n in rows)
    return [q, q + k]


def _folded(x: Shaped[np.ndarray, "rows ..."], fold: Fold) -> Shaped[np.ndarray, "rows ..."]:
    """Rows of all heads, each head's in the order of the fold."""
    half, turned = fold.head_dim // 2, fold.rotated // 2
    rotated = [*range(turned), *range(half, half + turned)]
    rest = [*range(turned, half), *range(half + turned, fold.head_dim)]
    order = rotated + rest if fold.first else rest + rotated
    return x.reshape(-1, fold.head_dim, *x.shape[1:])[:, order].reshape(x.shape)

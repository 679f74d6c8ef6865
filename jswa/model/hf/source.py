"""What a parameter of the decoder is made of: tensors of a checkpoint, and the layout in which they form it."""

from typing import Literal, NamedTuple


class TensorPart(NamedTuple):
    """One checkpoint tensor that belongs to a parameter.

    Attributes:
        key: canonical name of the tensor.
        shape: the shape that it must have; () of a single number.
        row_groups: the number of equal groups of rows that were quantized separately.
    """

    key: str
    shape: tuple[int, ...]
    row_groups: int = 1


class Fold(NamedTuple):
    """Reordering of each head's numbers: the rotated ones go first or last (`AttentionConfig.folded_keys`)."""

    head_dim: int
    rotated: int
    first: bool


Layout = Literal[
    "rows",
    "matrix",
    "columns",
    "experts",
    "transposed",
    "interleaved",
    "transposed_interleaved",
    "rank_slices",
    "product",
]


class Source(NamedTuple):
    """The checkpoint tensors of one parameter, and the layout in which they form it.

    Attributes:
        parts: the tensors.
        layout: one of these:
            "rows": tensors are concatenated along the first axis.
            "matrix": the same, then transposed from torch's [out, in].
            "columns": the columns of one tensor are reordered by `folds`, then it is transposed.
            "experts": each group of `per_expert` tensors forms one "matrix", and these are stacked.
            "transposed": the last two axes are transposed, then tensors are concatenated along the last.
            "interleaved": even entries of the last axis come first, then the odd ones.
            "transposed_interleaved": transposed, then interleaved.
            "rank_slices": one tensor in `slices` slices, each with q, k and v of one rank.
            "product": product of two vectors, except that rotated numbers are those of the first.
        per_expert: tensors per expert ("experts").
        rows: number of rows of q, k and v ("rank_slices").
        slices: their number ("rank_slices").
        folds: reordering of the rows of the first tensors; of the columns for layout "columns".
    """

    parts: tuple[TensorPart, ...]
    layout: Layout = "rows"
    per_expert: int = 1
    rows: tuple[int, ...] = ()
    slices: int = 1
    folds: tuple[Fold, ...] = ()


def vector(key: str, size: int) -> Source:
    """Return the source of a vector."""
    return Source((TensorPart(key, (size,)),))


def matrix(rows: dict[str, int], columns: int) -> Source:
    """Return the source of a matrix made of linear layers, given the number of rows of each."""
    return Source(tuple(TensorPart(f"{name}.weight", (n, columns)) for name, n in rows.items()), "matrix")


def bias(rows: dict[str, int]) -> Source:
    """Return the source of the biases of linear layers, given the number of rows of each."""
    return Source(tuple(TensorPart(f"{name}.bias", (n,)) for name, n in rows.items()))

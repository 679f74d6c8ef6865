"""The experts of a layer, which GGUF keeps in stacks of matrices, as each family's checkpoints store them."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from jswa.errors import CheckpointError
from jswa.gguf.architectures import Experts
from jswa.gguf.file.header import GgufTensor
from jswa.gguf.made import Made, Order, Rows, count_of, dtype_of, from_row, plain, slice_of
from jswa.storage.json_object import label, shown

_PACKED = "MXFP4"


def experts_of(experts: Experts, folder: str, stack: Mapping[str, GgufTensor]) -> Iterator[tuple[str, Made]]:
    """Yield the experts of a layer by name, as the family's checkpoints store them.

    Args:
        folder: prefix of the names.
        stack: the layer's tensors of experts, by llama.cpp's name below the layer.

    Raises CheckpointError if a tensor is missing, is one that the family does not have, or has another shape than a
    stack of matrices that fit each other.
    """
    weights, biases = _weights_and_biases(experts, stack)
    joined, down = weights.get("ffn_gate_up_exps"), weights["ffn_down_exps"]
    if experts.stored in ("each", "stacked"):
        names = (("ffn_gate_exps", experts.gate), ("ffn_up_exps", experts.up), ("ffn_down_exps", experts.down))
        for ours, theirs in names:
            yield from _matrices(folder, theirs, weights[ours], each=experts.stored == "each")
        return
    pair = (joined,) if joined is not None else (weights["ffn_gate_exps"], weights["ffn_up_exps"])
    _require_alike(pair)
    count, rows, columns = pair[0].shape
    height = rows * len(pair)
    order: Order
    if experts.stored == "rows":
        order = partial(from_row, 0) if joined is not None else partial(_halves, rows)
        made = Made(dtype_of(*pair), (count, height, columns), pair, columns, order)
        yield f"{folder}.{experts.gate_up}", made
        yield f"{folder}.{experts.down}", plain(down)
        return
    order = _alternating if experts.stored == "interleaved" else partial(_halves, rows)
    if all(one.type == _PACKED for one in (*pair, down)) and experts.stored == "interleaved":
        yield from _mxfp4(f"{folder}.gate_up_proj", (count, height, columns), pair, order)
        yield from _mxfp4(f"{folder}.down_proj", down.shape, (down,), partial(from_row, 0))
    else:
        made = Made(dtype_of(*pair), (count, columns, height), pair, columns, order, turned=True)
        yield f"{folder}.gate_up_proj", made
        turned = (down.shape[0], down.shape[2], down.shape[1])
        yield f"{folder}.down_proj", plain(down)._replace(shape=turned, turned=True)
    yield from _biases(folder, biases)


def _weights_and_biases(
    experts: Experts, stack: Mapping[str, GgufTensor]
) -> tuple[dict[str, GgufTensor], dict[str, GgufTensor]]:
    """Return weights and biases by stem. Raises CheckpointError unless they are all that the family has."""
    weights = {name.removesuffix(".weight"): one for name, one in stack.items() if name.endswith(".weight")}
    biases = {name.removesuffix(".bias"): one for name, one in stack.items() if name.endswith(".bias")}
    joined = weights.get("ffn_gate_up_exps")
    wanted = ("ffn_down_exps",) if joined is not None else ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    for name in wanted:
        if name not in weights:
            where = next(iter(stack.values())).where
            raise CheckpointError(f"{where}: the layer's experts lack {label(name)}.weight")
    for one in weights.values():
        count_of(one)
    if (biases and experts.stored != "interleaved") or (joined is not None and experts.stored != "rows"):
        unknown = next(iter(biases.values()), joined)
        assert unknown is not None
        raise CheckpointError(f"{unknown.where} is not a tensor that this architecture has")
    return weights, biases


def _matrices(folder: str, name: str, stack: GgufTensor, *, each: bool) -> Iterator[tuple[str, Made]]:
    """Yield one kind of matrix: a tensor for each expert, or one for all."""
    if not each:
        yield f"{folder}.{name}.weight", plain(stack)
        return
    for index in range(count_of(stack)):
        yield f"{folder}.{index}.{name}.weight", slice_of(stack, index)


def _mxfp4(
    key: str, shape: tuple[int, ...], sources: tuple[GgufTensor, ...], order: Order
) -> Iterator[tuple[str, Made]]:
    """Return codes and scales as gpt-oss stores them."""
    *lead, columns = shape
    yield f"{key}_blocks", Made("U8", (*lead, columns // 32, 16), sources, columns, order, "codes")
    yield f"{key}_scales", Made("U8", (*lead, columns // 32), sources, columns, order, "scales")


def _biases(folder: str, biases: Mapping[str, GgufTensor]) -> Iterator[tuple[str, Made]]:
    """Return the biases of experts: gate and up alternate."""
    pair = tuple(biases[name] for name in ("ffn_gate_exps", "ffn_up_exps") if name in biases)
    if len(pair) != 2 or "ffn_down_exps" not in biases or len(biases) != 3:
        if biases:
            raise CheckpointError(f"{next(iter(biases.values())).where}: experts need biases of gate, up and down")
        return
    _require_alike(pair)
    count, width = pair[0].shape if len(pair[0].shape) == 2 else (0, 0)
    if not count:
        raise CheckpointError(f"{pair[0].where} has shape {shown(list(pair[0].shape))}: must have 2 axes")
    yield f"{folder}.gate_up_proj_bias", Made(dtype_of(*pair), (count, 2 * width), pair, 1, _alternating)
    yield f"{folder}.down_proj_bias", plain(biases["ffn_down_exps"])


def _require_alike(pair: tuple[GgufTensor, ...]) -> None:
    """Raise CheckpointError unless gate and up have the same shape."""
    if len({one.shape for one in pair}) != 1:
        first, second = pair
        shapes = f"{shown(list(second.shape))}: must be {shown(list(first.shape))}, as {label(first.name)}"
        raise CheckpointError(f"{second.where} has shape {shapes}")


def _halves(size: int, rows: Rows) -> tuple[Rows, Rows]:
    """Return where rows are if each matrix has `size` of the first source, then as many of the second."""
    matrix, within = np.divmod(rows, 2 * size)
    which, row = np.divmod(within, size)
    return which, matrix * size + row


def _alternating(rows: Rows) -> tuple[Rows, Rows]:
    return rows % 2, rows // 2

"""The tensors of a GGUF checkpoint as those of the Hugging Face checkpoint that it stands for.

Nothing is read here: a `Made` says of which rows of which GGUF tensors a tensor is made.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from jswa.errors import CheckpointError
from jswa.gguf.architectures import WHOLE, Architecture, Experts
from jswa.gguf.families.rope import FACTORS, LONG, SHORT
from jswa.gguf.file.header import GgufTensor
from jswa.gguf.file.types import PLAIN, weight_types
from jswa.gguf.made import Made, Order, Rows
from jswa.storage.json_object import label, shown

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(.+)")
_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
_PACKED = "MXFP4"


def tensors_of(
    architecture: Architecture, tensors: Mapping[str, GgufTensor], layers: int, head_dim: int
) -> dict[str, Made]:
    """Return the tensors of the checkpoint by transformers' name.

    Args:
        layers: of the decoder; later ones, for multi-token prediction, are left out.
        head_dim: of q and k, for architectures that permute them.

    Raises CheckpointError that names a tensor that the architecture does not have, or whose type or shape it cannot
    have.
    """
    found: dict[str, Made] = {}
    stacks: dict[int, dict[str, GgufTensor]] = {}
    for name, tensor in tensors.items():
        if name in (FACTORS, LONG, SHORT):
            continue  # `rope` reads them
        _require_weights(tensor)
        match = _LAYER.fullmatch(name)
        if match is None:
            found |= _of_model(architecture, tensor)
        elif int(match[1]) < layers:
            stem, _, end = match[2].rpartition(".")
            if stem in _STACKS and end in ("weight", "bias") and match[2] not in architecture.names:
                stacks.setdefault(int(match[1]), {})[match[2]] = tensor
                continue
            key = f"model.layers.{int(match[1])}.{_name(architecture, tensor, match[2])}"
            found[key] = _of_layer(architecture, tensor, stem, head_dim)
    for layer, stack in stacks.items():
        if architecture.experts is None:
            raise CheckpointError(f"{next(iter(stack.values())).where} is not a tensor that this architecture has")
        found |= _experts(architecture.experts, f"model.layers.{layer}.{architecture.experts.folder}", stack)
    return found


def held_packed(tensors: Mapping[str, Made]) -> dict[str, Made]:
    """Return the tensors with matrices of layers in Q4_0 and Q8_0 as compressed-tensors has them.

    Those of Q4_0 become words and scales, and those of Q8_0 bytes and scales.
    """
    found: dict[str, Made] = {}
    for key, made in tensors.items():
        out, columns = made.shape if len(made.shape) == 2 else (0, 0)
        scales = made._replace(dtype="F16", shape=(out, columns // 32))
        match packing(key, made):
            case "Q4_0":
                found[f"{key}_packed"] = made._replace(dtype="I32", shape=(out, columns // 8), part="words")
                found[f"{key}_scale"] = scales._replace(part="word_scales")
            case "Q8_0":
                found[key] = made._replace(dtype="I8", part="values")
                found[f"{key}_scale"] = scales._replace(part="value_scales")
            case _:
                found[key] = made
    return found


def packing(key: str, made: Made) -> str | None:
    """Return the type of a tensor that `held_packed` packs, else None."""
    in_layer = key.startswith("model.layers.") and key.endswith(".weight") and len(made.shape) == 2
    kinds = {one.type for one in made.sources}
    if not in_layer or made.part != "numbers" or made.turned or len(kinds) != 1:
        return None
    kind = kinds.pop()
    return kind if kind in ("Q4_0", "Q8_0") else None


def _require_weights(tensor: GgufTensor) -> None:
    """Raise CheckpointError unless the type is one of weights, and that of a vector or of biases has no blocks."""
    is_matrix = len(tensor.shape) > 1 and not tensor.name.endswith(".bias")
    allowed = weight_types() if is_matrix else tuple(PLAIN)
    if tensor.type not in allowed:
        what = "a matrix" if is_matrix else "a vector"
        raise CheckpointError(f"{tensor.where} has type {tensor.type}: {what} must be one of {', '.join(allowed)}")


def _name(architecture: Architecture, tensor: GgufTensor, name: str) -> str:
    if name in architecture.names:
        return architecture.names[name]
    stem, _, end = name.rpartition(".")
    theirs = architecture.stem(stem)
    if theirs is None or end not in ("weight", "bias"):
        raise CheckpointError(f"{tensor.where} is not a tensor that this architecture has")
    return f"{theirs}.{end}"


def _of_model(architecture: Architecture, tensor: GgufTensor) -> dict[str, Made]:
    """Return a tensor of the whole model; a stack of gemma3n's projections becomes one tensor each."""
    stem, _, end = tensor.name.rpartition(".")
    theirs = {**WHOLE, **architecture.whole}.get(stem)
    if theirs is None or end not in ("weight", "bias"):
        raise CheckpointError(f"{tensor.where} is not a tensor that this architecture has")
    if len(tensor.shape) == 3:
        return {f"{theirs}.{i}.{end}": _slice(tensor, i) for i in range(_count(tensor))}
    made = _plain(tensor)
    return {f"{theirs}.{end}": _less_one(made) if architecture.norms_plus_one and stem.endswith("norm") else made}


def _of_layer(architecture: Architecture, tensor: GgufTensor, stem: str, head_dim: int) -> Made:
    made = _plain(tensor)
    if architecture.permuted and stem in ("attn_q", "attn_k"):
        if tensor.shape[0] % head_dim or head_dim % 2:
            limit = f"must have rows of whole heads of an even size, {head_dim}"
            raise CheckpointError(f"{tensor.where} has shape {shown(list(tensor.shape))}: {limit}")
        return made._replace(order=partial(_unpermuted, head_dim))
    if architecture.norms_plus_one and stem.endswith("norm"):
        return _less_one(made)
    if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:  # earlier files have the one row as a vector
        return made._replace(shape=(1, *tensor.shape))
    return made


def _dtype(*tensors: GgufTensor) -> str:
    """Return the type that tensors together have: their own if it is plain and the same, else F32."""
    kinds = {tensor.type for tensor in tensors}
    kind = kinds.pop()
    return kind if not kinds and kind in PLAIN else "F32"


def _plain(tensor: GgufTensor) -> Made:
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return Made(_dtype(tensor), tensor.shape, (tensor,), columns, partial(_from, 0))


def _less_one(made: Made) -> Made:
    """Return a norm without the 1 that was added in float32."""
    return made._replace(dtype="F32", shift=-1.0)


def _slice(tensor: GgufTensor, index: int) -> Made:
    """Return one matrix of a stack."""
    return Made(_dtype(tensor), tensor.shape[1:], (tensor,), tensor.shape[2], partial(_from, index * tensor.shape[1]))


def _count(tensor: GgufTensor) -> int:
    """Return the matrices of a stack. Raises CheckpointError if the tensor is none."""
    if len(tensor.shape) != 3 or tensor.shape[0] > 4096:
        limit = "must be a stack of at most 4096 matrices"
        raise CheckpointError(f"{tensor.where} has shape {shown(list(tensor.shape))}: {limit}")
    return tensor.shape[0]


def _experts(experts: Experts, folder: str, stack: Mapping[str, GgufTensor]) -> Iterator[tuple[str, Made]]:
    """Return the experts of a layer, as the family's checkpoints store them."""
    weights = {name.removesuffix(".weight"): one for name, one in stack.items() if name.endswith(".weight")}
    biases = {name.removesuffix(".bias"): one for name, one in stack.items() if name.endswith(".bias")}
    joined = weights.get("ffn_gate_up_exps")
    wanted = ("ffn_down_exps",) if joined is not None else ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    for name in wanted:
        if name not in weights:
            where = next(iter(stack.values())).where
            raise CheckpointError(f"{where}: the layer's experts lack {label(name)}.weight")
    for one in weights.values():
        _count(one)
    if (biases and experts.stored != "interleaved") or (joined is not None and experts.stored != "rows"):
        unknown = next(iter(biases.values()), joined)
        assert unknown is not None
        raise CheckpointError(f"{unknown.where} is not a tensor that this architecture has")
    down = weights["ffn_down_exps"]
    if experts.stored == "each":
        names = (("ffn_gate_exps", experts.gate), ("ffn_up_exps", experts.up), ("ffn_down_exps", experts.down))
        for ours, theirs in names:
            for index in range(_count(weights[ours])):
                yield f"{folder}.{index}.{theirs}.weight", _slice(weights[ours], index)
        return
    pair = (joined,) if joined is not None else (weights["ffn_gate_exps"], weights["ffn_up_exps"])
    _require_alike(pair)
    count, rows, columns = pair[0].shape
    height = rows * len(pair)
    order: Order
    if experts.stored == "rows":
        order = partial(_from, 0) if joined is not None else partial(_halves, rows)
        yield f"{folder}.gate_up_proj", Made(_dtype(*pair), (count, height, columns), pair, columns, order)
        yield f"{folder}.down_proj", _plain(down)
        return
    order = _alternating if experts.stored == "interleaved" else partial(_halves, rows)
    if all(one.type == _PACKED for one in (*pair, down)) and experts.stored == "interleaved":
        yield from _mxfp4(f"{folder}.gate_up_proj", (count, height, columns), pair, order)
        yield from _mxfp4(f"{folder}.down_proj", down.shape, (down,), partial(_from, 0))
    else:
        made = Made(_dtype(*pair), (count, columns, height), pair, columns, order, turned=True)
        yield f"{folder}.gate_up_proj", made
        turned = (down.shape[0], down.shape[2], down.shape[1])
        yield f"{folder}.down_proj", _plain(down)._replace(shape=turned, turned=True)
    yield from _biases(folder, biases)


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
    yield f"{folder}.gate_up_proj_bias", Made(_dtype(*pair), (count, 2 * width), pair, 1, _alternating)
    yield f"{folder}.down_proj_bias", _plain(biases["ffn_down_exps"])


def _require_alike(pair: tuple[GgufTensor, ...]) -> None:
    """Raise CheckpointError unless gate and up have the same shape."""
    if len({one.shape for one in pair}) != 1:
        first, second = pair
        shapes = f"{shown(list(second.shape))}: must be {shown(list(first.shape))}, as {label(first.name)}"
        raise CheckpointError(f"{second.where} has shape {shapes}")


def _from(first: int, rows: Rows) -> tuple[Rows, Rows]:
    return np.zeros_like(rows), rows + first


def _unpermuted(head_dim: int, rows: Rows) -> tuple[Rows, Rows]:
    """Return where rows are if the two numbers of a rotation lie beside each other in each head."""
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return np.zeros_like(rows), head * head_dim + 2 * pair + half


def _halves(size: int, rows: Rows) -> tuple[Rows, Rows]:
    """Return where rows are if each matrix has `size` of the first source, then as many of the second."""
    matrix, within = np.divmod(rows, 2 * size)
    which, row = np.divmod(within, size)
    return which, matrix * size + row


def _alternating(rows: Rows) -> tuple[Rows, Rows]:
    return rows % 2, rows // 2

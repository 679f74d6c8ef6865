"""The tensors of a GGUF checkpoint as those of the Hugging Face checkpoint that it stands for.

Nothing is read here: a `Made` says of which rows of which GGUF tensors a tensor is made.
"""

import re
from collections.abc import Mapping
from functools import partial

import numpy as np

from jswa.errors import CheckpointError
from jswa.gguf.architectures import WHOLE, Architecture
from jswa.gguf.families.rope import FACTORS, LONG, SHORT
from jswa.gguf.file.header import GgufTensor, Value
from jswa.gguf.file.types import PLAIN, weight_types
from jswa.gguf.made import Made, Rows, count_of, of_value, plain, slice_of
from jswa.gguf.stacks import experts_of
from jswa.storage.json_object import shown

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(.+)")
ENDS = ("model.embed_tokens.weight", "lm_head.weight")
_LARGEST = 3e38  # of numbers in float32
_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")


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
            if stem in architecture.left_out:
                continue  # the config has been read of it
            if stem in _STACKS and end in ("weight", "bias") and match[2] not in architecture.names:
                stacks.setdefault(int(match[1]), {})[match[2]] = tensor
                continue
            key = f"model.layers.{int(match[1])}.{_name(architecture, tensor, match[2])}"
            found[key] = _of_layer(architecture, tensor, stem, head_dim)
    for layer, stack in stacks.items():
        if architecture.experts is None:
            raise CheckpointError(f"{next(iter(stack.values())).where} is not a tensor that this architecture has")
        found |= experts_of(architecture.experts, f"model.layers.{layer}.{architecture.experts.folder}", stack)
    return found


def numbers_of(architecture: Architecture, metadata: Mapping[str, Value], layers: int, where: str) -> dict[str, Made]:
    """Return the tensors of single numbers that the converter has put into the metadata, by transformers' name.

    Args:
        where: the file, for error texts.

    Raises CheckpointError unless each key lists a finite number for each layer.
    """
    found: dict[str, Made] = {}
    for key, (name, shape) in architecture.numbers.items():
        values = metadata.get(key)
        if not isinstance(values, list) or len(values) < layers or not all(map(_is_finite, values[:layers])):
            limit = f"must list a finite number for each of {layers} layers"
            raise CheckpointError(f"{where}: {key} = {shown(values)}: {limit}")
        found |= {f"model.layers.{index}.{name}": of_value(float(values[index]), shape) for index in range(layers)}
    return found


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def held_packed(tensors: Mapping[str, Made]) -> dict[str, Made]:
    """Return the tensors with matrices in Q4_0 and Q8_0 as compressed-tensors has them.

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
    if not (in_layer or key in ENDS) or made.part != "numbers" or made.turned or len(kinds) != 1:
        return None
    kind = kinds.pop()
    return kind if kind in (("Q8_0",) if key in ENDS else ("Q4_0", "Q8_0")) else None


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
        return {f"{theirs}.{i}.{end}": slice_of(tensor, i) for i in range(count_of(tensor))}
    made = plain(tensor)
    return {f"{theirs}.{end}": _less_one(made) if stem in architecture.plus_one and end == "weight" else made}


def _of_layer(architecture: Architecture, tensor: GgufTensor, stem: str, head_dim: int) -> Made:
    made = plain(tensor)
    if architecture.permuted and stem in ("attn_q", "attn_k"):
        if tensor.shape[0] % head_dim or head_dim % 2:
            limit = f"must have rows of whole heads of an even size, {head_dim}"
            raise CheckpointError(f"{tensor.where} has shape {shown(list(tensor.shape))}: {limit}")
        return made._replace(order=partial(_unpermuted, head_dim))
    if stem in architecture.plus_one and not tensor.name.endswith(".bias"):
        return _less_one(made)
    if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:  # earlier files have the one row as a vector
        return made._replace(shape=(1, *tensor.shape))
    return made


def _less_one(made: Made) -> Made:
    """Return a norm without the 1 that was added in float32."""
    return made._replace(dtype="F32", shift=-1.0)


def _unpermuted(head_dim: int, rows: Rows) -> tuple[Rows, Rows]:
    """Return where rows are if the two numbers of a rotation lie beside each other in each head."""
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return np.zeros_like(rows), head * head_dim + 2 * pair + half

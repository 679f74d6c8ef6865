"""EAGLE-3 and P-EAGLE checkpoints: the speculators format, and that of LlamaForCausalLMEagle3.

Both have the same tensors. In the speculators format, number i of `eagle_aux_hidden_state_layer_ids` is what layer i
reads. In `eagle_config` of the other format, it is what layer i gives.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.drafters.checkpoint import Checkpoint, ReadWhole, folder_of, refused, required
from jswa.model.drafters.eagle import Eagle
from jswa.model.hf.config import parse_config
from jswa.model.hf.fields import Fields
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.source import Source, TensorPart
from jswa.model.hf.tensor_map import sources
from jswa.model.weights.safetensors_files import Tensor, TensorReader, stored_tensors
from jswa.storage.json_object import read_object

_KINDS = ("eagle3", "peagle")
# Many checkpoints of the flat format have the name of the family's own architecture; their tensors tell them apart.
_ARCHITECTURE = re.compile(r".*(eagle3|peagle).*|(llama|qwen3)ForCausalLM", re.IGNORECASE)
_FAMILIES = ("llama", "qwen3")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOST_TAPS = 16
_UNUSED = re.compile(r"^(t2d|verifier_norm\..*|verifier_lm_head\..*|.*rotary_emb\.inv_freq)$")
OFFSETS, _MASK = "d2t", "mask_hidden"


def open_eagle(folder: Path, target: ModelConfig) -> Checkpoint:
    """Open an EAGLE-3 or P-EAGLE checkpoint.

    Raises ConfigError that names key, value and limit if it does not fit the target, CheckpointError if a file is
    missing or corrupt, and UnsupportedModel if it needs something that jswa does not have.
    """
    raw = read_object(folder_of(folder) / "config.json")
    _require_architecture(Fields(raw, "config.json"))
    tensors = stored_tensors(folder, _tensor_name)
    if "fc.weight" not in tensors:
        raise refused("model", str(folder), "must be an EAGLE-3 checkpoint, and it has no tensor fc.weight")
    drafter = _parse(Fields(raw, "config.json"), target, tensors)
    others = _others(drafter, tensors)
    rest = {name: tensor for name, tensor in tensors.items() if name not in (OFFSETS, _MASK)}
    table = _sources(drafter, rest)
    stored = parse_quantization(raw)
    return Checkpoint(drafter, drafter.model, drafter.module, table, rest, tensors, stored, others).check()


def _require_architecture(fields: Fields) -> None:
    """Raise ConfigError if a config names architectures, and not one of EAGLE-3."""
    found = fields.raw.get("architectures")
    named = found if isinstance(found, list) and found else []
    if not all(isinstance(name, str) and _ARCHITECTURE.fullmatch(name) for name in named):
        raise refused("architectures", found, "must be one of EAGLE-3 or P-EAGLE, such as LlamaForCausalLMEagle3")


def _tensor_name(key: str) -> str | None:
    """Return a tensor's name as in a decoder's checkpoint, or None if nothing reads it."""
    name = key.removeprefix("model.")
    if _UNUSED.match(name):
        return None
    if name.startswith("midlayer."):
        name = f"layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if re.match(r"(layers|norm|embed_tokens)\.", name) else name


def _parse(fields: Fields, target: ModelConfig, tensors: Mapping[str, Tensor]) -> Eagle:
    kind = fields.raw.get("speculators_model_type")
    if kind is not None and kind not in _KINDS:
        raise refused("speculators_model_type", kind, f"must be one of {', '.join(_KINDS)}")
    nested = fields.raw.get("transformer_layer_config")
    own = fields if nested is None else Fields(fields.table("transformer_layer_config"), "transformer_layer_config")
    nvidia = Fields(fields.table("eagle_config"), "eagle_config")
    model = _decoder(own)
    required("vocab_size", model.vocab_size, target.vocab_size, "the size of the model's vocabulary")
    width = fields.optional_width("target_hidden_size", None) or model.d_model
    required("target_hidden_size", width, target.d_model, "the hidden size of the model")
    draft_vocab = fields.integer("draft_vocab_size", model.vocab_size, high=model.vocab_size)
    own_embed, own_head = "model.embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    if not own_embed and (model.d_model != target.d_model or target.embed_norm is not None):
        raise refused("model", "a drafter without embed_tokens.weight", f"must have one for {target.family}")
    if not own_head and (draft_vocab != target.vocab_size or model.d_model != target.d_model):
        raise CheckpointError("the checkpoint lacks lm_head.weight")
    flag = _flags(fields, nvidia)
    if flag("norm_before_fc") and flag("fc_norm"):
        raise refused("fc_norm", True, "must be false if norm_before_fc is true")
    return Eagle(
        model=dataclasses.replace(model, tie_embeddings=False),
        taps=_taps(fields, nvidia, len(target.layers)),
        target_layers=len(target.layers),
        target_width=width,
        draft_vocab=draft_vocab,
        windows=_windows(own, len(model.layers)),
        own_embed=own_embed,
        own_head=own_head,
        subset=OFFSETS in tensors and draft_vocab != model.vocab_size,
        embed_scale=target.embed_scale,
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_output=flag("norm_output"),
        mask=_mask_token(fields, model.vocab_size) if _MASK in tensors else None,
    )


def _decoder(fields: Fields) -> ModelConfig:
    """Return the drafter's layers, all of which are full."""
    family = fields.string("model_type", "llama")
    if family not in _FAMILIES:
        raise refused("model_type", family, f"must be one of {', '.join(_FAMILIES)}")
    dropped = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    raw = {key: value for key, value in fields.raw.items() if key not in dropped}
    # The first layer is made from the others' parts, so there is at least one.
    return parse_config({"num_hidden_layers": 1, **raw, "model_type": family}, weights=False)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    types = fields.layer_types([_FULL] * layers, allowed=(_FULL, _SLIDING))
    return tuple(fields.integer("sliding_window", None) if kind == _SLIDING else None for kind in types)


def _flags(fields: Fields, nvidia: Fields) -> Callable[[str], bool]:
    if not nvidia.boolean("use_aux_hidden_state", True):
        raise UnsupportedModel("eagle_config: use_aux_hidden_state = false: must be true")
    return lambda key: fields.boolean(key, nvidia.boolean(key, False))


def _taps(fields: Fields, nvidia: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers before which the target's hidden states are read; by default 2, L / 2 and L - 3."""
    key = "eagle_aux_hidden_state_layer_ids"
    shift = 0 if fields.raw.get(key) else 1
    ids = fields.raw.get(key) or nvidia.raw.get(key)
    if not ids:
        ids, shift = [2, layers // 2, layers - 3], 0
    low, high = -shift, layers - 1
    if (
        not isinstance(ids, list)
        or len(ids) > _MOST_TAPS
        or not all(isinstance(i, int) and not isinstance(i, bool) and low <= i <= high for i in ids)
    ):
        raise refused(key, ids, f"must be at most {_MOST_TAPS} layers of the model, {low} to {high}")
    return tuple(i + shift for i in ids)


def _mask_token(fields: Fields, vocab: int) -> int:
    for key in ("mask_token_id", "ptd_token_id", "pard_token"):
        if fields.raw.get(key) is not None:
            return fields.integer(key, None, low=0, high=vocab - 1)
    raise refused("mask_token_id", None, "must be a token, because the drafter has a tensor mask_hidden")


def _sources(drafter: Eagle, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    model, width, count = drafter.model, drafter.target_width, len(drafter.taps)
    d = model.d_model
    table = sources(model, tensors)
    first = table["layers.0.attention.qkv"]
    wide = tuple(part._replace(shape=(part.shape[0], 2 * d)) for part in first.parts)
    table["layers.0.attention.qkv"] = first._replace(parts=wide)
    table["fc"] = Source((TensorPart("fc.weight", (d, count * width)),), "matrix")
    table["hidden_norm.weight"] = _vector("model.layers.0.hidden_norm.weight", d)
    table["lm_head"] = Source((TensorPart("lm_head.weight", (drafter.draft_vocab, d)),), "matrix")
    if not drafter.own_embed:
        del table["embed"]
    if not drafter.own_head:
        del table["lm_head"]
    if drafter.norm_before_fc:
        table["input_norm.weight"] = _vector("input_norm.weight", count * width)
    if drafter.fc_norm:
        table |= {f"fc_norm.{i}.weight": _vector(f"fc_norm.{i}.weight", width) for i in range(count)}
    return table


def _vector(key: str, size: int) -> Source:
    return Source((TensorPart(key, (size,)),))


def _others(drafter: Eagle, tensors: Mapping[str, Tensor]) -> dict[str, ReadWhole]:
    """Return the readers of the draft vocabulary and of the mask's hidden states."""
    found: dict[str, ReadWhole] = {}
    if drafter.draft_vocab != drafter.model.vocab_size and not drafter.subset:
        raise CheckpointError(f"the checkpoint lacks {OFFSETS}")
    if drafter.subset:
        offsets = tensors[OFFSETS]
        offsets.require_type("I64", "I32")
        offsets.require_shape((drafter.draft_vocab,))
        found["tokens"] = partial(draft_tokens, offsets, drafter.model.vocab_size)
    if drafter.mask is not None:
        mask, size = tensors[_MASK], len(drafter.taps) * drafter.target_width
        mask.require_type("F32", "F16", "BF16")
        if math.prod(mask.shape) != size:
            mask.require_shape((1, 1, size))
        found[_MASK] = lambda reader: reader.rows(mask, 0, 1, columns=size)
    return found


def draft_tokens(offsets: Tensor, vocab: int, reader: TensorReader) -> Int[np.ndarray, " v"]:
    """Return the token of each entry of the draft vocabulary. Raises CheckpointError for tokens that there are not."""
    count = offsets.shape[0]
    tokens: Int[np.ndarray, " v"] = np.arange(count) + reader.rows(offsets, 0, 1, columns=count)[0].astype(np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise CheckpointError(f"{offsets.where}: must name tokens from 0 to {vocab - 1}")
    return tokens

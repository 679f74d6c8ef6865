"""DFlash and DSpark checkpoints: the format of z-lab with those made after it, and the speculators format.

In `target_layer_ids`, number i is what layer i of the target gives. In the speculators format, and in
`eagle_aux_hidden_state_layer_ids`, it is what layer i reads.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jswa.architecture import LayerConfig, ModelConfig
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.drafters.checkpoint import Checkpoint, ReadWhole, folder_of, refused, required
from jswa.model.drafters.dflash import DFlash, DFlash2, Sight
from jswa.model.drafters.eagle_files import OFFSETS, draft_tokens
from jswa.model.hf.common import MAX_LAYERS, usual
from jswa.model.hf.config import parse_config
from jswa.model.hf.families import FAMILIES
from jswa.model.hf.fields import Fields
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.rope import parse_rope
from jswa.model.hf.source import Source, TensorPart, matrix, vector
from jswa.model.hf.tensor_map import sources
from jswa.model.weights.safetensors_files import Tensor, stored_tensors
from jswa.model.weights.torch_vector import read_vector
from jswa.storage.checkpoint_files import is_there
from jswa.storage.json_object import read_object

_LAGUNA, _MUSE, _GEMMA4 = "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel", "Gemma4DSparkModel"
_DFLASH2 = "DFlash2DraftModel", "DFlash2BeamDraftModel"
_ARCHITECTURES = {
    "dflash": ("DFlashDraftModel", "DFlashSpeculator", _LAGUNA, _MUSE, *_DFLASH2),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", _GEMMA4),
}
_SPECULATORS = {"dflash": ("dflash", "dflash2"), "dspark": ("dspark",)}  # their types, by method
_FAMILIES = ("qwen3", "llama", "laguna", "muse_glimmer_assistant", "beam")
_KEYS_OF_DFLASH2 = ("conv_kernel_size", "selector_rank")
_GEMMA4_FAMILIES = ("gemma4_text", "gemma4_unified_text")
_MASK_FILE = "mask_embedding.pt"
_MOST_TAPS, _MOST_BLOCK, _MOST_RANK = 64, 1024, 65536
_UNUSED = re.compile(r"^(t2d|verifier_norm\..*|verifier_lm_head\..*|confidence_head\..*|.*rotary_emb\.inv_freq)$")
_RENAMED = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}
# Keys of checkpoints that need what jswa does not have, and the values with which they need nothing.
_WITHOUT: Mapping[str, tuple[object, ...]] = {
    "projector_type": ("dflash", "dspark"),
    "use_gemma_norm": (False,),
    "logit_scale": (1, 1.0),
    "use_aux_hidden_state": (True,),
    "markov_head_type": ("vanilla",),
    "enable_moe_block": (False,),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
}


def open_dflash(folder: Path, target: ModelConfig) -> Checkpoint:
    """Open a DFlash checkpoint.

    Raises ConfigError that names key, value and limit if it does not fit the target, CheckpointError if a file is
    missing or corrupt, and UnsupportedModel if it needs something that jswa does not have.
    """
    return _open("dflash", folder, target)


def open_dspark(folder: Path, target: ModelConfig) -> Checkpoint:
    """Open a DSpark checkpoint; see `open_dflash`."""
    return _open("dspark", folder, target)


def _open(method: str, folder: Path, target: ModelConfig) -> Checkpoint:
    raw = read_object(folder_of(folder) / "config.json")
    keys = _keys(raw)
    architecture = _architecture(method, keys)
    tensors = stored_tensors(folder, _tensor_name)
    drafter = _parse(method, architecture, keys, target, tensors)
    others: dict[str, ReadWhole] = {}
    if is_there(folder / _MASK_FILE):
        drafter = dataclasses.replace(drafter, own_mask=True)
        vector = _mask_vector(folder / _MASK_FILE, drafter)
        others["mask_embed"] = lambda _: vector
    if drafter.subset:
        others["tokens"] = partial(draft_tokens, *_offsets(drafter, tensors))
    rest = {name: tensor for name, tensor in tensors.items() if name != OFFSETS}
    table, stored = _sources(drafter, rest), parse_quantization(raw)
    return Checkpoint(drafter, drafter.model, drafter.module, table, rest, tensors, stored, others).check()


class _Keys(NamedTuple):
    """The keys of a config.json.

    Attributes:
        own: all of the file's, those of `dflash_config` first.
        layers: those of the layers.
        speculators: whether the file has the speculators format.
    """

    file: Fields
    own: Fields
    layers: Fields
    speculators: bool


def _keys(raw: dict[str, Any]) -> _Keys:
    file, nested = Fields(raw, "config.json"), "transformer_layer_config"
    own = Fields({**raw, **file.table("dflash_config")}, "config.json")
    speculators = raw.get("speculators_model_type") is not None
    layers = Fields(file.table(nested), f"config.json: {nested}") if speculators else file
    return _Keys(file, own, layers, speculators)


def _architecture(method: str, keys: _Keys) -> str:
    """Return the architecture that a config names. Raises ConfigError if it is another's, or needs what jswa lacks."""
    kind, named = keys.file.raw.get("speculators_model_type"), keys.file.raw.get("architectures")
    if keys.speculators and kind not in _SPECULATORS[method]:
        raise refused("speculators_model_type", kind, f"must be one of {', '.join(_SPECULATORS[method])}")
    known = _DFLASH2 if kind == "dflash2" else _ARCHITECTURES[method]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise refused("architectures", named, f"must be one of {', '.join(known)}")
    without = _WITHOUT if named[0] in _DFLASH2 else {**_WITHOUT, **dict.fromkeys(_KEYS_OF_DFLASH2, (0,))}
    for key, values in without.items():
        if (value := keys.own.raw.get(key)) is not None and value not in values:
            raise UnsupportedModel(f"config.json: {key} = {value!r}: not implemented; must be {values[0]!r}")
    return str(named[0])


def _tensor_name(key: str) -> str | None:
    """Return a tensor's name as in a decoder's checkpoint, or None if nothing reads it."""
    name = key.removeprefix("model.")
    if _UNUSED.match(name):
        return None
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    name = name.replace(".self_attn.attention_sink_bias", ".self_attn.sinks")
    return f"model.{name}" if re.match(r"(layers|norm|embed_tokens)\.", name) else name


def _parse(method: str, architecture: str, keys: _Keys, target: ModelConfig, tensors: Mapping[str, Tensor]) -> DFlash:
    own, laguna = keys.own, architecture == _LAGUNA
    if target.altup is not None:
        raise refused("method", method, f"must be another method for {target.family}, which has parallel streams")
    parsed = _parsed(keys, target, architecture)
    model = _full(keys, parsed, tensors)
    required("vocab_size", model.vocab_size, target.vocab_size, "the size of the model's vocabulary")
    width = own.optional_width("target_hidden_size", None) or target.d_model
    required("target_hidden_size", width, target.d_model, "the hidden size of the model")
    own_embed, own_head = "model.embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    if not (own_embed and own_head):
        required("hidden_size", model.d_model, target.d_model, "that of the model, whose embedding or head it uses")
    draft_vocab = own.integer("draft_vocab_size", model.vocab_size, high=model.vocab_size)
    if draft_vocab != model.vocab_size and not (own_head and OFFSETS in tensors):
        raise CheckpointError(f"the checkpoint lacks lm_head.weight or {OFFSETS}: draft_vocab_size = {draft_vocab}")
    markov = own.integer("markov_rank", 0, low=0, high=_MOST_RANK) if method == "dspark" else 0
    if markov and not own_head and (target.final_softcap is not None or target.logit_scale != 1.0):
        raise refused("method", "dspark", f"must be another method for {target.family}, which scales or caps logits")
    return DFlash(
        model=model,
        taps=_taps(keys, len(target.layers), len(model.layers)),
        target_layers=len(target.layers),
        target_width=width,
        sights=_sights(keys, parsed, architecture),
        block=own.integer("block_size", None, low=1 if method == "dspark" else 2, high=_MOST_BLOCK),
        mask=own.integer("mask_token_id", None, low=0, high=model.vocab_size - 1),
        draft_vocab=draft_vocab,
        own_embed=own_embed,
        own_head=own_head,
        subset=draft_vocab != model.vocab_size,
        embed_scale=(model.embed_scale if own_embed else _scale_of(target)) * own.number("input_embedding_scale", 1.0),
        tap_norms=laguna,
        norms_context=laguna,
        from_first=own.boolean("sample_from_anchor", method == "dspark"),
        markov=markov,
        dflash2=_dflash2(own, model, None if own_head else target) if architecture in _DFLASH2 else None,
    )


def _dflash2(own: Fields, model: ModelConfig, head: ModelConfig | None) -> DFlash2:
    """Return what DFlash2 adds. `head`: the model whose head it uses, and so its factor and cap; None: its own."""
    factor, cap = (1.0, None) if head is None else (head.logit_scale, head.final_softcap)
    required("draft_vocab_size", own.integer("draft_vocab_size", model.vocab_size), model.vocab_size, "the vocabulary")
    required("output_multiplier", own.number("output_multiplier", 1.0), factor, "that of the head")
    required("final_logit_softcapping", own.optional_number("final_logit_softcapping", None), cap, "that of the head")
    group = own.integer("conv_group_size", None, high=model.d_model)
    if model.d_model % group:
        raise refused("conv_group_size", group, f"must divide {model.d_model}, the hidden size")
    return DFlash2(
        taps=own.integer("conv_kernel_size", None, high=_MOST_BLOCK),
        group=group,
        rank=own.integer("selector_rank", None, high=_MOST_RANK),
        top=own.integer("selector_top_k", None, high=model.vocab_size),
    )


def _scale_of(target: ModelConfig) -> float:
    """Return the factor of the target's embedding: transformers has that of these families in the embedding itself."""
    return target.embed_scale if target.family.startswith(("gemma3", "gemma4")) else 1.0


def _parsed(keys: _Keys, target: ModelConfig, architecture: str) -> ModelConfig:
    """Return the drafter's layers as those of a model."""
    fields = keys.layers
    kind, known = fields.string("model_type", "qwen3"), _GEMMA4_FAMILIES if architecture == _GEMMA4 else _FAMILIES
    if kind not in known:
        raise refused("model_type", kind, f"must be one of {', '.join(known)}")
    if architecture == _GEMMA4:
        return parse_config({"hidden_size_per_layer_input": 0, **fields.raw}, weights=False)
    raw: dict[str, Any] = {"vocab_size": target.vocab_size, **fields.raw, "model_type": "qwen3"}
    raw.setdefault("use_sliding_window", "sliding_attention" in map(str, fields.raw.get("layer_types") or ()))
    if architecture == _LAGUNA:
        dense = ["dense"] * fields.integer("num_hidden_layers", None, high=MAX_LAYERS)
        raw |= {"model_type": "laguna", "mlp_layer_types": dense}
    model = parse_config(raw, weights=False)
    head_dim = model.layers[0].attention.head_dim
    required("v_head_dim", fields.integer("v_head_dim", head_dim), head_dim, "the size of the keys")
    if any(isinstance(value, dict) for value in fields.table("rope_parameters").values()):
        return model
    # Half of MiMo's heads is rotated, and Laguna's drafter has one base for all layers.
    values = usual(Fields(raw, fields.where), model.family, (), FAMILIES[model.family].defaults)
    halves = fields.boolean("rope_is_neox_style", fields.boolean("is_neox_style", True))
    return _changed(model, {"rope": parse_rope(values, partial=1.0, interleaved=not halves)})


def _full(keys: _Keys, model: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """Return the layers with what `dflash_config` adds; they keep the KV of all positions, whatever queries see."""
    sinks = keys.own.boolean("attention_sink_bias", "model.layers.0.self_attn.sinks" in tensors)
    scale = keys.own.number("attention_value_scale", 1.0)
    return dataclasses.replace(_changed(model, {"reach": None, "sinks": sinks, "v_scale": scale}), tie_embeddings=False)


def _sights(keys: _Keys, model: ModelConfig, architecture: str) -> tuple[Sight, ...]:
    """Return what queries of each layer see."""
    windows = [None if (reach := layer.attention.reach) is None else reach.size for layer in model.layers]
    sights = [Sight(window, _causal(keys, window, architecture)) for window in windows]
    size = keys.own.optional_integer("swa_window_size", None) or keys.layers.optional_integer("sliding_window", None)
    if any(windows):
        return tuple(Sight(sight.window and size, sight.causal) for sight in sights)
    if keys.own.boolean("use_swa", False):  # as of MiMo-V2.5, whose layers are not causal
        size = keys.own.integer("swa_window_size", size)
        return tuple(Sight(size, sight.causal) for sight in sights)
    return tuple(sights)


def _changed(model: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    def changed(layer: LayerConfig) -> LayerConfig:
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **changes))

    return dataclasses.replace(model, layers=tuple(map(changed, model.layers)))


def _causal(keys: _Keys, window: int | None, architecture: str) -> bool:
    """Return whether queries of a layer see no later mask: those with a window do not, unless the config says so."""
    if keys.speculators:  # vLLM 0.33 has the windows' rule for full layers too, which were not trained so
        return window is not None and not keys.file.boolean("sliding_window_non_causal", architecture in _DFLASH2)
    default = window is not None and architecture != _MUSE
    return keys.file.boolean(
        "is_causal", Fields(keys.file.table("dflash_config"), "dflash_config").boolean("causal", default)
    )


def _taps(keys: _Keys, layers: int, own: int) -> tuple[int, ...]:
    """Return the layers before which the target's hidden states are read; by default evenly from 2 to L - 2."""
    key, shift = "aux_hidden_state_layer_ids" if keys.speculators else "eagle_aux_hidden_state_layer_ids", 0
    ids = keys.file.raw.get(key)
    if not ids and not keys.speculators:
        key, shift = "target_layer_ids", 1
        ids = keys.own.raw.get(key)
        if ids is None:
            ids = [1 + round(i * (layers - 4) / (own - 1)) for i in range(own)] if own > 1 else [layers // 2]
    low, high = -shift, layers - shift
    if (
        not isinstance(ids, list)
        or not 1 <= len(ids) <= _MOST_TAPS
        or not all(isinstance(i, int) and not isinstance(i, bool) and low <= i <= high for i in ids)
    ):
        raise refused(key, ids, f"must be 1 to {_MOST_TAPS} layers of the model, {low} to {high}")
    return tuple(i + shift for i in ids)


def _sources(drafter: DFlash, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    model, width, count = drafter.model, drafter.target_width, len(drafter.taps)
    d, vocab = model.d_model, drafter.draft_vocab
    table = sources(model, tensors)
    table["fc"] = matrix({"fc": d}, count * width)
    table["hidden_norm.weight"] = vector("hidden_norm.weight", d)
    table["lm_head"] = matrix({"lm_head": vocab}, d)
    if not drafter.own_embed:
        del table["embed"]
    if not drafter.own_head:
        del table["lm_head"]
    if drafter.tap_norms:
        table |= {f"tap_norms.{i}.weight": vector(f"aux_hidden_norms.{i}.weight", width) for i in range(count)}
    if drafter.markov:
        sizes = {"before": ("markov_w1", model.vocab_size), "after": ("markov_w2", vocab)}
        for ours, (theirs, rows) in sizes.items():
            part = TensorPart(f"markov_head.{theirs}.weight", (rows, drafter.markov))
            table[f"markov.{ours}"] = Source((part,))
    if drafter.dflash2 is not None:
        table |= _sources_of_dflash2(drafter, drafter.dflash2)
    return table


def _sources_of_dflash2(drafter: DFlash, sizes: DFlash2) -> dict[str, Source]:
    table: dict[str, Source] = {}
    d, vocab, own = drafter.model.d_model, drafter.model.vocab_size, "candidate_selector"
    for index in range(len(drafter.model.layers)):
        for part in ("attention", "mlp"):
            ours, theirs = f"convolutions.{index}.{part}", f"model.layers.{index}.{part}_conv"
            weights = 2 * sizes.taps * (d // sizes.group)
            table[f"{ours}.base"] = Source((TensorPart(f"{theirs}.base_kernel", (2, sizes.taps, d)),))
            table[f"{ours}.kernel"] = matrix({f"{theirs}.kernel_projection": weights}, d)
    for ours, theirs in {"before": "predecessor", "after": "successor"}.items():
        table[f"selector.{ours}"] = Source((TensorPart(f"{own}.{theirs}_codebook", (vocab, sizes.rank)),))
    table["selector.hidden"] = matrix({f"{own}.hidden_projection": sizes.rank}, d)
    return table


def _mask_vector(path: Path, drafter: DFlash) -> Float[np.ndarray, " M"]:
    """Return the vector in place of the mask token's embedding. Raises CheckpointError if it is another token's."""
    found, numbers = read_vector(path, drafter.model.d_model)
    if numbers.get("mask_token_id", drafter.mask) != drafter.mask:
        raise CheckpointError(f"{path.name}: mask_token_id = {numbers['mask_token_id']}: must be {drafter.mask}")
    return found


def _offsets(drafter: DFlash, tensors: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the tensor of the draft vocabulary, checked, and the size of the model's vocabulary."""
    offsets = tensors[OFFSETS]
    offsets.require_type("I64", "I32")
    offsets.require_shape((drafter.draft_vocab,))
    return offsets, drafter.model.vocab_size

"""Checkpoints of Gemma 4's assistants (model_type gemma4_assistant and gemma4_unified_assistant)."""

import dataclasses
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jswa.architecture import AttentionConfig, LayerConfig, ModelConfig, Rope
from jswa.errors import CheckpointError
from jswa.model.drafters.assistant import Assistant, Centroids
from jswa.model.drafters.checkpoint import Checkpoint, folder_of, refused, required
from jswa.model.hf.config import parse_config
from jswa.model.hf.fields import Fields
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.source import Source, TensorPart
from jswa.model.hf.tensor_map import sources
from jswa.model.transformer import Params
from jswa.model.weights.safetensors_files import Tensor, TensorReader, stored_tensors
from jswa.storage.json_object import read_object

_KINDS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_TARGETS = ("gemma4_text", "gemma4_unified_text")
_ORDER = "masked_embedding.token_ordering"


def open_assistant(folder: Path, target: ModelConfig) -> Checkpoint:
    """Open an assistant.

    Raises ConfigError that names key, value and limit if it does not fit the target, and CheckpointError if a file is
    missing or corrupt.
    """
    raw = read_object(folder_of(folder) / "config.json")
    fields = Fields(raw, "config.json")
    kind = fields.string("model_type", "")
    if kind not in _KINDS:
        raise refused("model_type", kind, f"must be one of {', '.join(_KINDS)}")
    if target.family not in _TARGETS:
        raise refused("method", "gemma4_assistant", f"must be another method for {target.family}")
    required(
        "backbone_hidden_size", fields.width("backbone_hidden_size", 1536), target.d_model, "the model's hidden size"
    )
    model = _decoder(Fields(fields.table("text_config"), "text_config"), _KINDS[kind], target)
    drafter = Assistant(model, target.d_model, _centroids(fields, model.vocab_size))
    tensors = stored_tensors(folder, _tensor_name)
    rest = {name: tensor for name, tensor in tensors.items() if name != _ORDER}
    others = {}
    if drafter.centroids is not None:
        if _ORDER not in tensors:
            raise CheckpointError(f"the checkpoint lacks {_ORDER}")
        order = tensors[_ORDER]
        order.require_type("I64", "I32")
        order.require_shape((model.vocab_size,))
        others["members"] = partial(_members, order)
    table, stored = _sources(drafter), parse_quantization(raw)
    opened = Checkpoint(drafter, model, drafter.module, table, rest, tensors, stored, others, partial(_fold, model))
    return opened.check()


def _tensor_name(key: str) -> str | None:
    """Return the canonical name of a tensor; the head is the embedding."""
    return None if key == "lm_head.weight" else key


def _decoder(fields: Fields, family: str, target: ModelConfig) -> ModelConfig:
    """Return the assistant's layers, which read the target's KV. Raises ConfigError if they cannot."""
    # A model whose layers all share KV is none for the parser; the target has what they share.
    raw = {key: value for key, value in fields.raw.items() if key != "num_kv_shared_layers"}
    model = parse_config({"hidden_size_per_layer_input": 0, **raw, "model_type": family}, weights=False)
    required("vocab_size", model.vocab_size, target.vocab_size, "the size of the model's vocabulary")
    if model.per_layer_input is not None or any(layer.side is not None for layer in model.layers):
        raise refused("text_config", "per-layer embeddings or experts", "must have neither")
    layers = tuple(_layer(layer, target) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, tie_embeddings=True)


def _layer(layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    own = layer.attention
    owners = [
        index
        for index, one in enumerate(target.layers)
        if one.attention.kind == own.kind and one.attention.kv_from is None
    ]
    if not owners:
        raise refused("layer_types", own.kind, "must be kinds of layers that the model has")
    theirs = target.layers[owners[-1]].attention
    required(f"head_dim of {own.kind} layers", own.head_dim, theirs.head_dim, "as the model's keys have")
    if own.num_heads % theirs.num_kv_heads:
        raise refused("num_attention_heads", own.num_heads, f"must be a multiple of the model's {theirs.num_kv_heads}")
    attention = dataclasses.replace(
        own,
        num_kv_heads=theirs.num_kv_heads,
        v_head_dim=theirs.v_head_dim,
        reach=theirs.reach,
        rope=_rope(own, theirs),
        keys_as_values=theirs.keys_as_values,
        folded_keys=theirs.folded_keys,
        kv_from=owners[-1],
    )
    return dataclasses.replace(layer, attention=attention)


def _rope(own: AttentionConfig, theirs: AttentionConfig) -> Rope:
    """Return the assistant's rotary embedding, which must rotate the numbers that the target rotates."""
    assert own.rope is not None
    assert theirs.rope is not None
    turned = [frequency for frequency in own.rope.inv_freq if frequency]
    if theirs.folded_keys:
        required("rotated numbers of full layers", 2 * len(turned), theirs.stored_head_dim, "as the model's keys have")
        return dataclasses.replace(own.rope, inv_freq=tuple(turned))
    rest = (0.0,) * (own.head_dim // 2 - len(own.rope.inv_freq))
    return dataclasses.replace(own.rope, inv_freq=own.rope.inv_freq + rest)


def _centroids(fields: Fields, vocab: int) -> Centroids | None:
    if not fields.boolean("use_ordered_embeddings", False):
        return None
    count = fields.integer("num_centroids", 2048, high=vocab)
    if vocab % count:
        raise refused("num_centroids", count, f"must divide vocab_size = {vocab}")
    return Centroids(count, fields.integer("centroid_intermediate_top_k", 32, high=count))


def _sources(drafter: Assistant) -> dict[str, Source]:
    model, width = drafter.model, drafter.target_width
    table = sources(model)
    for name, source in table.items():
        if source.layout == "product":  # the other factor is the target's; see `_fold`
            table[name] = source._replace(parts=source.parts[:1], layout="rows", folds=source.folds[:1])
    table["pre"] = Source((TensorPart("pre_projection.weight", (model.d_model, 2 * width)),), "matrix")
    table["post"] = Source((TensorPart("post_projection.weight", (width, model.d_model)),), "matrix")
    if drafter.centroids is not None:
        part = TensorPart("masked_embedding.centroids.weight", (drafter.centroids.count, model.d_model))
        table["centroids"] = Source((part,), "matrix")
    return table


def _members(order: Tensor, reader: TensorReader) -> Int[np.ndarray, " V"]:
    """Return the tokens, cluster by cluster. Raises CheckpointError unless each is there once."""
    tokens: Int[np.ndarray, " V"] = reader.rows(order, 0, 1, columns=order.shape[0])[0]
    if not np.array_equal(np.sort(tokens), np.arange(len(tokens))):
        raise CheckpointError(f"{order.where}: must name each of the {len(tokens)} tokens once")
    return tokens


def _fold(model: ModelConfig, params: Params, target: Params) -> Params:
    """Return the parameters, with the weight of the target's key norm in the queries that read folded keys.

    A target that stores a part of its keys alone has the weight of the other part in the norm of its own queries.
    """
    folded: Params = {}
    for index, layer in enumerate(model.layers):
        attention, name = layer.attention, f"layers.{index}.attention.q_norm.weight"
        if attention.folded_keys:
            keys = target[f"layers.{attention.kv_from}.attention.k_norm.weight"]
            turned = attention.stored_head_dim
            own, rest = params[name], keys[: attention.head_dim - turned]
            scaled = (own[turned:].astype(jnp.float32) * rest.astype(jnp.float32)).astype(own.dtype)
            folded[name] = jnp.concatenate([own[:turned], scaled])
    return params | folded

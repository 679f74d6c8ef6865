"""Where each parameter comes from in a Hugging Face checkpoint: tensors, their shapes, how they are put together."""

import re
from typing import Literal, NamedTuple

import numpy as np

from jswa.architecture import LayerConfig, MlpConfig, ModelConfig, MoeConfig
from jswa.model.hf.config import FAMILIES
from jswa.model.hf.names import Names


class Part(NamedTuple):
    """One checkpoint tensor: its name and the shape it must have."""

    key: str
    shape: tuple[int, ...]


class Source(NamedTuple):
    """Where one parameter comes from.

    `how`: "rows", stacked along the first axis; "matrix", the same and then transposed from torch's [out, in];
    "experts", `per_expert` parts at a time a matrix, and these stacked; "interleaved", the last axis's even entries
    first and then the odd ones.
    """

    parts: tuple[Part, ...]
    how: Literal["rows", "matrix", "experts", "interleaved"] = "rows"
    per_expert: int = 1


# Prefixes under which checkpoints keep the text model, most specific first, and what the rest is called then.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
_BARE = re.compile(r"^(embed_tokens|layers|norm)\.")
_NOT_TEXT = re.compile(r"(^|\.)(vision_tower|multi_modal_projector|vision_model|mtp)\.|\.rotary_emb\.inv_freq$")


def canonical_name(key: str) -> str | None:
    """A checkpoint key as a text-only checkpoint would have it; None for what a text decoder does not need."""
    if _NOT_TEXT.search(key):
        return None
    for prefix, replacement in _PREFIXES:
        if key.startswith(prefix):
            return replacement + key.removeprefix(prefix)
    return f"model.{key}" if _BARE.match(key) else key


def sources(config: ModelConfig) -> dict[str, Source]:
    """The source of every parameter of the decoder, by our name."""
    d, vocab, names = config.d_model, config.vocab_size, FAMILIES[config.family].names
    table = {
        "embed": Source((Part("model.embed_tokens.weight", (vocab, d)),)),
        "final_norm.weight": Source((Part("model.norm.weight", (d,)),)),
    }
    if not config.tie_embeddings:
        table["lm_head"] = Source((Part("lm_head.weight", (vocab, d)),), "matrix")
    for index, layer in enumerate(config.layers):
        theirs = f"model.layers.{index}"
        parts = {f"{norm}.weight": _vector(f"{theirs}.{name}.weight", d) for norm, name in names.norms.items()}
        parts |= _attention(layer, d, f"{theirs}.self_attn", names)
        if isinstance(layer.mlp, MlpConfig):
            parts |= _mlp("mlp", layer.mlp, d, f"{theirs}.{names.mlp}")
        else:
            parts |= _moe(layer.mlp, d, f"{theirs}.{names.mlp}", names)
        table |= {f"layers.{index}.{name}": source for name, source in parts.items()}
    return table


def assemble(source: Source, pieces: list[np.ndarray]) -> np.ndarray:
    """One parameter from its checkpoint tensors."""
    if source.how == "experts":
        n = source.per_expert
        return np.stack([np.concatenate(pieces[i : i + n]).T for i in range(0, len(pieces), n)])
    stacked = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if source.how == "interleaved":
        return np.concatenate([stacked[..., ::2], stacked[..., 1::2]], axis=-1)
    return stacked.T if source.how == "matrix" else stacked


def _attention(layer: LayerConfig, d: int, prefix: str, names: Names) -> dict[str, Source]:
    a = layer.attention
    qkv = {
        "q_proj": a.num_heads * a.head_dim,
        "k_proj": a.num_kv_heads * a.head_dim,
        "v_proj": a.num_kv_heads * a.v_head_dim,
    }
    table = {
        "attention.qkv": _matrix(prefix, qkv, d),
        "attention.out": _matrix(prefix, {"o_proj": d}, a.num_heads * a.v_head_dim),
    }
    if a.qkv_bias:
        table["attention.qkv_bias"] = _bias(prefix, qkv)
    if a.out_bias:
        table["attention.out_bias"] = _bias(prefix, {"o_proj": d})
    if a.qk_norm is not None and a.qk_norm.weighted:
        for norm in ("q_norm", "k_norm"):
            table[f"attention.{norm}.weight"] = _vector(f"{prefix}.{norm}.weight", a.head_dim)
    if a.sinks:
        table["attention.sinks"] = _vector(f"{prefix}.{names.sinks}", a.num_heads)
    return table


def _mlp(ours: str, config: MlpConfig, d: int, prefix: str) -> dict[str, Source]:
    gate_up = {"gate_proj": config.hidden, "up_proj": config.hidden}
    table = {
        f"{ours}.gate_up": _matrix(prefix, gate_up, d),
        f"{ours}.down": _matrix(prefix, {"down_proj": d}, config.hidden),
    }
    if config.bias:
        table[f"{ours}.gate_up_bias"] = _bias(prefix, gate_up)
        table[f"{ours}.down_bias"] = _bias(prefix, {"down_proj": d})
    return table


def _moe(config: MoeConfig, d: int, prefix: str, names: Names) -> dict[str, Source]:
    experts, f = config.num_experts, config.hidden
    table = {"mlp.router": Source((Part(f"{prefix}.{names.router}", (experts, d)),), "matrix")}
    if config.router.bias:
        table["mlp.router_bias"] = _vector(f"{prefix}.{names.router_bias}", experts)
    if config.router.selection_bias:
        table["mlp.selection_bias"] = _vector(f"{prefix}.{names.selection_bias}", experts)
    if config.shared is not None:
        table |= _mlp("mlp.shared", config.shared, d, f"{prefix}.{names.shared}")
    folder = f"{prefix}.{names.expert}"
    if names.experts == "each":
        each = [f"{folder}.{e}" for e in range(experts)]
        gate_up = [Part(f"{one}.{name}.weight", (f, d)) for one in each for name in (names.gate, names.up)]
        table["mlp.gate_up"] = Source(tuple(gate_up), "experts", per_expert=2)
        table["mlp.down"] = Source(tuple(Part(f"{one}.{names.down}.weight", (d, f)) for one in each), "experts")
        return table
    how: Literal["rows", "interleaved"] = "interleaved" if names.experts == "interleaved" else "rows"
    table["mlp.gate_up"] = Source((Part(f"{folder}.gate_up_proj", (experts, d, 2 * f)),), how)
    table["mlp.down"] = Source((Part(f"{folder}.down_proj", (experts, f, d)),))
    if config.bias:
        table["mlp.gate_up_bias"] = Source((Part(f"{folder}.gate_up_proj_bias", (experts, 2 * f)),), how)
        table["mlp.down_bias"] = Source((Part(f"{folder}.down_proj_bias", (experts, d)),))
    return table


def _vector(key: str, size: int) -> Source:
    return Source((Part(key, (size,)),))


def _matrix(prefix: str, rows: dict[str, int], columns: int) -> Source:
    return Source(tuple(Part(f"{prefix}.{name}.weight", (n, columns)) for name, n in rows.items()), "matrix")


def _bias(prefix: str, rows: dict[str, int]) -> Source:
    return Source(tuple(Part(f"{prefix}.{name}.bias", (n,)) for name, n in rows.items()))

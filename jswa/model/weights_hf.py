"""The names of parameters in Hugging Face checkpoints, as data.

Each of our parameters is a stack of checkpoint tensors along their first axis (torch's output axis), transposed to
[in, out] where it is a matrix that tokens are multiplied with.
"""

import re
from typing import NamedTuple

from jswa.config import LayerConfig, ModelConfig


class Part(NamedTuple):
    """One checkpoint tensor: its name and the shape it must have."""

    key: str
    shape: tuple[int, ...]


class Source(NamedTuple):
    """Where one parameter comes from."""

    parts: tuple[Part, ...]
    transpose: bool = False


# Norm names by family; every family not listed has llama's.
_LLAMA_NORMS = {"pre_attn": "input_layernorm", "pre_mlp": "post_attention_layernorm"}
_NORMS = {
    "gemma3": {
        "pre_attn": "input_layernorm",
        "post_attn": "post_attention_layernorm",
        "pre_mlp": "pre_feedforward_layernorm",
        "post_mlp": "post_feedforward_layernorm",
    }
}

# Prefixes under which checkpoints keep the text model, most specific first, and what the rest is called then.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
_BARE = re.compile(r"^(embed_tokens|layers|norm)\.")
_NOT_TEXT = re.compile(r"(^|\.)(vision_tower|multi_modal_projector|vision_model)\.|\.rotary_emb\.inv_freq$")


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
    d, vocab = config.d_model, config.vocab_size
    table = {
        "embed": Source((Part("model.embed_tokens.weight", (vocab, d)),)),
        "final_norm.weight": Source((Part("model.norm.weight", (d,)),)),
    }
    if not config.tie_embeddings:
        table["lm_head"] = Source((Part("lm_head.weight", (vocab, d)),), transpose=True)
    norms = _NORMS.get(config.family, _LLAMA_NORMS)
    for index, layer in enumerate(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        for norm, name in norms.items():
            table[f"{ours}.{norm}.weight"] = Source((Part(f"{theirs}.{name}.weight", (d,)),))
        table |= {f"{ours}.{name}": source for name, source in _layer(layer, d, theirs).items()}
    return table


def _layer(layer: LayerConfig, d: int, prefix: str) -> dict[str, Source]:
    a, f = layer.attention, layer.mlp.hidden
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {
        "q_proj": a.num_heads * a.head_dim,
        "k_proj": a.num_kv_heads * a.head_dim,
        "v_proj": a.num_kv_heads * a.v_head_dim,
    }
    gate_up = {"gate_proj": f, "up_proj": f}
    table = {
        "attention.qkv": _matrix(attn, qkv, d),
        "attention.out": _matrix(attn, {"o_proj": d}, a.num_heads * a.v_head_dim),
        "mlp.gate_up": _matrix(mlp, gate_up, d),
        "mlp.down": _matrix(mlp, {"down_proj": d}, f),
    }
    if a.qkv_bias:
        table["attention.qkv_bias"] = _bias(attn, qkv)
    if a.out_bias:
        table["attention.out_bias"] = _bias(attn, {"o_proj": d})
    if layer.mlp.bias:
        table["mlp.gate_up_bias"] = _bias(mlp, gate_up)
        table["mlp.down_bias"] = _bias(mlp, {"down_proj": d})
    if a.qk_norm is not None:
        for norm in ("q_norm", "k_norm"):
            table[f"attention.{norm}.weight"] = Source((Part(f"{attn}.{norm}.weight", (a.head_dim,)),))
    return table


def _matrix(prefix: str, rows: dict[str, int], columns: int) -> Source:
    return Source(tuple(Part(f"{prefix}.{name}.weight", (n, columns)) for name, n in rows.items()), transpose=True)


def _bias(prefix: str, rows: dict[str, int]) -> Source:
    return Source(tuple(Part(f"{prefix}.{name}.bias", (n,)) for name, n in rows.items()))

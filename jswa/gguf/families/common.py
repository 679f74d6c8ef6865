"""Keys of config.json that nearly all architectures have, read from their metadata."""

from typing import Any

from jswa.gguf.families.keys import Model
from jswa.gguf.families.rope import rope

Config = dict[str, Any]


def usual(m: Model, *, heads: bool = True) -> Config:
    """Return the keys that nearly all architectures have; `heads`: also the heads of attention, alike in all layers."""
    m.requires("attention.causal", True)
    m.requires("pooling_type", 0)
    found: Config = {
        "vocab_size": m.shape("token_embd.weight", 2)[0],
        "hidden_size": m.integer("embedding_length"),
        "num_hidden_layers": m.layers,
        "max_position_embeddings": m.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in m.tensors,
    }
    if heads:
        count = m.same("attention.head_count")
        head_dim = m.integer("attention.key_length", found["hidden_size"] // count or 1)
        m.requires("attention.value_length", head_dim)
        found |= {
            "num_attention_heads": count,
            "num_key_value_heads": m.same("attention.head_count_kv", count),
            "head_dim": head_dim,
        }
    return found


def plain(m: Model, *, local_base: bool = False) -> Config:
    """Return the keys of a model with whole heads rotated, one feed-forward width, and RMS norms; see `rope`."""
    found = usual(m)
    found |= rope(m, found["head_dim"], local_base=local_base)
    found["rms_norm_eps"] = m.number("attention.layer_norm_rms_epsilon")
    return found | {"intermediate_size": m.same("feed_forward_length")}


def biases(m: Model) -> Config:
    return {"attention_bias": m.has("attn_q.bias"), "mlp_bias": m.has("ffn_down.bias")}


def sparse(m: Model) -> list[str]:
    """Return which layers are mixtures: the layers that have a router."""
    return ["sparse" if routed else "dense" for routed in m.which("ffn_gate_inp.weight")]


def types(slides: list[bool], local: str = "sliding_attention") -> list[str]:
    return [local if one else "full_attention" for one in slides]

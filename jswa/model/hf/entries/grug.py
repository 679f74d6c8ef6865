"""Entry of Marin's mixture of experts."""

from collections.abc import Mapping

from jswa.model.hf import grug
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import Names

_NAMES = Names(
    norm_gates={"pre_attn": "attn_gated_norm", "pre_mlp": "mlp_gated_norm"},
    gate="attn_gate",
    router="mlp.router.weight",
    selection_bias="mlp.router.bias",
    stored="stacked",
    shared="shared_expert",
)
# Configs of older exports have other names.
_ALIASES = {
    "attention_head_dim": "head_dim",
    "hidden_dim": "hidden_size",
    "intermediate_dim": "moe_intermediate_size",
    "layer_norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "num_local_experts": "num_experts",
    "shared_expert_intermediate_dim": "shared_expert_intermediate_size",
}

GRUG: Mapping[str, Family] = {
    "grug_moe": Family(
        grug.grug_moe,
        Defaults(
            vocab_size=128256,
            hidden_size=2560,
            num_hidden_layers=26,
            num_attention_heads=20,
            max_position_embeddings=65536,
            num_key_value_heads=5,
            head_dim=128,
            rms_norm_eps=1e-5,
            sliding_window=2048,
        ),
        _NAMES,
        aliases=_ALIASES,
    ),
}

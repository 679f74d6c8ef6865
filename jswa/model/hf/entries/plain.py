"""Entries of models whose layers are all full, and whose block is nearly llama's."""

from collections.abc import Mapping

from jswa.model.hf import plain
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import Names

PLAIN: Mapping[str, Family] = {
    "seed_oss": Family(
        plain.seed_oss,
        Defaults(155136, 4096, 64, 80, 524288, 27648, num_key_value_heads=8, head_dim=128),
        eos=2,
    ),
    "ernie4_5": Family(
        plain.ernie4_5,
        Defaults(
            vocab_size=103424,
            hidden_size=1024,
            num_hidden_layers=18,
            num_attention_heads=16,
            max_position_embeddings=131072,
            intermediate_size=3072,
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        eos=2,
    ),
    "glm4": Family(
        plain.glm4,
        Defaults(
            vocab_size=151552,
            hidden_size=4096,
            num_hidden_layers=40,
            num_attention_heads=32,
            max_position_embeddings=131072,
            intermediate_size=13696,
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1.5625e-7,
        ),
        Names(
            norms={
                "pre_attn": "input_layernorm",
                "post_attn": "post_self_attn_layernorm",
                "pre_mlp": "post_attention_layernorm",
                "post_mlp": "post_mlp_layernorm",
            },
            fused_up=True,
        ),
        eos=(151329, 151336, 151338),
    ),
    "granite": Family(plain.granite, Defaults(32000, 4096, 32, 32, 2048, 11008), eos=2),
    "granitemoe": Family(
        plain.granitemoe,
        Defaults(32000, 4096, 32, 32, 2048, 11008),
        Names(
            router="block_sparse_moe.router.layer.weight",
            experts="block_sparse_moe",
            stored="rows",
            expert_rows=("input_linear.weight", "output_linear.weight"),
        ),
        eos=2,
    ),
    "olmoe": Family(
        plain.olmoe,
        Defaults(50304, 2048, 16, 16, 4096, 2048, rms_norm_eps=1e-5),
        eos=50279,
        aliases={"num_local_experts": "num_experts"},
    ),
    "arcee": Family(plain.arcee, Defaults(32000, 2560, 32, 32, 4096, 18432, rms_norm_eps=1e-5), eos=128001),
    "nemotron": Family(plain.nemotron, Defaults(256000, 6144, 32, 48, 4096, 24576), eos=3),
    "hunyuan_v1_dense": Family(
        plain.hunyuan_v1_dense,
        Defaults(290943, 4096, 32, 32, 2048, 11008, rms_norm_eps=1e-5),
        Names(q_norm="query_layernorm", k_norm="key_layernorm"),
        eos=2,
    ),
    "apertus": Family(
        plain.apertus,
        Defaults(131072, 4096, 32, 32, 65536, 14336, rms_norm_eps=1e-5),
        Names(norms={"pre_attn": "attention_layernorm", "pre_mlp": "feedforward_layernorm"}),
        eos=2,
    ),
}

"""Entries of models with gated attention."""

from collections.abc import Mapping

from jswa.model.hf import gated
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import LLAMA_NORMS, SANDWICH, SANDWICH_NORMS, Names

GATED: Mapping[str, Family] = {
    "afmoe": Family(
        gated.afmoe,
        Defaults(200192, 2048, 32, 16, 16384, 6144, head_dim=128, rms_norm_eps=1e-5, sliding_window=1024),
        Names(
            norms={**SANDWICH_NORMS, "pre_mlp": "pre_mlp_layernorm", "post_mlp": "post_mlp_layernorm"},
            router="mlp.router.gate.weight",
            selection_bias="mlp.expert_bias",
        ),
    ),
    "kolibri1": Family(
        gated.kolibri1,
        Defaults(128000, 2560, 50, 48, 262144, num_key_value_heads=4, head_dim=128, sliding_window=513),
        Names(
            norms={**LLAMA_NORMS, "post_attn": "post_attn_norm", "post_mlp": "post_ffn_norm"},
            selection_bias="moe.router.expert_bias",
        ),
    ),
    "beam": Family(
        gated.beam,
        Defaults(151936, 5120, 52, 48, 8192, 20480, num_key_value_heads=8, head_dim=128, sliding_window=512),
        SANDWICH,
    ),
    "laguna": Family(
        gated.laguna,
        Defaults(100352, 2048, 40, 48, 131072, 8192, num_key_value_heads=8, head_dim=128, sliding_window=512),
        Names(gate="g_proj", selection_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert"),
    ),
    "spark2_5": Family(
        gated.spark2_5,
        Defaults(32000, 4096, 32, 32, 2048, 11008),
        Names(qkv="q_k_v_proj", out="out_proj", gate="g_proj"),
        eos=2,
    ),
    "step3p5": Family(
        gated.step3p5,
        Defaults(128815, 4096, 45, 64, 128000, 11264, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        Names(
            gate="g_proj",
            router="moe.gate.weight",
            selection_bias="moe.router_bias",
            experts="moe",
            stored="stacked",
            shared="share_expert",
            extra_layers=True,
        ),
        aliases={
            "num_attention_groups": "num_key_value_heads",
            "num_local_experts": "n_routed_experts",
            "moe_num_experts": "n_routed_experts",
            "moe_top_k": "num_experts_per_tok",
            "share_expert_dims": "share_expert_dim",
        },
    ),
}

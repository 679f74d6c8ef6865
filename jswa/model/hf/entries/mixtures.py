"""Entries of mixtures of experts with llama's block."""

from collections.abc import Mapping

from jswa.model.hf import mixture
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import Names

_LLAMA4 = Names(
    mlp="feed_forward",
    router="feed_forward.router.weight",
    experts="feed_forward.experts",
    stored="halves",
    shared="feed_forward.shared_expert",
)
_MIXTRAL = Names(
    router="block_sparse_moe.gate.weight",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)
_SHARED_EXPERT = Names(shared="mlp.shared_expert")


MIXTURES: Mapping[str, Family] = {
    "gpt_oss": Family(
        mixture.gpt_oss,
        Defaults(
            vocab_size=201088,
            hidden_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            max_position_embeddings=131072,
            intermediate_size=2880,
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            sliding_window=128,
        ),
        Names(router="mlp.router.weight", router_bias="mlp.router.bias", stored="interleaved"),
    ),
    "mimo_v2_flash": Family(
        mixture.mimo_v2_flash,
        Defaults(152576, 4096, 48, 64, 131072, 16384, num_key_value_heads=4, head_dim=192),
        Names(sinks="attention_sink_bias"),
    ),
    "llama4_text": Family(
        mixture.llama4_text,
        Defaults(202048, 5120, 48, 40, 131072, 8192, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        _LLAMA4,
        eos=2,
    ),
    "mixtral": Family(
        mixture.mixtral,
        Defaults(32000, 4096, 32, 32, 131072, 14336, num_key_value_heads=8, rms_norm_eps=1e-5),
        _MIXTRAL,
        eos=2,
    ),
    "phimoe": Family(
        mixture.phimoe,
        Defaults(32064, 4096, 32, 32, 131072, 6400, num_key_value_heads=8, rms_norm_eps=1e-5),
        _MIXTRAL,
        eos=2,
    ),
    "qwen2_moe": Family(
        mixture.qwen2_moe,
        Defaults(151936, 2048, 24, 16, 32768, 5632, num_key_value_heads=16, sliding_window=4096),
        _SHARED_EXPERT,
    ),
    "qwen3_moe": Family(
        mixture.qwen3_moe,
        Defaults(151936, 2048, 24, 32, 32768, 6144, num_key_value_heads=4, sliding_window=4096),
    ),
    "dots1": Family(
        mixture.dots1,
        Defaults(152064, 4608, 62, 32, 2048, 10944, num_key_value_heads=32, sliding_window=4096),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "exaone_moe": Family(
        mixture.exaone_moe,
        Defaults(102400, 4096, 32, 32, 2048, 16384, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096),
        Names(selection_bias="mlp.e_score_correction_bias"),
        eos=53,
    ),
    "mellum": Family(
        mixture.mellum,
        Defaults(98304, 2304, 28, 32, 131072, 7168, num_key_value_heads=4, head_dim=128, sliding_window=1024),
    ),
    "flint": Family(
        mixture.flint,
        Defaults(150144, 2048, 49, 32, 262144, 6144, num_key_value_heads=4, head_dim=128, sliding_window=513),
        Names(sinks="softmax_offset", shared="mlp.shared_expert"),
    ),
}

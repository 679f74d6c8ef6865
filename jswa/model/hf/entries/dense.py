"""Entries of dense models with llama's block."""

from collections.abc import Mapping

from jswa.model.hf import dense
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import Names

_MISTRAL = Family(
    dense.mistral,
    Defaults(32000, 4096, 32, 32, 131072, 14336, num_key_value_heads=8, sliding_window=4096),
    eos=2,
)

DENSE: Mapping[str, Family] = {
    "llama": Family(dense.llama, Defaults(32000, 4096, 32, 32, 2048, 11008), eos=2),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": Family(
        dense.ministral3,
        Defaults(131072, 4096, 34, 32, 262144, 14336, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        eos=2,
    ),
    "qwen2": Family(
        dense.qwen2, Defaults(151936, 4096, 32, 32, 32768, 22016, num_key_value_heads=32, sliding_window=4096)
    ),
    "qwen3": Family(
        dense.qwen3,
        Defaults(151936, 4096, 32, 32, 32768, 22016, num_key_value_heads=32, head_dim=128, sliding_window=4096),
    ),
    "phi3": Family(
        dense.phi3, Defaults(32064, 3072, 32, 32, 4096, 8192, rms_norm_eps=1e-5), Names(fused=True), eos=32000
    ),
    "phi4_multimodal": Family(
        dense.phi3,
        Defaults(200064, 3072, 32, 32, 131072, 8192, num_key_value_heads=8, rms_norm_eps=1e-5),
        Names(fused=True, adapters=("speech", "vision")),
        eos=(199999, 200020),
    ),
    "starcoder2": Family(
        dense.starcoder2,
        Defaults(49152, 3072, 30, 24, 4096, 12288, num_key_value_heads=2, tie_word_embeddings=True),
        Names(mlp_up="c_fc", mlp_down="c_proj"),
        eos=50256,
    ),
    "smollm3": Family(
        dense.smollm3,
        Defaults(128256, 2048, 36, 16, 32768, 11008, num_key_value_heads=4, tie_word_embeddings=True),
        eos=128001,
    ),
    "cwm": Family(
        dense.cwm,
        Defaults(
            vocab_size=128256,
            hidden_size=6144,
            num_hidden_layers=64,
            num_attention_heads=48,
            max_position_embeddings=131072,
            intermediate_size=21504,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            sliding_window=8192,
        ),
        eos=(128001, 128008, 128009),
    ),
}

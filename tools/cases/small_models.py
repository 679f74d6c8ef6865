"""Configs of models that are small, but whose heads and experts have sizes that the Hopper kernels take.

Their vocabulary holds that of the embedded model's tokenizer.
"""

from typing import Any

_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 150000,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 128,
    "query_pre_attn_scalar": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
SMALL_MODELS: dict[str, dict[str, Any]] = {"gpt-oss": _GPT_OSS, "gemma-3": _GEMMA}

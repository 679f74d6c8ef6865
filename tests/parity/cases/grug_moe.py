"""Parity cases of Grug MoE, whose reference is tests/parity/references/grug_moe.py.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import BASE, Case, Config, W, case

GRUG: Config = {key: value for key, value in BASE.items() if key != "intermediate_size"} | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "sliding_window": W,
    "qk_mult": 1.5703274004183786,
    "grugmoe_attention_mode": "production",
    "grugmoe_artifact_schema_version": 1,
}
# Names of older exports.
OLD = {
    "hidden_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "layer_norm_eps",
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_intermediate_size": "intermediate_dim",
    "shared_expert_intermediate_size": "shared_expert_intermediate_dim",
    "head_dim": "attention_head_dim",
}


def old_names(config: Config) -> Config:
    """Return the config with other names, and without keys whose values are defaults."""
    kept = {key: value for key, value in config.items() if key not in ("qk_mult", "grugmoe_attention_mode")}
    return {OLD.get(key, key): value for key, value in kept.items()}


def grug(name: str, **kwargs: object) -> Case:
    return replace(case(name, "grug_moe", GRUG, None, kwargs), cached=False, old_is_read=False)


CASES = (
    replace(grug("base"), old_style=old_names),
    grug("last_is_full", num_hidden_layers=5, num_experts_per_tok=3, rope_theta=300.0, qk_mult=1.2, rms_norm_eps=0.1),
)

"""Parity cases of IQuest-Q1, whose reference is tests/parity/references/iquest_q1.py.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import BASE, Case, Config, F, Keys, S, W, case

IQUEST: Config = BASE | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "rotary_dim": 8,
    "dense_intermediate_size": 96,
    "intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": W,
    "rope_theta": 1e6,
    "swa_rope_theta": 1e4,
    "no_rope_layers": [],
    "mlp_only_layers": [0],
    "first_layers_types": [F],
    "hybrid_layers_types_block": [F, S, S, S],
    "num_hybrid_layers_block": 1,
    "last_layers_types": [F],
    "enable_sink_attention": True,
    "softmax_scale": None,
    "first_layer_attn_out_scale": 1.0,
    "first_layer_ffn_out_scale": 1.0,
    "attn_out_scale": 1.0,
    "ffn_out_scale": 0.53881590608,
    "logit_scale": 1.0,
}
# The defaults of SGLang's config class.
DEFAULTS = (
    *("swa_rope_theta", "no_rope_layers", "mlp_only_layers", "first_layers_types", "hybrid_layers_types_block"),
    *("enable_sink_attention", "softmax_scale", "first_layer_attn_out_scale", "first_layer_ffn_out_scale"),
    *("attn_out_scale", "ffn_out_scale", "logit_scale", "rope_theta", "rms_norm_eps"),
)
CALM = (("sink_k", 4.0),)  # as large as keys


def iquest(name: str, **kwargs: object) -> Case:
    made = case(name, "iquest_q1", IQUEST, Keys(drop=DEFAULTS), kwargs)
    return replace(made, cached=False, old_is_read=False, scales=CALM)


CASES = (
    iquest("base"),
    replace(
        iquest(
            "all_keys",
            num_hidden_layers=4,
            first_layers_types=[F, S],
            hybrid_layers_types_block=[S],
            num_hybrid_layers_block=2,
            last_layers_types=[],
            rotary_dim=6,
            rope_theta=500.0,
            swa_rope_theta=300.0,
            no_rope_layers=[0, 2],
            mlp_only_layers=[1, 3],
            softmax_scale=0.3,
            first_layer_attn_out_scale=0.7,
            first_layer_ffn_out_scale=1.3,
            attn_out_scale=0.6,
            ffn_out_scale=0.9,
            logit_scale=0.8,
            rms_norm_eps=0.1,
        ),
        old_style=None,
    ),
    replace(iquest("no_sinks", enable_sink_attention=False), old_style=None),
)

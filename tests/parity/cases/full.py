"""Parity cases of families without local layers: Gemma 1.

What and why: as in cases.py.
"""

from tests.parity.case import BASE, LLAMA3, SIZES, Case, Config, OldForm, OldHub, case, rope

# gemma --------------------------------------------------------------------------------------------

GEMMA: Config = BASE | {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}


def gemma(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "gemma", GEMMA, old, kwargs)


GEMMA_CASES = (
    # This has the form of the 2b repository: one key head, and a key for the activation that is not read.
    gemma("base", OldHub(drop=("tie_word_embeddings",), add={"hidden_activation": "silu"})),
    # `gelu` means its approximation by tanh.
    gemma("gelu", OldHub(add={"hidden_act": "gelu"}), hidden_act="gelu", num_key_value_heads=4),
    gemma(
        "silu_bias_untied",
        OldHub(),
        hidden_act="silu",
        attention_bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=0.1,
        num_key_value_heads=2,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 16 heads and key heads of 256, theta 1e4, eps 1e-6, gelu by tanh, tied.
    gemma("defaults", OldHub(only=SIZES), num_attention_heads=16, num_key_value_heads=16, head_dim=256),
)

CASES = GEMMA_CASES

"""Parity cases of Llama, Mistral and Gemma 3.

Each case names a model type of transformers, the keyword arguments of its config, and how the same model looks in older
hub repositories (`rope_theta`, `rope_scaling`, `torch_dtype`, no `layer_types`, other tensor prefixes).

A model whose config is misread still speaks, only worse. So every key that changes the forward of a supported family
has a case that fails if the key is ignored, and every key that must be ignored has one that fails if it is read.

To add a case, write it into a table of this folder, run `make parity`, and commit the family's changed archive under
fixtures/.
"""

from tests.parity.case import BASE, LINEAR8, LLAMA3, YARN, Case, Config, F, OldHub, S, W, rope

GEMMA: Config = BASE | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": W,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
}
VISION: Config = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}


def as_mistral(config: Config) -> Config:
    """Return the config as Mistral models with layers of two kinds have it: `mistral` with `layer_types`."""
    return config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def llama(name: str, old_style: OldHub | None = None, **kwargs: object) -> Case:
    return Case(f"llama_{name}", "llama", BASE | kwargs, old_style)


def mistral(name: str, old_style: OldHub | None = None, **kwargs: object) -> Case:
    return Case(f"mistral_{name}", "mistral", BASE | {"sliding_window": W} | kwargs, old_style)


def gemma3_text(name: str, old_style: OldHub | None = None, **kwargs: object) -> Case:
    return Case(f"gemma3_text_{name}", "gemma3_text", GEMMA | kwargs, old_style)


def gemma3(
    name: str,
    text: Config,
    old_style: OldHub | None = None,
    renames: tuple[tuple[str, str], ...] = (),
    **kwargs: object,
) -> Case:
    config = {"text_config": GEMMA | text, "vision_config": VISION, "mm_tokens_per_image": 4}
    return Case(f"gemma3_{name}", "gemma3", config | kwargs, old_style, renames)


LLAMA_CASES = (
    llama("gqa", OldHub()),
    # The first Llama repositories have hardly any keys.
    llama(
        "mha_defaults",
        OldHub(
            drop=(
                "num_key_value_heads",
                "head_dim",
                "rms_norm_eps",
                "rope_theta",
                "rope_scaling",
                "attention_bias",
                "mlp_bias",
                "hidden_act",
                "tie_word_embeddings",
                "max_position_embeddings",
                "attention_dropout",
                "pretraining_tp",
            )
        ),
        num_key_value_heads=4,
    ),
    llama("mqa", num_key_value_heads=1),
    llama("head_dim", OldHub(), head_dim=24),
    llama("one_layer", num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4),
    llama("attention_bias", OldHub(), attention_bias=True),
    llama("mlp_bias", mlp_bias=True),
    llama("tied", OldHub(), tie_word_embeddings=True),
    Case(
        "llama_tied_with_equal_head",
        "llama",
        BASE | {"tie_word_embeddings": True},
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
    # transformers 5 trusts the checkpoint, not the config, when both tensors are there and differ.
    Case(
        "llama_tied_with_other_head",
        "llama",
        BASE | {"tie_word_embeddings": True},
        extra_tensors={"lm_head.weight": (96, 64)},
    ),
    Case(
        "llama_stored_inv_freq",
        "llama",
        BASE,
        OldHub(),
        extra_tensors={f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (8,) for i in range(3)},
    ),
    llama("vocab131_eps", OldHub(), vocab_size=131, rms_norm_eps=0.1),
    llama("gelu", hidden_act="gelu"),
    llama("gelu_tanh", hidden_act="gelu_pytorch_tanh"),
    llama("rope_theta", OldHub(), rope_parameters=rope(5e5)),
    llama("rope_llama3", OldHub(), head_dim=32, rope_parameters=rope(5e5, LLAMA3)),
    llama("rope_linear", OldHub("type"), rope_parameters=rope(1e4, LINEAR8)),
    llama(
        "rope_dynamic_short",
        OldHub("type"),
        rope_parameters=rope(1e4, LINEAR8 | {"rope_type": "dynamic"}),
    ),
    llama("rope_yarn", OldHub(), head_dim=32, rope_parameters=rope(1e4, YARN)),
    # If original_max_position_embeddings is absent, the bounds come from max_position_embeddings.
    llama(
        "rope_yarn_no_original",
        OldHub("type", drop=("original_max_position_embeddings",)),
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters=rope(1e4, {"rope_type": "yarn", "factor": 4.0}),
    ),
    llama(
        "rope_yarn_options",
        OldHub(),
        head_dim=32,
        rope_parameters=rope(1e4, YARN, attention_factor=1.3, beta_fast=4, beta_slow=0.5, truncate=False),
    ),
    llama(
        "rope_yarn_mscale",
        head_dim=32,
        rope_parameters=rope(1e4, YARN, mscale=0.5, mscale_all_dim=1.5),
    ),
    # mscale counts only together with mscale_all_dim.
    llama("rope_yarn_mscale_alone", head_dim=32, rope_parameters=rope(1e4, YARN, mscale=0.5)),
    # Llama has no window. The cache of transformers reads the key all the same and drops tokens.
    Case("llama_window_ignored", "llama", BASE | {"sliding_window": W}, cached=False),
    llama(
        "odd_sizes",
        OldHub(),
        vocab_size=101,
        hidden_size=60,
        intermediate_size=70,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
    # The default rope of this family ignores the key of partial rotation.
    llama("partial_rotary_ignored", OldHub(), head_dim=32, partial_rotary_factor=0.5),
)

MISTRAL_CASES = (
    mistral("w8", OldHub(drop=("head_dim",))),
    mistral("w3", sliding_window=3),
    # The window holds the query alone. The cache of transformers then keeps every key: [-(W - 1):] is [0:].
    Case("mistral_w1", "mistral", BASE | {"sliding_window": 1}, cached=False),
    mistral("w40", sliding_window=40),
    mistral("w64", sliding_window=64),
    mistral("w100", sliding_window=100),
    mistral("no_window", OldHub(drop=("head_dim",)), sliding_window=None, rope_parameters=rope(1e6)),
    # All values are defaults: 8 key heads, a window of 4096, theta 1e4, eps 1e-6, silu, untied.
    mistral(
        "defaults",
        OldHub(
            drop=(
                "num_key_value_heads",
                "head_dim",
                "sliding_window",
                "rms_norm_eps",
                "rope_theta",
                "rope_scaling",
                "hidden_act",
                "tie_word_embeddings",
                "max_position_embeddings",
            )
        ),
        num_attention_heads=16,
        num_key_value_heads=8,
        sliding_window=4096,
    ),
    mistral("mqa", num_key_value_heads=1),
    mistral("head_dim", OldHub(), head_dim=32, rope_parameters=rope(1e6)),
    mistral("gelu_eps_vocab131", hidden_act="gelu", rms_norm_eps=0.1, vocab_size=131),
    mistral("yarn", OldHub(), head_dim=32, rope_parameters=rope(1e6, YARN)),
    # Mistral ignores the keys of biases.
    mistral("bias_keys_ignored", attention_bias=True, mlp_bias=True),
    Case(
        "mistral_layer_types",
        "ministral",
        BASE
        | {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": W,
            "layer_types": [F, S, S, S, F],
        },
        as_mistral,
    ),
)

GEMMA3_TEXT_CASES = (
    gemma3_text("p6", OldHub(), num_hidden_layers=7, sliding_window_pattern=6),
    # This has the form of the 1b repository: one key head, no scaling, and a query scale of its own.
    gemma3_text("p6_mqa", OldHub(), num_hidden_layers=8, sliding_window_pattern=6, num_key_value_heads=1),
    gemma3_text("p3_linear8", OldHub(), rope_scaling=LINEAR8),
    gemma3_text("p2", OldHub(), num_hidden_layers=5, sliding_window_pattern=2),
    gemma3_text("p1_all_full", OldHub(), num_hidden_layers=3, sliding_window_pattern=1),
    gemma3_text("all_sliding", num_hidden_layers=3, layer_types=[S, S, S]),
    gemma3_text("layer_types", num_hidden_layers=5, layer_types=[F, S, S, F, S]),
    gemma3_text(
        "layer_types_beat_pattern",
        num_hidden_layers=4,
        sliding_window_pattern=2,
        layer_types=[S, S, F, S],
    ),
    # Only sizes are given. Defaults: 8 heads, 4 key heads, head_dim 256, scale 256^-1/2, tied, period
    # 6, eps, both thetas.
    gemma3_text(
        "defaults",
        OldHub(
            only=(
                "architectures",
                "model_type",
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "sliding_window",
                "rope_scaling",
            )
        ),
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window_pattern=6,
        max_position_embeddings=131072,
        rope_scaling=LINEAR8,
    ),
    gemma3_text("query_scalar", OldHub(), query_pre_attn_scalar=56),
    gemma3_text("head_dim", head_dim=24, num_attention_heads=4, query_pre_attn_scalar=24),
    gemma3_text("width40", hidden_size=40, intermediate_size=50),  # sqrt(d) is not a whole number
    gemma3_text("attention_bias", attention_bias=True),
    gemma3_text("untied", OldHub(), tie_word_embeddings=False),
    # Eager transformers caps the logits, but passes no cap to the attention.
    gemma3_text("softcaps", OldHub(), final_logit_softcapping=1.5, attn_logit_softcapping=0.5),
    gemma3_text("gelu", hidden_activation="gelu"),
    gemma3_text("silu", hidden_activation="silu"),
    gemma3_text("hidden_act_ignored", hidden_act="silu"),
    gemma3_text("vocab131_eps", OldHub(), vocab_size=131, rms_norm_eps=0.1),
    gemma3_text("w3", sliding_window=3),
    gemma3_text("w100", sliding_window=100),
    gemma3_text("thetas", OldHub(), rope_parameters={F: rope(3e5), S: rope(500.0)}),
    gemma3_text("rope_sliding_linear", rope_parameters={F: rope(1e6), S: rope(1e4, LINEAR8)}),
    gemma3_text("rope_full_llama3", OldHub(), rope_parameters={F: rope(1e6, LLAMA3), S: rope(1e4)}),
    # In nested rope dicts `truncate` is not read: the bounds are always rounded.
    gemma3_text(
        "rope_full_yarn",
        rope_parameters={F: rope(1e4, YARN, truncate=False, beta_fast=4), S: rope(1e4)},
        head_dim=32,
    ),
    gemma3_text("rope_one_type_given", rope_parameters={F: rope(2e5, LINEAR8)}),
)

# transformers 5.23 saves tensors under the prefixes of the hub; other tools use the names of its modules.
V5_PREFIXES = (
    ("language_model.model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("language_model.lm_head.", "lm_head."),
)
GEMMA3_CASES = (
    gemma3("wrapped", {"rope_scaling": LINEAR8}, OldHub()),
    gemma3("v5_names", {}, None, V5_PREFIXES),
    gemma3("untied", {}, OldHub(), tie_word_embeddings=False),
    gemma3("softcap_ignored", {"final_logit_softcapping": 1.5}),
    # The text config has six keys, as in the 4b repository, and the vocabulary, which is small here.
    gemma3(
        "hub_sparse",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
            "num_hidden_layers": 8,
            "max_position_embeddings": 131072,
            "rope_scaling": LINEAR8,
        },
        OldHub(
            drop_top=("tie_word_embeddings", "initializer_range"),
            only=(
                "hidden_size",
                "intermediate_size",
                "model_type",
                "num_hidden_layers",
                "rope_scaling",
                "sliding_window",
                "vocab_size",
            ),
        ),
        (("vision_tower.", "vision_tower.vision_model."),),
    ),
)

CASES = (*LLAMA_CASES, *MISTRAL_CASES, *GEMMA3_TEXT_CASES, *GEMMA3_CASES)

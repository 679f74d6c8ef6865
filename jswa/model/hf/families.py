"""The model families that jswa runs: one entry per model_type. docs/adding-a-model.md says how to add one.

Each entry names the function that parses the family's config.json; that function is in the module given by its prefix,
for example `gemma.gemma3` in gemma.py. If a key is absent, the default is that of transformers 5.23's config class,
because checkpoints on the hub omit such keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jswa.architecture import ModelConfig
from jswa.model.hf import blocks, dense, gated, gemma, gemma4, mixture
from jswa.model.hf.common import Defaults, Usual
from jswa.model.hf.tensor_names import LLAMA_NORMS, SANDWICH_NORMS, Names


@dataclass(frozen=True)
class Family:
    """How the config.json and the tensors of one model_type are read.

    Attributes:
        parse: derives the ModelConfig.
        defaults: values of absent keys.
        names: names of the tensors.
        eos: end token if config.json has none.
        aliases: other names of config keys, mapped to the usual ones.
    """

    parse: Callable[[Usual], ModelConfig]
    defaults: Defaults
    names: Names = field(default_factory=Names)
    eos: int | tuple[int, ...] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)


_SANDWICH = Names(norms=SANDWICH_NORMS)
_POST = Names(norms={key: SANDWICH_NORMS[key] for key in ("post_attn", "post_mlp")})
_SIDE_NORMS = {
    "side.pre": "pre_feedforward_layernorm_2",
    "side.post": "post_feedforward_layernorm_2",
    "side.post_dense": "post_feedforward_layernorm_1",
}
_GEMMA4 = Names(norms={**SANDWICH_NORMS, **_SIDE_NORMS}, router="router.proj.weight", experts="experts", stored="rows")
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

_GEMMA2 = Defaults(
    vocab_size=256000,
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    max_position_embeddings=8192,
    intermediate_size=9216,
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=4096,
    tie_word_embeddings=True,
)
_MISTRAL = Family(
    dense.mistral,
    Defaults(32000, 4096, 32, 32, 131072, 14336, num_key_value_heads=8, sliding_window=4096),
    eos=2,
)

FAMILIES: Mapping[str, Family] = {
    # Dense models with llama's block.
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
    # Gemma.
    "gemma2": Family(
        gemma.gemma2,
        _GEMMA2,
        _SANDWICH,
        eos=1,
    ),
    "vaultgemma": Family(
        gemma.vaultgemma,
        _GEMMA2,
        Names(norms={key: SANDWICH_NORMS[key] for key in ("pre_attn", "pre_mlp")}),
        eos=1,
    ),
    "gemma3_text": Family(
        gemma.gemma3,
        Defaults(
            vocab_size=262208,
            hidden_size=2304,
            num_hidden_layers=26,
            num_attention_heads=8,
            max_position_embeddings=131072,
            intermediate_size=9216,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=4096,
            tie_word_embeddings=True,
        ),
        _SANDWICH,
        eos=1,
    ),
    "gemma3n_text": Family(
        gemma4.gemma3n,
        Defaults(
            vocab_size=262400,
            hidden_size=2048,
            num_hidden_layers=35,
            num_attention_heads=8,
            max_position_embeddings=32768,
            num_key_value_heads=2,
            head_dim=256,
            sliding_window=512,
            tie_word_embeddings=True,
        ),
        _SANDWICH,
        eos=1,
    ),
    "gemma4_text": Family(
        gemma4.gemma4,
        Defaults(
            vocab_size=262144,
            hidden_size=2304,
            num_hidden_layers=30,
            num_attention_heads=8,
            max_position_embeddings=131072,
            intermediate_size=9216,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=512,
            tie_word_embeddings=True,
        ),
        _GEMMA4,
        eos=1,
    ),
    "gemma4_unified_text": Family(
        gemma4.gemma4_unified,
        Defaults(
            vocab_size=262144,
            hidden_size=2304,
            num_hidden_layers=30,
            num_attention_heads=8,
            max_position_embeddings=262144,
            intermediate_size=9216,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            tie_word_embeddings=True,
        ),
        _GEMMA4,
        eos=1,
    ),
    # Models with other blocks.
    "olmo2": Family(
        blocks.olmo2,
        Defaults(50304, 4096, 32, 32, 2048, 11008, rms_norm_eps=1e-5),
        _POST,
        eos=50279,
    ),
    "olmo3": Family(
        blocks.olmo3,
        Defaults(50304, 4096, 32, 32, 2048, 11008, rms_norm_eps=1e-5, sliding_window=4096),
        _POST,
        eos=50279,
    ),
    "exaone4": Family(
        blocks.exaone4,
        Defaults(102400, 4096, 32, 32, 2048, 16384, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096),
        _POST,
        eos=2,
    ),
    "cohere2": Family(
        blocks.cohere2,
        Defaults(256000, 8192, 40, 64, 8192, 22528, sliding_window=4096, tie_word_embeddings=True),
        eos=255001,
    ),
    "cohere2_moe": Family(
        blocks.cohere2_moe,
        Defaults(256000, 8192, 40, 64, 8192, 22528, head_dim=128, sliding_window=4096, tie_word_embeddings=True),
        eos=255001,
    ),
    "granite_swa": Family(
        blocks.granite_swa,
        Defaults(
            vocab_size=100352,
            hidden_size=2560,
            num_hidden_layers=24,
            num_attention_heads=20,
            max_position_embeddings=8192,
            intermediate_size=8192,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            sliding_window=128,
            tie_word_embeddings=True,
        ),
        eos=100257,
    ),
    "granitemoe_swa": Family(
        blocks.granitemoe_swa,
        Defaults(32000, 4096, 32, 32, 2048, 11008, sliding_window=128),
        Names(
            router="block_sparse_moe.router.weight",
            experts="block_sparse_moe.experts",
            stored="rows",
            shared="shared_mlp",
            shared_fused=("input_linear", "output_linear"),
        ),
        eos=2,
    ),
    "muse_glimmer_text": Family(
        blocks.muse_glimmer,
        Defaults(
            vocab_size=202048,
            hidden_size=6656,
            num_hidden_layers=52,
            num_attention_heads=32,
            max_position_embeddings=131072,
            intermediate_size=19968,
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            sliding_window=2048,
        ),
        _SANDWICH,
        eos=200001,
    ),
    # Mixtures of experts with llama's block.
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
    # Models with gated attention.
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
        _SANDWICH,
    ),
    "laguna": Family(
        gated.laguna,
        Defaults(100352, 2048, 40, 48, 131072, 8192, num_key_value_heads=8, head_dim=128, sliding_window=512),
        Names(gate="g_proj", selection_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert"),
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

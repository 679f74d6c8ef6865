"""Entries of models with other blocks than llama's."""

from collections.abc import Mapping

from jswa.model.hf import blocks
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import SANDWICH, SANDWICH_NORMS, Names

_POST = Names(norms={key: SANDWICH_NORMS[key] for key in ("post_attn", "post_mlp")})

_PLAMO3 = Names(
    norms={
        "pre_attn": "pre_mixer_norm",
        "post_attn": "post_mixer_norm",
        "pre_mlp": "pre_mlp_norm",
        "post_mlp": "post_mlp_norm",
    },
    fused=True,
    attention="mixer",
)

BLOCKS: Mapping[str, Family] = {
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
    "cohere_compass_text": Family(
        blocks.cohere_compass,
        Defaults(256000, 8192, 40, 64, 8192, 22528, sliding_window=4096, tie_word_embeddings=True),
        eos=255001,
    ),
    "plamo3": Family(
        blocks.plamo3,
        Defaults(32000, 4096, 32, 32, 2048, 13312, num_key_value_heads=4, head_dim=128, tie_word_embeddings=True),
        _PLAMO3,
        eos=2,
        aliases={"window_size": "sliding_window"},
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
        SANDWICH,
        eos=200001,
    ),
}

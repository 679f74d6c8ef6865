"""Entries of Gemma's models."""

from collections.abc import Mapping

from jswa.model.hf import gemma, gemma4
from jswa.model.hf.common import Defaults
from jswa.model.hf.family import Family
from jswa.model.hf.tensor_names import SANDWICH, SANDWICH_NORMS, Names

_SIDE_NORMS = {
    "side.pre": "pre_feedforward_layernorm_2",
    "side.post": "post_feedforward_layernorm_2",
    "side.post_dense": "post_feedforward_layernorm_1",
}
_GEMMA4 = Names(norms={**SANDWICH_NORMS, **_SIDE_NORMS}, router="router.proj.weight", experts="experts", stored="rows")
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

_GEMMA3 = Defaults(
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
)

GEMMA: Mapping[str, Family] = {
    "gemma": Family(
        gemma.gemma,
        Defaults(
            vocab_size=256000,
            hidden_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            max_position_embeddings=8192,
            intermediate_size=24576,
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        eos=1,
    ),
    "gemma2": Family(
        gemma.gemma2,
        _GEMMA2,
        SANDWICH,
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
        _GEMMA3,
        SANDWICH,
        eos=1,
    ),
    "rnj1": Family(
        gemma.rnj1,
        _GEMMA3,
        SANDWICH,
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
        SANDWICH,
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
}

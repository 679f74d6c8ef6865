"""Families that jswa refuses, and the building block of each that its decoder does not have.

They are the decoders with windows, chunks or layer types of transformers 5.24, vLLM 0.33 and SGLang 0.5.23, and some
others that people ask for.
"""

from collections.abc import Mapping

_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "a dense layer and a norm in front of its head": ("modernbert-decoder",),
    "a prompt that stays visible beside its windows": ("unlimited_ocr",),
    "an encoder that its decoder attends to": ("t5gemma", "t5gemma2"),
    "an indexer that picks the keys of a query": (
        *("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "minimax_m3_vl", "mistral_large4", "step5"),
    ),
    "compressed caches and hyper-connections": ("deepseek_v4", "deepseek_v41"),
    "convolutions within attention": ("zaya",),
    "gated delta nets (linear attention)": ("lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    "gated delta nets and an indexer that picks the keys of a query": ("glm5_next", "qwen4_exp"),
    "gated delta nets and latent attention (MLA)": ("bailing_hybrid", "kimi_linear"),
    "gated residuals": ("muse_spark",),
    "latent attention (MLA)": ("deepseek_v2", "deepseek_v3", "kimi_k2"),
    "latent attention (MLA) beside sliding windows": ("dots3_note",),
    "layers that run several times": ("dory", "iquestloopcoder"),
    "layers that only draft for another model": ("muse_glimmer_assistant",),
    "learned positions": ("gpt_neo",),
    "lightning attention (linear attention)": ("minimax", "minimax_text_01"),
    "masks that are computed from values": ("doge",),
    "norms that depend on the delay of speech": ("voxtral_realtime",),
    "patches of bytes in place of tokens": ("blt",),
    "positions of three axes (M-RoPE)": (
        *("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"),
    ),
    "prompts whose tokens attend in both directions": ("paligemma",),
    "recurrent layers": ("recurrent_gemma",),
    "short convolutions": ("lfm2", "lfm2_moe", "lfm3"),
    "short convolutions and learned relative positions": ("inkling", "inkling2"),
    "short convolutions, learned relative positions, and layers that run several times": ("inkling2_loop",),
    "state-space layers": (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"),
        *("plamo2", "zamba", "zamba2"),
    ),
    "streams of audio codes beside the text": ("kyutai_speech_to_text", "moshi"),
    "two-way attention": (
        *("diffusion_gemma", "embedding_gemma2", "modernbert", "neomme", "openai_privacy_filter", "ultrabert"),
    ),
}
OTHER_BLOCKS: Mapping[str, str] = {family: block for block, families in _FAMILIES.items() for family in families}


def missing_block(family: str) -> str | None:
    """Return the block that a model_type needs and jswa lacks, or None if it is not known.

    The text part of a multimodal model counts as that model.
    """
    return OTHER_BLOCKS.get(family) or OTHER_BLOCKS.get(family.removesuffix("_text"))

"""Parity cases of Rnj-1, whose reference is tests/parity/references/rnj1.py. Prompts have five chunks.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import YARN, Case, Config, F, W, case, rope
from tests.parity.cases.cases import GEMMA

C = "chunked_attention"
RNJ1: Config = GEMMA | {
    "num_hidden_layers": 5,
    "sliding_window": 2 * W,
    "layer_types": [C, C, F, C, F],
    "rope_parameters": {F: rope(1e6, YARN), C: rope(1e4, YARN)},
}


def hub(config: Config) -> Config:
    """Return the config as repositories have it: of Gemma 3's model type, and with Rnj-1's class."""
    return {**config, "model_type": "gemma3_text", "architectures": ["Rnj1ForCausalLM"]}


def rnj1(name: str, **kwargs: object) -> Case:
    # The cache of transformers keeps all keys of these layers, but the reference masks whole texts only.
    return replace(case(name, "rnj1", RNJ1, hub, kwargs), cached=False, old_is_read=False)


CASES = (
    rnj1("base", final_logit_softcapping=30.0),
    rnj1("chunk3", sliding_window=6, num_hidden_layers=3, layer_types=[C, F, C], attention_bias=True),
    rnj1("all_chunked", num_hidden_layers=3, layer_types=[C, C, C], tie_word_embeddings=False),
    rnj1("all_full", num_hidden_layers=3, layer_types=[F, F, F], query_pre_attn_scalar=56),
)

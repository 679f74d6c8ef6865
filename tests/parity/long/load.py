"""Long texts of every family: prompts of 300 tokens, each family with two draws of weights and two window sizes.

A long fixture is an older one (its `base`) with another window and other weights. So only its text and the log
probabilities of its greedy tokens are stored. NumPy only; make.py writes the archive (`make parity`).
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.archive import Facts, digest, read_arrays, read_facts
from tests.parity.load import draw_again, read_config
from tests.parity.weights import Tensor

ARCHIVE = Path(__file__).parent / "long"
PROMPT, GREEDY = 300, 24
WINDOWS = (24, 96)  # keys of a sliding window, or of a chunk; prompts are several times as long
KEYS = {"sliding_window": 0, "attention_chunk_size": 0, "sliding_window_size": -1}  # and what they add to a window
# One fixture for each architecture; the outer configs of multimodal models wrap the same ones.
BASES = (
    *("afmoe_base", "beam_base", "cohere2_base", "cohere2_moe_base", "cwm_base", "dots1_layer_types_bias"),
    *("exaone4_base", "exaone_moe_base", "flint_base", "gemma2_base", "gemma3_text_p6", "gemma3n_text_base"),
    *("gemma4_text_base", "gemma4_unified_text_base", "gpt_oss_base", "granite_swa_base", "granitemoe_swa_base"),
    *("kolibri1_base", "laguna_base", "llama4_text_base", "llama_gqa", "mellum_base", "mimo_v2_flash_base"),
    *("ministral3_window", "mistral_layer_types", "mistral_w8", "mixtral_window", "muse_glimmer_base", "olmo2_base"),
    *("olmo3_base", "phi3_base", "phimoe_base", "qwen2_moe_window", "qwen2_window_from_layer_2", "qwen3_moe_window"),
    *("qwen3_window_from_layer_2", "smollm3_window", "starcoder2_base", "step3p7_base", "vaultgemma_base"),
)


@dataclass(frozen=True)
class LongText:
    """A checkpoint, and the greedy text that transformers continues a long prompt with."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokens: NDArray[np.int32]  # [PROMPT + GREEDY]
    log_probs: NDArray[np.float32]  # [GREEDY]


def names() -> list[str]:
    """Return the names of all long fixtures: BASE-seed-window."""
    return [f"{base}-{seed}-{window}" for base in BASES for seed, window in enumerate(WINDOWS, start=1)]


def drawn(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a long fixture."""
    base, seed, window = name.rsplit("-", 2)
    return with_window(read_config(base), int(window)), draw_again(base, int(seed))


def with_window(config: dict[str, Any], window: int) -> dict[str, Any]:
    """Return the config with another window, in the config of the text model too. A model without one stays so."""
    changed = copy.deepcopy(config)
    for part in (changed, changed.get("text_config", {})):
        part |= {key: window + more for key, more in KEYS.items() if part.get(key)}
    return changed


def load_long(name: str) -> LongText:
    """Read a long fixture. Raise RuntimeError if this NumPy draws other weights than it was made with."""
    facts: dict[str, Facts] = read_facts(ARCHIVE)
    _, arrays = read_arrays(ARCHIVE, list(facts).index(name))
    config, tensors = drawn(name)
    if digest(tensors) != facts[name]["digest"]:
        raise RuntimeError(f"{name}: NumPy {np.__version__} draws other weights; run `make parity`")
    return LongText(config, tensors, arrays["tokens"].astype(np.int32), arrays["log_probs"])

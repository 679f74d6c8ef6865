"""Checkpoints of DFlash and DSpark drafters with random weights, in the formats in which they are published."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from jaxtyping import Float

from tests.parity.drafters.load import draft_tokens
from tests.parity.references.dflash import dflash_shapes
from tests.parity.weights import Tensor, random_weights, write_checkpoint

_SLIDING, _FULL = "sliding_attention", "full_attention"
_LAYERS = {
    "model_type": "qwen3",
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}
_DFLASH = {"mask_token_id": 5, "target_layer_ids": [0, 2, 4]}
_SECOND = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
_SPECULATORS = {"block_size": 8, "aux_hidden_state_layer_ids": [1, 3, 6], "mask_token_id": 5, "draft_vocab_size": 40}
# Gemma 4's layers, as deepseek-ai/DeepSpec trains them.
_GEMMA4 = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_unified_text",
    "block_size": 7,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 20.0,
    "layer_types": [_FULL] * 2,
    "sliding_window": 12,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "global_head_dim": 16,
    "tie_word_embeddings": False,
    "enable_moe_block": False,
    "num_kv_shared_layers": 0,
    "rope_parameters": {_FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5}},
    "mask_token_id": 5,
    "target_layer_ids": [-1, 1, 3],
    "num_anchors": 8,
}
_MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
# The configs of published drafters, made small.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "dflash": _LAYERS | {"architectures": ["DFlashDraftModel"], "block_size": 16, "dflash_config": _DFLASH},
    "dflash_mixed": _LAYERS
    | {"architectures": ["DFlashDraftModel"], "block_size": 16, "dflash_config": _DFLASH}
    | {"layer_types": [_SLIDING, _FULL], "sliding_window": 12, "use_sliding_window": True, "attention_bias": True},
    "dflash_mimo": _LAYERS
    | {"architectures": ["DFlashDraftModel"], "block_size": 8, "partial_rotary_factor": 0.5, "is_causal": False}
    | {"layer_types": [_SLIDING] * 2, "sliding_window": 12, "use_sliding_window": True}
    | {"dflash_config": _DFLASH | {"attention_sink_bias": True, "attention_value_scale": 0.612}},
    "dflash_mimo_old": _LAYERS
    | {"architectures": ["DFlashDraftModel"], "block_size": 8, "sliding_window": 9}
    | {"dflash_config": _DFLASH | {"use_swa": True, "swa_window_size": 10, "attention_sink_bias": True}},
    "dflash_laguna": _LAYERS
    | {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "gating": "per-head", "rope_theta": 5e5}
    | {"layer_types": [_SLIDING] * 2, "sliding_window": 12, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    | {"dflash_config": _DFLASH | {"block_size": 16, "causal": True}},
    "dflash_muse": {key: value for key, value in _LAYERS.items() if key != "vocab_size"}
    | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 8}
    | {"layer_types": [_SLIDING, _FULL], "sliding_window": 12, **_DFLASH},
    "dflash_speculators": {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
    | _SPECULATORS
    | {"transformer_layer_config": _LAYERS | {"layer_types": [_SLIDING, _FULL], "sliding_window": 12}}
    | {"sliding_window_non_causal": False},
    "dflash_second": _LAYERS
    | {"architectures": ["DFlash2DraftModel"], "block_size": 8, "is_causal": False}
    | {"layer_types": [_SLIDING, _FULL], "sliding_window": 12, "use_sliding_window": True}
    | {"dflash_config": _DFLASH | _SECOND | {"input_embedding_scale": 0.5}},
    "dflash_beam": _LAYERS
    | {"architectures": ["DFlash2BeamDraftModel"], "block_size": 8, "is_causal": False}
    | {"layer_types": [_SLIDING] * 2, "sliding_window": 12, "use_sliding_window": True}
    | {"dflash_config": _DFLASH | _SECOND | {"conv_kernel_size": 9}},
    "dflash_second_speculators": {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
    | {key: value for key, value in _SPECULATORS.items() if key != "draft_vocab_size"}
    | {"transformer_layer_config": _LAYERS | {"layer_types": [_SLIDING, _FULL], "sliding_window": 12}}
    | _SECOND
    | {"conv_kernel_size": 2},
    "dspark": _LAYERS | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, **_DFLASH, **_MARKOV},
    "dspark_gemma4": _LAYERS | _GEMMA4 | _MARKOV | {"confidence_head_with_markov": True},
    "dspark_gemma4_untied": _LAYERS | _GEMMA4 | {"attention_k_eq_v": False, "markov_rank": 0},
    "dspark_speculators": {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
    | _SPECULATORS
    | {"transformer_layer_config": _LAYERS, "sample_from_anchor": False, "markov_rank": 6}
    | {"sliding_window_non_causal": False},
}


def dflash_checkpoint(kind: str, width: int, vocab: int, seed: int = 1) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of a drafter for a target of that width and vocabulary."""
    config = dict(KINDS[kind])
    sizes = {"hidden_size": width, "vocab_size": vocab}
    if "transformer_layer_config" in config:
        config["transformer_layer_config"] = config["transformer_layer_config"] | sizes
    else:
        config |= sizes
    shapes = dflash_shapes(config, width, vocab)
    means = {name: 1.0 for name in shapes if "norm" in name}
    tensors: dict[str, Any] = random_weights(shapes, means, seed, ((r"markov", 3.0),))
    count = config.get("draft_vocab_size", vocab)
    if count != vocab:
        tokens = draft_tokens(vocab, count, seed)
        tensors |= {"d2t": tokens - np.arange(count), "t2d": np.isin(np.arange(vocab), tokens)}
    return config, tensors


def write_dflash(kind: str, folder: Path, width: int, vocab: int) -> Path:
    """Write such a checkpoint."""
    write_checkpoint(folder, *dflash_checkpoint(kind, width, vocab))
    return folder


def write_saved(path: Path, vector: Float[np.ndarray, " n"], mask: int, storage: str = "FloatStorage") -> None:
    """Write what torch.save writes of {"embedding": vector, "mask_token_id": mask}, with a vector in float32."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    stored = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text("0") + text("cpu") + number(len(vector))
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n((" + stored[1:] + b"tQ" + number(0) + number(len(vector)) + b"\x85"
    tensor += number(1) + b"\x85\x89ccollections\nOrderedDict\n)RtR"
    content = b"\x80\x02}(" + text("embedding") + tensor + text("mask_token_id") + number(mask) + b"u."
    with ZipFile(path, "w") as archive:
        archive.writestr("mask_embedding/data.pkl", content)
        archive.writestr("mask_embedding/byteorder", "little")
        archive.writestr("mask_embedding/data/0", vector.astype("<f4").tobytes())
        archive.writestr("mask_embedding/version", "3\n")

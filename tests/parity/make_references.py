"""Fixtures of families that transformers does not have, computed by numpy_models.py; make_fixtures.py makes them too.

NumPy only. Everything else is as in make_fixtures.py: the weights, the text of 40 tokens and 24 greedy ones, and what
is stored.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.archive import Facts, Recipe, digest, store
from tests.parity.case import Config, F, S, W
from tests.parity.references.numpy_models import (
    Array,
    Shapes,
    Weights,
    plamo3,
    plamo3_shapes,
    spark2_5,
    spark2_5_shapes,
)
from tests.parity.sketch import next_log_probs, sketch

PROMPT, GREEDY = 40, 24
MARGIN = 0.01  # least distance between the best and the second logit of a greedy choice


@dataclass(frozen=True)
class Reference:
    """One tiny checkpoint. `mean`: of the vectors. `old`: another form of the config, which means the same."""

    name: str
    config: Config
    shapes: Callable[[Config], Shapes]
    forward: Callable[[Config, Weights, NDArray[np.int32]], Array]
    mean: float
    old: Config | None = None


PLAMO3: Config = {
    "architectures": ["Plamo3ForCausalLM"],
    "model_type": "plamo3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "window_size": W,
    "sliding_window_pattern": 3,
    "rope_theta": 1000000,
    "rope_local_theta": 10000,
    "rope_scaling_factor": 1,
    "initial_context_length": None,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARK: Config = {
    "architectures": ["Spark2_5ForCausalLM"],
    "model_type": "spark2_5",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "sliding_window": W,
    "hidden_act": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "headwise_attn_output_gate": True,
    "gate_attn_act_mode": "sigmoid",
    "layer_types": [S, S, S, F, S],
    "rope_parameters": {
        F: {"rope_theta": 5000000, "partial_rotary_factor": 0.25},
        S: {"rope_theta": 10000, "partial_rotary_factor": 1.0},
    },
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def plamo(name: str, old: Config | None = None, **changes: Any) -> Reference:
    return Reference(f"plamo3_{name}", PLAMO3 | changes, plamo3_shapes, plamo3, 0.0, old)


def spark(name: str, old: Config | None = None, **changes: Any) -> Reference:
    return Reference(f"spark2_5_{name}", SPARK | changes, spark2_5_shapes, spark2_5, 1.0, old)


def without(config: Config, *keys: str, **add: Any) -> Config:
    return {key: value for key, value in config.items() if key not in keys} | add


REFERENCES = (
    # `sliding_window` is the older name of `window_size`.
    plamo("base", without(PLAMO3, "window_size", "rope_local_theta", "rope_scaling_factor", sliding_window=W)),
    # This has the form of the 31B of 2026: YaRN in full layers, whose bounds are not rounded.
    plamo(
        "yarn",
        without(
            PLAMO3,
            *("rope_scaling_factor", "initial_context_length", "rope_theta", "rope_local_theta"),
            scale_embedding=True,
            sliding_window_pattern=2,
            rope_parameters={
                F: {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                },
                S: {"rope_type": "default", "rope_theta": 300.0},
            },
        ),
        rope_theta=500000,
        rope_local_theta=300,
        rope_scaling_factor=8,
        initial_context_length=64,
        sliding_window_pattern=2,
        scale_embedding=True,
    ),
    # The period is eight by default, so all five layers slide.
    plamo(
        "untied",
        without(PLAMO3, "sliding_window_pattern", rms_norm_eps=0.1, tie_word_embeddings=False),
        sliding_window_pattern=8,
        tie_word_embeddings=False,
        rms_norm_eps=0.1,
    ),
    spark("base", without(SPARK, "hidden_act", "attention_bias", "mlp_bias", "gate_attn_act_mode")),
    # Defaults of the config class: no gates, all layers full, theta 1e4 for all dimensions, untied.
    spark(
        "defaults",
        without(
            SPARK, "headwise_attn_output_gate", "gate_attn_act_mode", "layer_types", "tie_word_embeddings", "head_dim"
        )
        | {"rope_parameters": {}, "num_hidden_layers": 2},
        headwise_attn_output_gate=False,
        layer_types=[F] * 2,
        num_hidden_layers=2,
        rope_parameters={},
        head_dim=16,
        tie_word_embeddings=False,
    ),
    spark(
        "biased_untied",
        rope_parameters={F: {"rope_theta": 300, "partial_rotary_factor": 0.5}, S: {"partial_rotary_factor": 0.75}},
        layer_types=[F, S, F, S, S],
        mlp_bias=True,
        tie_word_embeddings=False,
        num_key_value_heads=1,
        rms_norm_eps=0.1,
    ),
)


def make_reference(reference: Reference, archives: Path) -> None:
    """Compute one fixture and store it in its family's archive in that folder."""
    shapes = reference.shapes(reference.config)
    means = {
        name: reference.mean if len(shape) == 1 and not name.endswith("bias") else 0.0 for name, shape in shapes.items()
    }
    recipe = Recipe(shapes, means)
    facts: Facts = {"seed": 0, "prompt": PROMPT}
    tensors = recipe.draw(facts)
    tokens, logits, margin = _greedy(reference, tensors)
    facts |= {"digest": digest(tensors), "made_with": {"numpy": np.__version__}, "config": reference.config}
    facts |= {} if reference.old is None else {"old_config": reference.old}
    arrays = {"tokens": tokens, "sketch": sketch(logits), "log_probs": next_log_probs(logits, tokens)}
    store(archives / reference.config["model_type"], reference.name, facts, recipe, arrays)
    print(f"{reference.name:40s} std {logits.std():.2f} margin {margin:.3f}", flush=True)


def _greedy(reference: Reference, tensors: Weights) -> tuple[NDArray[np.int32], Array, float]:
    """Return tokens, logits and the least margin for the first prompt without a near tie."""
    for attempt in range(200):
        rng = np.random.default_rng([0, zlib.crc32(reference.name.encode()), attempt])
        tokens = rng.integers(3, reference.config["vocab_size"], PROMPT).astype(np.int32)
        for _ in range(GREEDY):
            last = reference.forward(reference.config, tensors, tokens)[-1]
            tokens = np.append(tokens, np.int32(last.argmax()))
        logits = reference.forward(reference.config, tensors, tokens)
        best = np.sort(logits[PROMPT - 1 : -1], axis=-1)
        margin = float((best[:, -1] - best[:, -2]).min())
        if margin > MARGIN:
            return tokens, logits, margin
    raise AssertionError(f"{reference.name}: no prompt without a near tie")

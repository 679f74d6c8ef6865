"""Rotary angles and temperatures of released models at 4k to 1M tokens, against the published formulas in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, MlpConfig, ModelConfig, Rope
from jswa.model.binding import bind, param_shapes
from jswa.model.hf.config import parse_config
from jswa.model.layers import rope_tables
from jswa.model.transformer import Params
from tests.support.oracles import quick_compiles
from tests.support.positions.rotary import (
    COSINE,
    UNIT,
    Frequencies,
    default,
    linear,
    llama3,
    longrope,
    proportional,
    temperature,
    yarn,
)
from tools.cases.hub_configs import CONFIGS

# Around the lengths at which models change, and of conversations.
POSITIONS = np.array(
    [
        *(0, 1, 2, 127, 1023, 4095, 4096, 8190, 8191, 8192, 16384, 32767, 32768, 65535, 131070, 131071, 262143),
        *(524287, 999_999, 1_048_575),
    ]
)
UNIT16 = 2.0**-8  # the largest relative error of one rounding to bfloat16

LONG = [
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23),
    *(32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
SHORT = [1.0] * 48
PHI4_MINI: dict[str, Any] = {
    "model_type": "phi3", "num_hidden_layers": 32, "hidden_size": 3072, "intermediate_size": 8192,
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}, "sliding_window": 262144,
    "tie_word_embeddings": True,
}  # fmt: skip
MINISTRAL3: dict[str, Any] = {
    "model_type": "ministral3", "num_hidden_layers": 34, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 262144, "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip


def _llama(**changes: Any) -> dict[str, Any]:
    """Return Llama 3.1's config with other rotary keys."""
    return CONFIGS["Llama-3.1-8B"] | {"rope_scaling": None, "max_position_embeddings": 1048576} | changes


OTHERS: dict[str, dict[str, Any]] = {
    "Phi-4-mini": PHI4_MINI,
    "Ministral-3-8B": MINISTRAL3,
    "Llama-3.2": _llama(rope_scaling={**CONFIGS["Llama-3.1-8B"]["rope_scaling"], "factor": 32.0}),
    "base of 5M": _llama(rope_theta=5e6),
    "base of 8M": _llama(rope_theta=8e6),
    "base of 10M": _llama(rope_theta=1e7),
    # Differs from the default only beyond max_position_embeddings, where no engine goes.
    "dynamic": _llama(rope_theta=5e5, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
}
Kinds = dict[str, Frequencies | None]  # of full and local layers; None: not rotated
EXPECTED: dict[str, Kinds] = {
    "Mistral-7B-v0.1": {"local": default(1e4, 128)},
    "gemma-2-9b": {"full": default(1e4, 256), "local": default(1e4, 256)},
    "gemma-3-1b": {"full": default(1e6, 256), "local": default(1e4, 256)},
    "gemma-3-4b": {"full": linear(1e6, 256, 8), "local": default(1e4, 256)},
    "gemma-3-27b": {"full": linear(1e6, 128, 8), "local": default(1e4, 128)},
    "gemma-3n-E4B": {"full": default(1e6, 256), "local": default(1e4, 256)},
    "gemma-4-E4B": {"full": proportional(1e6, 512, 0.25), "local": default(1e4, 256)},
    "gemma-4-31B": {"full": proportional(1e6, 512, 0.25, all_pairs=False), "local": default(1e4, 256)},
    "gpt-oss-20b": dict.fromkeys(("full", "local"), yarn(150_000, 64, 32, 4096, whole=False)),
    "Llama-4-Scout": {"full": None, "local": llama3(5e5, 128, 16, 1, 1, 8192)},
    "Llama-4-Maverick": {"full": None, "local": default(5e5, 128)},
    "MiMo-V2-Flash/V2.5": {"full": default(5e6, 64), "local": default(1e4, 64)},
    "MiMo-V2.5-Pro": {"full": default(1e7, 64), "local": default(1e4, 64)},
    "Command-R7B": {"full": None, "local": default(5e4, 128)},
    "Olmo-3-7B": {"full": yarn(5e5, 128, 8, 8192, scale=1.2079441541679836), "local": default(5e5, 128)},
    "EXAONE-4.0-32B": {"full": None, "local": llama3(1e6, 128, 16, 1, 4, 8192)},
    "Step-3.5-Flash": {"full": llama3(5e6, 64, 2, 1, 32, 131072), "local": default(1e4, 128)},
    "Laguna-XS.2": {"full": yarn(5e5, 64, 64, 8192, fast=64, scale=1.4159), "local": default(1e4, 128)},
    "Mellum2-12B-A2.5B": {"full": yarn(5e5, 128, 16, 8192), "local": default(5e5, 128)},
    "Muse-Glimmer-30B": {"full": None, "local": default(5e5, 128)},
    "CWM-32B": dict.fromkeys(("full", "local"), llama3(1e6, 128, 16, 1, 4, 8192)),
    "Llama-3.1-8B": {"full": llama3(5e5, 128, 8, 1, 4, 8192)},
    "Qwen3-32B": {"full": default(1e6, 128)},
    "Phi-4-mini": {"local": longrope(1e4, 96, LONG, 4096, 131072)},
    "Ministral-3-8B": {"full": yarn(1e6, 128, 16, 16384, scale=1.0)},
    "Llama-3.2": {"full": llama3(5e5, 128, 32, 1, 4, 8192)},
    "base of 5M": {"full": default(5e6, 128)},
    "base of 8M": {"full": default(8e6, 128)},
    "base of 10M": {"full": default(1e7, 128)},
    "dynamic": {"full": default(5e5, 128)},
}


def parse(name: str, length: int | None = None) -> ModelConfig:
    """Return a released model as an engine of this length runs it; by default as long as the model allows."""
    model = parse_config({**CONFIGS, **OTHERS}[name], weights=False)
    return model.at_length(length or model.max_position)


def check_rope(rope: Rope, expected: Frequencies) -> None:
    """Assert that frequencies, then cos and sin of a step's positions, are as near as float32 can bring them."""
    found = np.array(rope.inv_freq)
    off = np.abs(found - expected.inverse)
    assert (off <= expected.inverse * expected.roundings * UNIT).all(), "a frequency is off by more than its roundings"
    assert rope.scale == pytest.approx(expected.scale, rel=4 * UNIT)
    # For the engine's own frequencies the bound is narrow, also where the angle's error has grown to a radian.
    own = Frequencies(found, np.zeros_like(found), expected.scale)
    tables = rope_tables({rope}, jnp.asarray(POSITIONS, jnp.int32))[rope]
    for reference in (own, expected):
        *wanted, within = reference.tables(POSITIONS)
        for table, right in zip(tables, wanted, strict=True):
            assert (np.abs(np.asarray(table, np.float64) - right) <= within).all()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_angles_of_released_models_are_as_exact_as_float32_allows(name: str) -> None:
    """Every layer has the rotary embedding of its kind, up to 1M tokens."""
    model, checked = parse(name), set()
    for layer in model.layers:
        rope, expected = layer.attention.rope, EXPECTED[name][layer.attention.kind]
        assert (rope is None) == (expected is None)
        if rope is not None and expected is not None and rope not in checked:
            check_rope(rope, expected)
            checked.add(rope)
    assert {layer.attention.kind for layer in model.layers} == set(EXPECTED[name])


def test_longrope_within_the_original_length_has_the_short_factors() -> None:
    """One token more, and the whole engine has the long ones."""
    for length, factors in ((4096, SHORT), (4097, LONG)):
        rope = parse("Phi-4-mini", length).layers[0].attention.rope
        assert rope is not None
        check_rope(rope, longrope(1e4, 96, factors, 4096, 131072))


def small(name: str) -> ModelConfig:
    """Return the decoder with real heads and rotary embeddings, but tiny otherwise; a layer of each kind."""
    raw = {**CONFIGS, **OTHERS}[name]
    text = raw.get("text_config", raw)
    sizes = {
        "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4,
        "head_dim": text.get("head_dim", 256), "quantization_config": None,
    }  # fmt: skip
    model = parse_config({**text, **sizes}, weights=False)
    first = {layer.attention.kind: layer for layer in reversed(model.layers)}
    layers = tuple(dataclasses.replace(layer, mlp=MlpConfig(16, "silu"), side=None) for layer in first.values())
    return dataclasses.replace(model, layers=layers).at_length(model.max_position)


def queries_and_keys(model: ModelConfig) -> list[tuple[Float[np.ndarray, "T H D"], Float[np.ndarray, "T K D"]]]:
    """Return what attention gets in each layer of a bfloat16 decoder, if the same token is at all POSITIONS.

    Attention gives zeros, so that tokens differ in their position alone.
    """

    def run(params: Params, positions: Int[Array, " T"]) -> list[tuple[Array, Array]]:
        seen = []

        def attend(layer: int, q: Array, kv: Array | None, sinks: Array | None) -> Array:
            assert kv is not None
            config = model.layers[layer].attention
            seen.append((q, kv[..., : config.head_dim]))
            return jnp.zeros((*q.shape[:2], config.v_head_dim), q.dtype)

        bind(model, params)(jnp.ones_like(positions), positions, attend)
        return seen

    rng, shapes = np.random.default_rng(0), param_shapes(model, jnp.dtype("bfloat16"))
    params = {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in shapes.items()}
    with quick_compiles():
        seen = jax.jit(run)(params, jnp.asarray(POSITIONS, jnp.int32))
    return [(np.asarray(q, np.float64), np.asarray(k, np.float64)) for q, k in seen]


def check_turned(config: AttentionConfig, found: Float[np.ndarray, "T N D"], expected: Frequencies) -> None:
    """Assert that bfloat16 vectors are that of position 0, turned: with a rounding, and the error of the angle."""
    cos, sin, within = (table[:, None] for table in expected.tables(POSITIONS))
    within, size = within / expected.scale, 2 * cos.shape[-1]
    pairs = (
        (found[..., :size:2], found[..., 1:size:2])
        if config.rope is not None and config.rope.interleaved
        else (found[..., : size // 2], found[..., size // 2 : size])
    )
    start = [part[:1] for part in pairs]
    roundings = 1 if expected.scale == 1 else 2  # with a scale, the vector of position 0 was rounded too
    bound = (roundings * UNIT16 + within) * np.hypot(*start)
    wanted = (start[0] * cos - start[1] * sin, start[1] * cos + start[0] * sin)
    for part, right in zip(pairs, wanted, strict=True):
        assert (np.abs(part - right / expected.scale) <= bound).all()
    assert (found[..., size:] == found[:1, ..., size:]).all()


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b", "Llama-4-Maverick"])
def test_a_bfloat16_model_turns_queries_and_keys_by_float32_angles(name: str) -> None:
    """Halves or neighbours are pairs. Queries of layers without rotation grow by Llama 4's temperature."""
    model, scaled = small(name), 0
    for layer, (q, k) in zip(model.layers, queries_and_keys(model), strict=True):
        expected = EXPECTED[name][layer.attention.kind]
        if expected is not None:
            check_turned(layer.attention, q, expected)
            check_turned(layer.attention, k, expected)
            continue
        wanted = q[:1] * temperature(POSITIONS, 8192, 0.1)[:, None, None]
        assert (np.abs(q - wanted) <= np.abs(wanted) * (UNIT16 + COSINE * UNIT)).all()
        assert (k == k[:1]).all()
        scaled += 1
    assert scaled == (name == "Llama-4-Maverick")

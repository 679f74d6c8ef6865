"""config.json to ModelConfig: invalid values raise a typed error that names key and value."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.architecture import Reach
from jswa.errors import CheckpointError, ModelError, UnsupportedModel
from jswa.model.hf.config import load_config, parse_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 8}
GEMMA = LLAMA | {"model_type": "gemma3_text", "sliding_window": 8, "head_dim": 16, "sliding_window_pattern": 3}
WRAPPED = {"model_type": "gemma3", "text_config": GEMMA}
CHUNKS = ["chunked_attention", "full_attention", "chunked_attention"]
RNJ1 = GEMMA | {
    "architectures": ["Rnj1ForCausalLM"],
    "layer_types": CHUNKS,
    "rope_parameters": {"full_attention": {"rope_type": "default"}, "chunked_attention": {"rope_type": "default"}},
}
IQUEST = LLAMA | {
    "model_type": "iquest_q1",
    "num_hidden_layers": 5,
    "num_hybrid_layers_block": 1,
    "last_layers_types": [],
    "sliding_window": 8,
    "head_dim": 16,
    "rotary_dim": 8,
}
GRUG = LLAMA | {"model_type": "grug_moe", "sliding_window": 8, "head_dim": 16}
FORMS = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma3_text": GEMMA,
    "gemma3": WRAPPED,
    "rnj1": RNJ1,
    "iquest_q1": IQUEST,
    "grug_moe": GRUG,
}


def parse(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Parse a config with some keys changed, in its text part if it has one."""
    text = base.get("text_config")
    parse_config(base | changes if text is None else base | {"text_config": text | changes})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", 5000),
        ("num_attention_heads", "4"),
        ("num_attention_heads", 65),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", True),
        ("hidden_size", -64),
        ("hidden_size", [64]),
        ("hidden_size", 2**31 - 4),
        ("head_dim", 0),
        ("head_dim", 2**30),
        ("vocab_size", 0),
        ("vocab_size", 2**31),
        ("intermediate_size", -1),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", float("inf")),
        ("rope_theta", "10000"),
        ("tie_word_embeddings", "yes"),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
        ("rope_scaling", {"rope_type": 7}),
        ("rope_parameters", [1, 2]),
        ("rope_parameters", {"rope_theta": "x"}),
        ("eos_token_id", -1),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, None]),
    ],
)
def test_the_error_names_a_key_out_of_range_and_its_value(key: str, value: object) -> None:
    """Every range and type is checked."""
    with pytest.raises(CheckpointError, match=key if not isinstance(value, dict) else "rope"):
        parse(LLAMA, {key: value})


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("mistral", {"sliding_window": -8}, "sliding_window = -8"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types = .*3 of"),
        ("mistral", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention", 3, None]}, "layer_types"),
        ("mistral", {"layer_types": "full_attention"}, "layer_types"),
        ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window = None"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types = .*3 of"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window = None"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar = -1"),
        ("gemma3_text", {"final_logit_softcapping": -30.0}, "final_logit_softcapping = -30"),
        ("gemma3_text", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "full_attention = 3"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "attention_factor": 1e300}}, "finite in float32"),
        ("gemma3", {"num_hidden_layers": -1}, "text_config: num_hidden_layers = -1"),
        ("gemma3_text", {"layer_types": CHUNKS}, "layer_types = .*3 of full_attention, sliding_attention"),
        ("rnj1", {"layer_types": None}, "layer_types = None: must list 3 of full_attention, chunked_attention"),
        ("rnj1", {"layer_types": ["sliding_attention"] * 3}, "layer_types = .*3 of full_attention, chunked_attention"),
        ("rnj1", {"sliding_window": 7}, "sliding_window = 7: must be even: it is the size of two chunks"),
        ("rnj1", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "must have chunked_attention"),
        ("rnj1", {"rope_parameters": {"chunked_attention": 3}}, "must have chunked_attention"),
        ("iquest_q1", {"num_hybrid_layers_block": 2}, "num_hybrid_layers_block = 2: must give 5 layers with first_"),
        ("iquest_q1", {"num_hybrid_layers_block": 2**31 - 1}, "num_hybrid_layers_block = .*: must give 5 layers"),
        ("iquest_q1", {"first_layers_types": ["x"]}, "first_layers_types = .* must list at most 5 of full_attention"),
        ("iquest_q1", {"no_rope_layers": [5]}, "no_rope_layers = 5: must be a whole number from 0 to 4"),
        ("iquest_q1", {"mlp_only_layers": 1}, "mlp_only_layers = 1: must list layers from 0 to 4"),
        ("iquest_q1", {"rotary_dim": 17}, "rotary_dim = 17: must be a whole number from 2 to 16"),
    ],
)
def test_the_error_names_an_invalid_window_or_layer_pattern(form: str, changes: dict[str, Any], named: str) -> None:
    """These keys belong to hybrid families only."""
    with pytest.raises(CheckpointError, match=named):
        parse(FORMS[form], changes)


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        ("llama", {"model_type": "unheard"}, "model_type = 'unheard': must be one of .*llama"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope_type = 'axial'"),
        ("llama", {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope_type = 'su'"),
        ("llama", {"head_dim": 15}, "head size of 15"),
        ("llama", {"quantization_config": {"quant_method": "quark"}}, "quantization_config"),
        (
            "mistral",
            {"compression_config": {"quant_method": "bitsandbytes"}},
            "compression_config: quant_method = 'bitsandbytes'",
        ),
        ("gemma3", {"model_type": "siglip"}, "model_type = 'siglip'"),
        ("gemma3", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method = 'bitsandbytes'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("iquest_q1", {"use_over_encoding": True}, "use_over_encoding = True is not implemented"),
        ("iquest_q1", {"moe_router_dtype": "bf16"}, "moe_router_dtype = 'bf16' is not implemented"),
        ("iquest_q1", {"shared_kv_num_layers": 2}, "shared_kv_num_layers = 2 is not implemented"),
        ("iquest_q1", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn': must be default"),
        ("grug_moe", {"grugmoe_artifact_schema_version": 2}, "grugmoe_artifact_schema_version = 2: must be 1"),
        ("grug_moe", {"disable_pko": False}, "disable_pko = False: must be True"),
        ("grug_moe", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn': must be default"),
    ],
)
def test_the_error_names_a_feature_that_is_not_implemented(form: str, changes: dict[str, Any], named: str) -> None:
    """UnsupportedModel is raised, because jswa would compute something else."""
    with pytest.raises(UnsupportedModel, match=named):
        parse(FORMS[form], changes)


def test_a_config_without_a_model_type_is_refused() -> None:
    """The family is not guessed from other keys."""
    with pytest.raises(CheckpointError, match="model_type"):
        parse_config({key: value for key, value in LLAMA.items() if key != "model_type"})
    with pytest.raises(CheckpointError, match="model_type"):
        parse_config(LLAMA | {"model_type": 3})
    with pytest.raises(CheckpointError, match="text_config"):
        parse_config({"model_type": "gemma3", "text_config": "llama"})


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "3", '{"model_type": "llama"', "\x00", "[" * 100_000])
def test_the_error_names_a_config_that_is_not_a_json_object(content: str, tmp_path: Path) -> None:
    """CheckpointError names config.json."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_the_error_names_a_missing_or_binary_config(tmp_path: Path) -> None:
    """CheckpointError names config.json and the folder."""
    with pytest.raises(CheckpointError, match=rf"config\.json is missing in {tmp_path}"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_end_tokens_of_generation_config_override_config(tmp_path: Path) -> None:
    """They are one id or a list."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_config(tmp_path).eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": -7}))
    with pytest.raises(CheckpointError, match="eos_token_id = -7"):
        load_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 100) | st.integers(0, 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    sorted({*GEMMA, "layer_types", "rope_scaling", "rope_parameters", "eos_token_id", "hidden_act", "text_config"})
)


@given(st.sampled_from(sorted(FORMS)), st.dictionaries(KEYS, JSON_VALUES, min_size=1, max_size=4))
def test_any_value_of_any_key_gives_a_model_or_a_typed_error(form: str, changes: dict[str, Any]) -> None:
    """No TypeError, KeyError, overflow or division by zero escapes, and no config allocates a huge list."""
    with contextlib.suppress(ModelError):
        parse(FORMS[form], changes)


ROPE_KEYS = (
    *("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate"),
    "partial_rotary_factor",
)


@given(
    st.sampled_from(["llama", "gemma3_text", "rnj1"]),
    st.dictionaries(
        st.sampled_from(ROPE_KEYS),
        st.sampled_from(["linear", "yarn", "llama3", "dynamic", "default"])
        | st.sampled_from([0, 1, 2, 64, 1e-300, 1e300, -1.0, None, True, "x"])
        | st.floats(),
    ),
    st.booleans(),
)
def test_any_rope_table_gives_finite_frequencies_or_a_typed_error(form: str, table: dict[str, Any], old: bool) -> None:
    """Every inverse frequency and scale of a parsed config is finite."""
    if form == "gemma3_text" and not old:
        table = {"full_attention": table, "sliding_attention": table}
    if form == "rnj1":
        old, table = False, {"full_attention": table, "chunked_attention": table}
    try:
        model = parse_config(FORMS[form] | {"rope_scaling" if old else "rope_parameters": table})
    except ModelError:
        return
    for layer in model.layers:
        rope = layer.attention.rope
        assert rope is not None
        assert np.isfinite(np.array([*rope.inv_freq, rope.scale], np.float32)).all()


def test_rnj1_is_gemma3_by_its_class_and_has_a_rotary_embedding_for_each_kind_of_layer() -> None:
    """Parameters of a layer type are read like flat ones: YaRN's bounds are not rounded if they say so."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
    model = parse_config(RNJ1 | {"rope_parameters": {"chunked_attention": yarn | {"rope_theta": 5e5}}})
    chunked, full, _ = (layer.attention for layer in model.layers)
    flat = parse_config(LLAMA | {"head_dim": 16, "rope_parameters": yarn | {"rope_theta": 5e5}})
    assert model.family == "rnj1"
    assert chunked.rope == flat.layers[0].attention.rope
    assert full.rope == parse_config(GEMMA).layers[2].attention.rope
    assert (chunked.reach, full.reach) == (Reach(4, chunked=True, lookback=1), None)

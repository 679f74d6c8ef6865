"""Families: every one has fixtures, unusual checkpoint layouts load, and unsupported models are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.assemble import assemble
from jswa.model.hf.config import parse_config
from jswa.model.hf.families import FAMILIES
from jswa.model.hf.gemma4 import unfolded
from jswa.model.hf.other_blocks import OTHER_BLOCKS
from jswa.model.hf.source import Fold, Source, TensorPart
from jswa.model.hf.tensor_map import sources, unused_names
from jswa.model.weights.load import dummy_checkpoint, load_checkpoint
from tests.parity.load import Fixture, load_fixture, names, read_config
from tests.parity.sketch import sketch
from tests.parity.weights import Tensor, write_checkpoint
from tests.support.oracles import dense_logits, quick_compiles

FLOAT32 = jnp.dtype("float32")
K_EQ_V = ("gemma4_text_dense", "gemma4_text_mix", "gemma4_text_moe")


def test_every_family_has_fixtures() -> None:
    """A family without fixtures would not be compared with transformers."""
    met = {parse_config(read_config(name)).family for name in names()}
    assert set(FAMILIES) - met == set()


@pytest.mark.parametrize("name", K_EQ_V)
def test_folded_keys_give_the_same_logits_with_less_kv(name: str, tmp_path: Path) -> None:
    """K = V layers store V and the rotated part of K; the rest of K is the rest of V times a weight in the q norm."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, params = load_checkpoint(tmp_path, FLOAT32)
    whole, whole_params = load_checkpoint(tmp_path, FLOAT32, adapt=unfolded)
    tied = [layer.attention for layer in model.layers if layer.attention.keys_as_values]
    assert tied
    assert all(a.folded_keys for a in tied)
    rows = [KVLayout.of(one, 4).full for one in (model, whole)]
    assert rows[0] is not None
    assert rows[1] is not None
    turned = {2 * len(a.rope.inv_freq) for a in tied if a.rope is not None}
    assert turned == {rows[0].row - rows[0].v_head_dim} != {rows[1].row - rows[1].v_head_dim}
    with quick_compiles():
        found = dense_logits(model, params, fixture.tokens)
        np.testing.assert_allclose(found, dense_logits(whole, whole_params, fixture.tokens), atol=2e-5)
    np.testing.assert_allclose(sketch(found), fixture.sketch, rtol=0, atol=1e-4)


def test_folding_reorders_heads_as_documented() -> None:
    """With 8 numbers per head, 4 of them rotated, the pairs are (0, 4) and (1, 5)."""
    x = np.arange(16.0)[:, None]
    part = (TensorPart("x", (16, 1)),)
    first, last = np.empty_like(x), np.empty_like(x)
    for out, before in ((first, True), (last, False)):
        assemble(Source(part, "rows", folds=(Fold(8, 4, first=before),)), out, lambda _, begin, end: x[begin:end])
    assert first[:8, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert last[8:, 0].tolist() == [10, 11, 14, 15, 8, 9, 12, 13]


def _shared() -> tuple[Fixture, ModelConfig]:
    fixture = load_fixture("gemma4_text_base")
    return fixture, parse_config(fixture.config)


def test_layers_with_shared_kv_store_none() -> None:
    """They have no k and v parameters and no slot in the arena; each reads the last owner of its kind."""
    _, model = _shared()
    layout, tail = KVLayout.of(model, 4), model.layers[model.tail :]
    assert tail
    owners = model.layers[: model.tail]
    for index, layer in enumerate(model.layers):
        source = layer.attention.kv_from
        if source is None:
            continue
        assert layer.attention.kind == model.layers[source].attention.kind
        assert all(one.attention.kind != layer.attention.kind for one in owners[source + 1 :])
        assert layout.layers[index] == layout.layers[source]
    kinds = (layout.full, layout.local)
    assert sum(kind.num_layers for kind in kinds if kind is not None) == len(owners)


def test_k_and_v_tensors_of_layers_with_shared_kv_are_not_read(tmp_path: Path) -> None:
    """Repositories ship them for all layers, with arbitrary values."""
    fixture, model = _shared()
    extra: dict[str, Tensor] = {}
    for index in range(model.tail, len(model.layers)):
        for name in ("k_proj", "v_proj", "k_norm"):
            extra[f"model.layers.{index}.self_attn.{name}.weight"] = np.full((3,), np.nan, np.float32)
    assert unused_names(model, [*fixture.tensors, *extra]) == set(extra)
    write_checkpoint(tmp_path, fixture.config, {**fixture.tensors, **extra})
    _, params = load_checkpoint(tmp_path, FLOAT32)
    assert all(np.isfinite(value).all() for value in params.values())


@pytest.mark.parametrize(("name", "adapter"), [("phi4_multimodal_base", "default"), ("phi3_long", "vision")])
def test_only_the_adapters_of_a_family_go_unread(name: str, adapter: str) -> None:
    """Phi-4 has adapters for images and speech beside its text model; any other adapter would change the tokens."""
    keys = [f"model.layers.0.self_attn.qkv_proj.lora_{side}.{adapter}.weight" for side in "AB"]
    phi4 = parse_config(dict(load_fixture("phi4_multimodal_base").config))
    assert unused_names(phi4, [key.replace(adapter, "vision") for key in keys]) == {
        key.replace(adapter, "vision") for key in keys
    }
    assert unused_names(parse_config(dict(load_fixture(name).config)), keys) == set()


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_a_projection_saved_in_rank_slices_is_reordered(slices: int, tmp_path: Path) -> None:
    """MiMo-V2.5 stores q, k and v of as many ranks as full layers have KV heads side by side in one tensor."""
    fixture = load_fixture("mimo_v2_flash_base")
    config = {**fixture.config, "num_attention_heads": 8, "num_key_value_heads": slices, "swa_num_key_value_heads": 8}
    model = parse_config(config)
    rng = np.random.default_rng(0)
    parts = [part for source in sources(model).values() for part in source.parts]
    tensors = {part.key: rng.standard_normal(part.shape).astype(np.float32) for part in parts}
    write_checkpoint(tmp_path / "plain", config, tensors)
    for index in range(len(model.layers)):
        prefix = f"model.layers.{index}.self_attn"
        split = [np.split(tensors.pop(f"{prefix}.{name}_proj.weight"), slices) for name in "qkv"]
        tensors[f"{prefix}.qkv_proj.weight"] = np.concatenate([x for rank in zip(*split, strict=True) for x in rank])
    write_checkpoint(tmp_path / "fused", {**config, "model_type": "mimo_v2"}, tensors)
    (_, plain), (_, fused) = (load_checkpoint(tmp_path / name, FLOAT32) for name in ("plain", "fused"))
    assert plain.keys() == fused.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(value, fused[name])


def test_max_model_len_decides_which_longrope_factors_are_used() -> None:
    """All sequences use the long factors if max_model_len exceeds the original length."""
    model = parse_config(load_fixture("phi3_long").config)
    (rope,) = {layer.attention.rope for layer in model.layers}
    assert rope is not None
    assert rope.original == 32
    short, long = (model.at_length(length).layers[0].attention.rope for length in (32, 33))
    assert long == rope.beyond
    assert short == dataclasses.replace(rope, original=None, beyond=None)
    assert short != long


# The decoders of texts that have windows, chunks or layer types: all of transformers 5.24, and those that vLLM 0.33 and
# SGLang 0.5.23 have besides.
OF_TRANSFORMERS = """
afmoe axk2 bailing_hybrid bamba beam blt cohere2 cohere2_moe cohere_compass_text cwm deepseek_v32 deepseek_v4
diffusion_gemma_text doge dory dots1 dots3_note_text embedding_gemma2_text exaone4 exaone_moe falcon_h1 falcon_mamba
flint gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm5_next_text glm_moe_dsa gpt_neo gpt_oss
granite_swa granitemoe_swa granitemoehybrid hy_v4 hy_v4_vl_text inkling_text inkling2_text inkling2_loop_text jamba
kimi_linear kolibri1 kyutai_speech_to_text laguna lara_mini lfm2 lfm2_moe lfm3 llama4_text mamba mamba2 mellum
mimo_v2_flash minimax minimax_m3_vl_text ministral ministral3 mistral mistral_large4_text mixtral modernbert
modernbert-decoder moshi muse_glimmer_text muse_glimmer_assistant muse_spark_text nemotron_h neomme olmo3 olmo_hybrid
openai_privacy_filter phi3 phi4_multimodal phimoe qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3
qwen3_5_text qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen4_exp_text recurrent_gemma
smollm3 starcoder2 step3p5 t5gemma t5gemma2_text ultrabert unlimited_ocr_text vaultgemma voxtral_realtime_text zamba
zamba2 zaya
"""
OF_OTHERS = "deepseek_v41 iquestloopcoder mimo_v2 phi4mm plamo3 spark2_5 step5"


@pytest.mark.parametrize("family", f"{OF_TRANSFORMERS} {OF_OTHERS}".split())
def test_a_decoder_with_windows_runs_or_is_refused_with_what_it_needs(family: str) -> None:
    """No such family gets the error for a name that jswa has never heard of."""
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        parse_config({"model_type": family, "vocab_size": 0})
    assert "must be one of" not in str(error.value)


def test_no_family_that_runs_is_listed_with_a_missing_block() -> None:
    assert not OTHER_BLOCKS.keys() & FAMILIES.keys()


@pytest.mark.parametrize("family", sorted(OTHER_BLOCKS))
def test_the_error_names_what_an_unsupported_family_needs(family: str) -> None:
    """As a model of its own, around a text part that runs, and as the text part of another one; by either name."""
    for name in (family, f"{family}_text"):
        around = {"model_type": name, "text_config": {"model_type": "qwen3"}}
        for config in ({"model_type": name}, around, {"model_type": "vlm", "text_config": {"model_type": name}}):
            with pytest.raises(UnsupportedModel) as error:
                parse_config(config)
            assert f"model_type = {name!r} has {OTHER_BLOCKS[family]}: not implemented" in str(error.value)


@pytest.mark.parametrize("text", ["gemma", "gemma2"])
def test_the_error_names_a_multimodal_model_whose_prompts_are_not_causal(text: str) -> None:
    """jswa runs both text models, but PaliGemma's prompts attend in both directions, also without an image."""
    config = {"model_type": "paligemma", "text_config": {"model_type": text}}
    with pytest.raises(UnsupportedModel, match=r"paligemma.*both directions.*not implemented"):
        parse_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma4_text_base", {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ("gemma4_text_base", {"layer_types": ["sliding_attention"] * 6}, "no full_attention layer"),
        ("gemma3n_text_base", {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
        ("gemma3n_text_base", {"altup_active_idx": 4}, "altup_active_idx"),
        ("phi3_long", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ("cohere2_base", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere_compass_text_base", {"rope_parameters": {"rope_theta": 1e4}}, "for full_attention and sliding"),
        ("plamo3_base", {"attention_bias": True}, "attention_bias"),
        ("plamo3_base", {"rope_theta": None}, "rope_theta = None: must be a finite number"),
        ("plamo3_base", {"window_size": None}, "sliding_window"),
        ("plamo3_base", {"rope_scaling_factor": 8, "initial_context_length": None}, "initial_context_length"),
        ("spark2_5_base", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = .*: must be gelu"),
        ("spark2_5_base", {"gate_attn_act_mode": "silu"}, "gate_attn_act_mode = .*: must be sigmoid"),
        ("spark2_5_base", {"attention_bias": True}, "attention_bias"),
        ("dots1_base", {"scoring_func": "softmax"}, "scoring_func"),
        ("granite_swa_base", {"layer_rope_theta": [1e4]}, "layer_rope_theta"),
        ("laguna_base", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer"),
        ("olmo3_base", {"sliding_window": 0}, "sliding_window"),
        ("gemma_base", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("olmoe_base", {"clip_qkv": 8.0}, "clip_qkv"),
        ("hunyuan_v1_dense_base", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_dense_base", {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e10}}, "alpha"),
        ("hunyuan_v1_dense_base", {"head_dim": 2}, "head_dim"),
        ("arcee_base", {"hidden_act": "xielu"}, "hidden_act"),
    ],
)
def test_the_error_names_the_key_of_an_invalid_config(name: str, changes: dict[str, Any], named: str) -> None:
    """CheckpointError or UnsupportedModel is raised."""
    with pytest.raises((CheckpointError, UnsupportedModel), match=named):
        parse_config({**load_fixture(name).config, **changes})


@pytest.mark.parametrize(
    "name", ["gemma4_text_mix", "gemma3n_text_base", "cohere2_moe_base", "beam_base", "apertus_base"]
)
def test_dummy_weights_give_finite_logits(name: str, tmp_path: Path) -> None:
    """With `load_format="dummy"`, factors are 1, so activations neither vanish nor explode."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, {})
    model, params = dummy_checkpoint(tmp_path, FLOAT32, 0)
    with quick_compiles():
        logits = dense_logits(model, params, fixture.tokens[:5])
    assert np.isfinite(logits).all()
    assert 0.01 < logits.std() < 100

"""DFlash and DSpark draft what a reference in float64 drafts, from each published format."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import CheckpointError, ConfigError, UnsupportedModel
from jswa.model.binding import bind
from jswa.model.drafters.load import check_drafter, load_drafter
from jswa.model.hf.config import parse_config
from jswa.model.weights.load import load_checkpoint
from tests.parity.drafters.load import drawn_hidden, drawn_text
from tests.parity.load import load_fixture
from tests.parity.references.dflash import DFlashReference, tap_ids
from tests.parity.weights import write_checkpoint
from tests.support.drafts.dense import Text
from tests.support.drafts.dflash import KINDS, dflash_checkpoint, write_saved

TARGET = load_fixture("gemma3_text_p6")
MODEL = parse_config(TARGET.config)
WIDTH, VOCAB = MODEL.d_model, MODEL.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    config, tensors = dflash_checkpoint(kind, WIDTH, VOCAB)
    write_checkpoint(tmp_path / "target", TARGET.config, TARGET.tensors)
    write_checkpoint(tmp_path / "own", config, tensors)
    vector = None
    if kind == "dflash_mimo":
        vector = drawn_hidden(WIDTH, 2, 1)[0]
        write_saved(tmp_path / "own" / "mask_embedding.pt", vector, 5)
    target, params = load_checkpoint(tmp_path / "target", jnp.dtype(jnp.float32))
    drafter, own = load_drafter(kind.split("_")[0], tmp_path / "own", target, params, jnp.dtype(jnp.float32))
    tokens, taps = drawn_text(VOCAB, 1), tap_ids(config)
    states = dict(zip(taps, np.split(drawn_hidden(WIDTH * len(taps), 1), len(taps), axis=1), strict=True))
    text = Text(drafter, own, target, tokens, states, target=bind(target, params))
    embedding = TARGET.tensors["model.embed_tokens.weight"]
    reference = DFlashReference(config, tensors, tokens, states, embedding * np.sqrt(WIDTH), embedding, vector)
    for count in (3, 7):
        wanted, lead = reference.drafts(count)
        assert lead > 1e-4
        assert np.array_equal(text.drafts(count), wanted)


def _refused(folder: Path, kind: str, changes: Mapping[str, Any], drop: tuple[str, ...] = (), **own: object) -> str:
    """Return why a drafter with another config, or fewer tensors, is refused; its weights cannot be read."""
    config, tensors = dflash_checkpoint(kind, WIDTH, VOCAB)
    config |= changes
    if "dflash_config" in config:
        config["dflash_config"] = config["dflash_config"] | own
    write_checkpoint(folder, config, {name: tensor for name, tensor in tensors.items() if name not in drop})
    with pytest.raises((ConfigError, CheckpointError, UnsupportedModel)) as caught:
        check_drafter(kind.split("_")[0], folder, MODEL)
    return str(caught.value)


def test_what_does_not_fit_the_target_is_named(tmp_path: Path) -> None:
    layers = len(MODEL.layers)
    assert f"vocab_size = 128: must be {VOCAB}" in _refused(tmp_path, "dflash", {"vocab_size": 128})
    assert f"hidden_size = 24: must be {WIDTH}" in _refused(tmp_path, "dflash", {"hidden_size": 24})
    assert f"target_hidden_size = 24: must be {WIDTH}" in _refused(tmp_path, "dflash", {"target_hidden_size": 24})
    outside = _refused(tmp_path, "dflash", {}, target_layer_ids=[0, layers])
    assert f"target_layer_ids = [0, {layers}]: must be 1 to 64 layers of the model, -1 to {layers - 1}" in outside
    assert "fc.weight has shape" in _refused(tmp_path, "dflash", {}, target_layer_ids=[0, 1])
    assert "mask_token_id" in _refused(tmp_path, "dflash", {}, mask_token_id=VOCAB)
    assert "block_size = 1: must be a whole number from 2" in _refused(tmp_path, "dflash", {"block_size": 1})
    assert "lacks model.layers.1.self_attn.q_norm.weight" in _refused(
        tmp_path, "dflash", {}, ("layers.1.self_attn.q_norm.weight",)
    )
    assert "lacks lm_head.weight or d2t: draft_vocab_size = 40" in _refused(
        tmp_path, "dflash_speculators", {}, ("d2t", "t2d")
    )
    assert "method = 'dspark': must be another method for gemma2" in _refused_for_capped(tmp_path)


def test_what_dflash2_adds_must_fit(tmp_path: Path) -> None:
    """Its logits are those of the target's head, with the factor and the cap that this has."""
    assert f"conv_group_size = 5: must divide {WIDTH}" in _refused(tmp_path, "dflash_second", {}, conv_group_size=5)
    assert "final_logit_softcapping = 30.0: must be None, that of the head" in _refused(
        tmp_path, "dflash_beam", {}, final_logit_softcapping=30.0
    )
    assert "output_multiplier = 0.5: must be 1.0, that of the head" in _refused(
        tmp_path, "dflash_second", {}, output_multiplier=0.5
    )
    assert "selector_top_k" in _refused(tmp_path, "dflash_second", {}, selector_top_k=VOCAB + 1)
    assert "base_kernel has shape" in _refused(tmp_path, "dflash_second", {}, conv_kernel_size=2)
    lacks = _refused(tmp_path, "dflash_second", {}, ("candidate_selector.successor_codebook",))
    assert "lacks candidate_selector.successor_codebook" in lacks


def _refused_for_capped(folder: Path) -> str:
    """Return why DSpark without a head of its own is refused for a model that caps logits."""
    config, tensors = dflash_checkpoint("dspark", WIDTH, VOCAB)
    write_checkpoint(folder, config, tensors)
    with pytest.raises(ConfigError) as caught:
        check_drafter("dspark", folder, dataclasses.replace(MODEL, family="gemma2", final_softcap=30.0))
    return str(caught.value)


def test_drafters_of_other_kinds_are_named(tmp_path: Path) -> None:
    assert "architectures = ['DFlash3DraftModel']: must be one of DFlashDraftModel" in _refused(
        tmp_path, "dflash", {"architectures": ["DFlash3DraftModel"]}
    )
    assert "conv_kernel_size = 3: not implemented" in _refused(
        tmp_path, "dflash_second", {"architectures": ["DFlashDraftModel"]}
    )
    assert "architectures = ['DFlashDraftModel']: must be one of Qwen3DSparkModel" in _refused(
        tmp_path, "dspark", {"architectures": ["DFlashDraftModel"]}
    )
    assert "speculators_model_type = 'eagle3': must be one of dflash, dflash2" in _refused(
        tmp_path, "dflash_speculators", {"speculators_model_type": "eagle3"}
    )
    assert "architectures = ['DFlashDraftModel']: must be one of DFlash2DraftModel" in _refused(
        tmp_path, "dflash_second_speculators", {"architectures": ["DFlashDraftModel"]}
    )
    assert "model_type = 'mamba': must be one of qwen3" in _refused(tmp_path, "dflash", {"model_type": "mamba"})
    assert "selector_rank = 8: not implemented" in _refused(tmp_path, "dflash", {}, selector_rank=8)
    assert "projector_type = 'domino': not implemented" in _refused(tmp_path, "dflash", {}, projector_type="domino")
    assert "num_kv_shared_layers = 1: not implemented" in _refused(
        tmp_path, "dspark_gemma4", {"num_kv_shared_layers": 1}
    )
    assert "model_type = 'qwen3': must be one of gemma4_text, gemma4_unified_text" in _refused(
        tmp_path, "dspark_gemma4", {"model_type": "qwen3"}
    )
    assert "markov_head_type = 'rnn': not implemented" in _refused(tmp_path, "dspark", {"markov_head_type": "rnn"})

"""EAGLE-3 and P-EAGLE draft what the speculators package drafts, from both formats of checkpoints."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, ConfigError, UnsupportedModel
from jswa.model.drafters.load import check_drafter, load_drafter
from jswa.model.hf.config import parse_config
from tests.parity.drafters.load import DRAFTS, DrafterFixture, drawn_hidden, drawn_text, load_drafters
from tests.support.drafts.dense import Text

FIXTURES = {fixture.name: fixture for fixture in load_drafters("eagle")}
WIDTH = 32
TARGET: ModelConfig = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
)


@pytest.mark.parametrize("name", FIXTURES)
def test_drafts_are_those_of_the_speculators_package(name: str, tmp_path: Path) -> None:
    fixture = FIXTURES[name]
    assert np.array_equal(_drafts(fixture, fixture.write(tmp_path)), fixture.drafts)


@pytest.mark.parametrize("name", ["eagle3", "eagle3_gpt_oss"])
def test_the_other_format_gives_the_same_drafts(name: str, tmp_path: Path) -> None:
    fixture = FIXTURES[name]
    config = fixture.config
    flat = config["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        # Here a layer's number stands for what the layer gives.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "norm_before_fc": config["norm_before_fc"]},
    }
    tensors = {key.replace("layers.0.", "midlayer."): value for key, value in fixture.tensors.items()}
    other = dataclasses.replace(fixture, facts=fixture.facts | {"config": flat}, tensors=tensors)
    folder = other.write(tmp_path)
    assert check_drafter("eagle3", folder, TARGET).taps == (1, 2, 4)
    assert np.array_equal(_drafts(other, folder), fixture.drafts)


def _drafts(fixture: DrafterFixture, folder: Path) -> np.ndarray:
    drafter, params = load_drafter("eagle3", folder, TARGET, {}, jnp.dtype(jnp.float32))
    seed = fixture.facts["seed"]
    states = drawn_hidden(len(drafter.taps) * WIDTH, seed)
    hidden = dict(zip(drafter.taps, np.split(states, len(drafter.taps), axis=1), strict=True))
    text = Text(drafter, params, TARGET, drawn_text(TARGET.vocab_size, seed), hidden)
    return text.drafts(DRAFTS)


def _refused(folder: Path, changes: Mapping[str, object], drop: tuple[str, ...] = (), **layer: object) -> str:
    """Return why a drafter with another config, or fewer tensors, is refused; its weights cannot be read."""
    fixture = FIXTURES["eagle3"]
    config = fixture.config | dict(changes)
    config["transformer_layer_config"] = config["transformer_layer_config"] | layer
    tensors = {name: tensor for name, tensor in fixture.tensors.items() if name not in drop}
    dataclasses.replace(fixture, facts=fixture.facts | {"config": config}, tensors=tensors).write(folder)
    with pytest.raises((ConfigError, CheckpointError, UnsupportedModel)) as caught:
        check_drafter("eagle3", folder, TARGET)
    return str(caught.value)


def test_what_does_not_fit_the_target_is_named(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}
    assert "vocab_size = 128: must be 96, the size of the model's vocabulary" in _refused(tmp_path, {}, vocab_size=128)
    assert "target_hidden_size = 48: must be 32, the hidden size" in _refused(tmp_path, {"target_hidden_size": 48})
    assert "layer_ids = [1, 2, 6]: must be at most 16 layers of the model, 0 to 5" in _refused(tmp_path, ids)
    assert "model_type = 'mamba': must be one of llama, qwen3" in _refused(tmp_path, {}, model_type="mamba")
    assert "speculators_model_type = 'dflash'" in _refused(tmp_path, {"speculators_model_type": "dflash"})
    assert "architectures = ['MedusaModel']: must be one of EAGLE-3" in _refused(
        tmp_path, {"architectures": ["MedusaModel"]}
    )
    assert "fc.weight" in _refused(tmp_path, {}, ("fc.weight",))
    assert "lacks model.layers.0.hidden_norm.weight" in _refused(tmp_path, {}, ("layers.0.hidden_norm.weight",))
    assert "lacks d2t" in _refused(tmp_path, {}, ("d2t", "t2d"))
    assert "fc.weight has shape [32, 96]" in _refused(tmp_path, {"eagle_aux_hidden_state_layer_ids": [1, 2]})


def test_a_draft_vocabulary_names_tokens_of_the_model(tmp_path: Path) -> None:
    fixture = FIXTURES["eagle3"]
    offsets = fixture.tensors["d2t"] + 60
    folder = dataclasses.replace(fixture, tensors=fixture.tensors | {"d2t": offsets}).write(tmp_path)
    with pytest.raises(CheckpointError, match="must name tokens from 0 to 95"):
        load_drafter("eagle3", folder, TARGET, {}, jnp.dtype(jnp.float32))

"""EAGLE-3 and P-EAGLE draft what the speculators package drafts, from both formats of checkpoints."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import ModelConfig
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

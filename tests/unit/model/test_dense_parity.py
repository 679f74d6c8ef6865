"""The decoder against transformers, on every fixture, by dense attention: config reading, loading, arithmetic."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.config import ModelConfig
from jswa.model.config_hf import parse_config
from jswa.model.load import load_checkpoint
from jswa.model.transformer import param_shapes
from jswa.model.weights_hf import sources
from tests.oracles import dense_logits, quick_compiles
from tests.parity.load import FIXTURES, load_fixture, names
from tests.parity.weights import write_checkpoint

FAMILIES = ("llama", "mistral", "ministral", "gemma3", "gemma3_text")
PROMISED, USUAL = 2e-4, 5e-5  # what docs/design.md §7 promises, and what no fixture comes near


@pytest.fixture(scope="module", autouse=True)
def _unoptimised() -> Iterator[None]:
    """Op by op, a forward costs what its ops take to compile: a quarter less without optimisation."""
    with quick_compiles():
        yield


def _supported() -> list[str]:
    configs = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in names()}
    return [name for name, config in configs.items() if config["model_type"] in FAMILIES]


@pytest.mark.parametrize("name", _supported())
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """Every position of every fixture; the older form of a config reads as the very same model."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, params = load_checkpoint(tmp_path, jnp.dtype("float32"))
    difference = float(np.abs(dense_logits(model, params, fixture.tokens) - fixture.logits).max())
    assert difference < PROMISED
    assert difference < USUAL, "within the promise, but something has changed"
    if fixture.old_config is not None:
        write_checkpoint(tmp_path / "old", fixture.old_config, fixture.tensors)
        old, _ = load_checkpoint(tmp_path / "old", jnp.dtype("float32"))
        # What no forward reads may differ: an absent key has the family's default, and `ministral` became `mistral`.
        unread = {name: getattr(model, name) for name in ("family", "max_position", "eos_token_ids")}
        assert dataclasses.replace(old, **unread) == model
        assert sources(old) == sources(model)


@pytest.mark.parametrize("name", ["llama_attention_bias", "mistral_w8", "gemma3_wrapped", "gemma3_text_untied"])
def test_every_parameter_has_a_source_and_every_source_a_parameter(name: str) -> None:
    """The name map and the decoder agree on names and shapes."""
    model: ModelConfig = parse_config(load_fixture(name).config)
    table = sources(model)
    shapes = {key: shape.shape for key, shape in param_shapes(model, jnp.dtype("float32")).items()}
    stacked = {}
    for key, source in table.items():
        shape = (sum(part.shape[0] for part in source.parts), *source.parts[0].shape[1:])
        stacked[key] = shape[::-1] if source.transpose else shape
        assert len({part.shape[1:] for part in source.parts}) == 1
    assert stacked == shapes
    keys = [part.key for source in table.values() for part in source.parts]
    assert len(keys) == len(set(keys)), "a tensor has two parameters"

"""The decoder against transformers, on every fixture, by dense attention: config reading, loading, arithmetic."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import ModelConfig
from jswa.model.binding import param_shapes
from jswa.model.hf.assemble import assemble
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from tests.parity.load import Fixture, load_fixture, names
from tests.parity.selection import CHOSEN
from tests.parity.sketch import next_log_probs, sketch
from tests.parity.weights import write_checkpoint
from tests.support.nights import sample
from tests.support.oracles import dense_logits, quick_compiles

# Of a difference of sketches: what docs/numerics.md promises for logits, and a limit that no fixture exceeds.
PROMISED, USUAL = 2e-4, 1.75e-4
USUAL_LOG_PROB = 5e-5
OTHERS = [name for name in names() if name not in CHOSEN]


@pytest.fixture(scope="module", autouse=True)
def _unoptimised() -> Iterator[None]:
    """Compile without optimisation: compiling the operations takes most of the time of these tests."""
    with quick_compiles():
        yield


@pytest.mark.parametrize("name", [*sorted(CHOSEN), *sample(OTHERS, 9)])
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """At every position; the older form of a config reads as the very same model."""
    fixture, model, params = _load(name, tmp_path)
    found = dense_logits(model, params, fixture.tokens)
    difference = float(np.abs(sketch(found) - fixture.sketch).max())
    assert difference < PROMISED
    assert difference < USUAL, "within the promise, but something has changed"
    assert np.abs(next_log_probs(found, fixture.tokens) - fixture.log_probs).max() < USUAL_LOG_PROB
    start = len(fixture.prompt)
    np.testing.assert_array_equal(found[start - 1 : -1].argmax(axis=-1), fixture.tokens[start:])
    if fixture.old_config is not None:
        write_checkpoint(tmp_path / "old", fixture.old_config, fixture.tensors)
        old = load_checkpoint(tmp_path / "old", jnp.dtype("float32"))[0].at_length(len(fixture.tokens))
        # Fields that no forward reads may differ: an absent key has the family's default; `ministral` became `mistral`.
        unread = {name: getattr(model, name) for name in ("family", "max_position", "eos_token_ids")}
        assert dataclasses.replace(old, **unread) == model
        assert sources(old) == sources(model)


@pytest.mark.parametrize("by", sample(["-1", "1"], 2))
@pytest.mark.parametrize("name", ["mistral_layer_types", "gpt_oss_rope_scaling_null", "llama4_text_every_second"])
def test_a_window_that_is_one_off_in_one_layer_is_detected(name: str, by: str, tmp_path: Path) -> None:
    """The comparison with the stored sketch can fail: each local layer in turn sees one key more or less."""
    fixture, model, params = _load(name, tmp_path)
    local = [i for i, layer in enumerate(model.layers) if layer.attention.reach is not None]
    assert local
    for index in local:
        layers = list(model.layers)
        attention = layers[index].attention
        assert attention.reach is not None
        reach = dataclasses.replace(attention.reach, size=attention.reach.size + int(by))
        layers[index] = dataclasses.replace(layers[index], attention=dataclasses.replace(attention, reach=reach))
        wrong = dense_logits(dataclasses.replace(model, layers=tuple(layers)), params, fixture.tokens)
        off = np.abs(sketch(wrong) - fixture.sketch).max(axis=1)
        assert off.max() > 100 * PROMISED
        assert (off > PROMISED).sum() > len(off) // 3


@pytest.mark.parametrize(
    "name",
    [
        *("llama_attention_bias", "mistral_w8", "gemma3_wrapped", "gemma3_text_untied", "gemma2_base", "qwen3_base"),
        *("gpt_oss_base", "mimo_v2_flash_base", "llama4_text_every_second", "mixtral_base", "qwen3_moe_dense_layers"),
        *("apertus_base", "glm4_base", "granitemoe_base", "hunyuan_v1_dense_base", "nemotron_base"),
    ],
)
def test_every_parameter_has_a_source_and_every_source_a_parameter(name: str) -> None:
    """The name map and the decoder agree on names and shapes."""
    model: ModelConfig = parse_config(load_fixture(name).config)
    table = sources(model)
    shapes = {key: shape.shape for key, shape in param_shapes(model, jnp.dtype("float32")).items()}
    assert set(table) == set(shapes)
    for key, source in table.items():
        out = np.full(shapes[key], np.nan, np.float32)
        assemble(source, out, lambda part, begin, end: np.zeros((end - begin, *part.shape[-1:]), np.float32))
        np.testing.assert_array_equal(out, 0, err_msg=key)  # every element is filled
    keys = [part.key for source in table.values() for part in source.parts]
    assert len(keys) == len(set(keys)), "a tensor has two parameters"


def _load(name: str, folder: Path) -> tuple[Fixture, ModelConfig, Params]:
    fixture = load_fixture(name)
    write_checkpoint(folder, fixture.config, fixture.tensors)
    model, params = load_checkpoint(folder, jnp.dtype("float32"))
    return fixture, model.at_length(len(fixture.tokens)), params

"""Assistants of Gemma 4 draft what transformers' generator drafts with them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import ConfigError
from jswa.model.binding import bind
from jswa.model.drafters.load import check_drafter, load_drafter
from jswa.model.drafters.seam import FINAL
from jswa.model.hf.config import parse_config
from jswa.model.weights.load import load_checkpoint
from tests.parity.drafters.load import DRAFTS, drawn_text, load_drafters
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.drafts.dense import Text
from tests.support.oracles import dense_attention

FIXTURES = {fixture.name: fixture for fixture in load_drafters("assistant")}


@pytest.mark.parametrize("name", FIXTURES)
def test_drafts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """One target shares KV among its last layers, and its assistant has centroids; another stores folded keys."""
    fixture = FIXTURES[name]
    its = load_fixture(fixture.facts["target"])
    write_checkpoint(tmp_path / "target", its.config, its.tensors)
    target, params = load_checkpoint(tmp_path / "target", jnp.dtype(jnp.float32))
    folder = fixture.write(tmp_path / "drafter")
    drafter, own = load_drafter("gemma4_assistant", folder, target, params, jnp.dtype(jnp.float32))
    tokens = drawn_text(target.vocab_size, fixture.facts["seed"])
    decoder, attend, stored = bind(target, params), dense_attention(target), dict[int, Any]()

    def noted(layer: int, q: Any, kv: Any, sinks: Any) -> Any:
        if kv is not None:
            stored[layer] = kv
        return attend(layer, q, kv, sinks)

    hidden = {FINAL: np.asarray(decoder(jnp.asarray(tokens), jnp.arange(len(tokens)), noted))}
    text = Text(drafter, own, target, tokens, hidden, stored=stored, target=decoder)
    assert np.array_equal(text.drafts(DRAFTS), fixture.drafts)


def test_another_target_is_refused(tmp_path: Path) -> None:
    fixture = FIXTURES["assistant_of_dense"]
    folder = fixture.write(tmp_path)
    with pytest.raises(ConfigError, match="must be another method for llama"):
        check_drafter("gemma4_assistant", folder, parse_config(load_fixture("llama_gqa").config))
    wider = load_fixture(fixture.facts["target"]).config | {"hidden_size": 32}
    with pytest.raises(ConfigError, match="backbone_hidden_size = 64: must be 32"):
        check_drafter("gemma4_assistant", folder, parse_config(wider))

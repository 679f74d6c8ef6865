"""DFlash and DSpark draft what a reference in float64 drafts, from each published format."""

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
from tests.support.drafts.dflash import KINDS, dflash_checkpoint

TARGET = load_fixture("gemma3_text_p6")
MODEL = parse_config(TARGET.config)
WIDTH, VOCAB = MODEL.d_model, MODEL.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    config, tensors = dflash_checkpoint(kind, WIDTH, VOCAB)
    write_checkpoint(tmp_path / "target", TARGET.config, TARGET.tensors)
    write_checkpoint(tmp_path / "own", config, tensors)
    target, params = load_checkpoint(tmp_path / "target", jnp.dtype(jnp.float32))
    drafter, own = load_drafter(kind.split("_")[0], tmp_path / "own", target, params, jnp.dtype(jnp.float32))
    tokens, taps = drawn_text(VOCAB, 1), tap_ids(config)
    states = dict(zip(taps, np.split(drawn_hidden(WIDTH * len(taps), 1), len(taps), axis=1), strict=True))
    text = Text(drafter, own, target, tokens, states, target=bind(target, params))
    embedding = TARGET.tensors["model.embed_tokens.weight"]
    reference = DFlashReference(config, tensors, tokens, states, embedding * np.sqrt(WIDTH), embedding)
    for count in (3, 7):
        wanted, lead = reference.drafts(count)
        assert lead > 1e-4
        assert np.array_equal(text.drafts(count), wanted)

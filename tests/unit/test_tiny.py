"""The model in the box: its checkpoint is what its card says, and the script that makes it runs."""

import itertools
import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.llm import TINY
from jswa.model.config_hf import parse_config
from jswa.model.load import load_checkpoint
from jswa.text import Tokenizer
from tools import tiny_corpus, train_tiny
from tools.tiny_checkpoint import BOS, EOS, VOCAB_SIZE, config_json, encode, torch_tensors

FLOAT32 = jnp.dtype(jnp.float32)
TEXTS = ["Once upon a time", "", " two  spaces \n\ttab", "Grüße, 世界! 🐈‍⬛ e\u0301", "\x00\x7f\u0080\uffff"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(TINY)
    assert loaded is not None
    return loaded


def test_checkpoint_is_the_model_that_the_script_describes() -> None:
    config, params = load_checkpoint(TINY, FLOAT32)
    assert config == parse_config(config_json(), eos_token_id=EOS)
    assert [layer.attention.window for layer in config.layers] == [64, 64, None, 64, 64, None]
    assert config.tie_embeddings
    assert config.eos_token_ids == (EOS,)
    assert 300_000 < sum(x.size for x in params.values()) < 400_000


def test_writing_inverts_loading() -> None:
    config, params = load_checkpoint(TINY, FLOAT32)
    from safetensors.numpy import load_file

    stored, again = load_file(TINY / "model.safetensors"), torch_tensors(config, params, "bfloat16")
    assert stored.keys() == again.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    assert ids == [BOS, *encode(text)]
    assert tokenizer.decode([*ids, EOS]) == text


def test_every_id_has_its_byte(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    names = [tokenizer.backend.id_to_token(i) for i in range(VOCAB_SIZE)]
    assert len(set(names)) == VOCAB_SIZE
    assert tokenizer.decode([BOS, EOS], skip_special_tokens=False) == "<bos><eos>"


def test_held_out_stories_are_expected() -> None:
    config, params = load_checkpoint(TINY, FLOAT32)
    assert train_tiny.held_out_bits(config, params, count=8) < BOUND


def test_stories_are_seeded_and_short_enough() -> None:
    first, second = (list(itertools.islice(tiny_corpus.stories(7), 300)) for _ in range(2))
    assert first == second
    assert all(250 <= len(text) <= 900 and text.isascii() for text in first)
    assert not any(mark in text for text in first for mark in ("{", "}", "  ", " a a", " a o"))


def test_story_names_its_cast() -> None:
    rng = random.Random(0)
    slots = tiny_corpus.cast(rng)
    assert slots["name"] != slots["friend"]
    assert slots["A_thing"][0] == "A"


def test_training_script_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_tiny.main(["--steps", "2", "--out", str(tmp_path), "--samples", "0"])
    config, params = load_checkpoint(tmp_path, FLOAT32)
    assert config.window == 64
    assert all(bool(jnp.isfinite(x).all()) for x in params.values())
    assert Tokenizer.load(tmp_path) is not None
    assert "bits per byte" in capsys.readouterr().out


BOUND = 2.5  # bits per byte

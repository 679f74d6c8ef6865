"""The model in the box: its checkpoint is what its card says, and the script that makes it runs."""

import itertools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jswa.architecture import Reach
from jswa.llm import TINY
from jswa.model.hf.config import parse_config
from jswa.model.load import load_checkpoint
from jswa.text import Tokenizer
from tools import tiny_corpus, train_tiny
from tools.tiny_checkpoint import BOS, EOS, VOCAB_SIZE, config_json, encode, torch_tensors

BOUND = 0.27  # bits per byte; the shipped weights have 0.24
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
    assert [layer.attention.reach for layer in config.layers] == 2 * [Reach(64), Reach(64), None]
    assert config.tie_embeddings
    assert config.eos_token_ids == (EOS,)
    assert 300_000 < sum(x.size for x in params.values()) < 400_000


def test_writing_inverts_loading() -> None:
    config, params = load_checkpoint(TINY, FLOAT32)
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


@pytest.mark.parametrize("length", [300])
@pytest.mark.parametrize("layer", [0, 2])
def test_blocks_of_training_attention_are_the_whole(layer: int, length: int) -> None:
    config = parse_config(config_json())
    attention = config.layers[layer].attention
    q, k, v = (
        jax.random.normal(jax.random.key(i), (length, heads, attention.head_dim)) for i, heads in enumerate((4, 2, 2))
    )
    behind = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (behind >= 0) & (behind < (attention.reach.size if attention.reach else length))
    expected = np.zeros(q.shape, np.float32)
    for head in range(4):
        scores = np.where(visible, np.asarray(q[:, head] @ k[:, head // 2].T) * attention.scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected[:, head] = weights / weights.sum(axis=1, keepdims=True) @ np.asarray(v[:, head // 2])
    out = train_tiny.dense_attend(config)(layer, q, jnp.concatenate([k, v], axis=-1), None)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_training_script_writes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_tiny, "LENGTH", 96)  # compiles faster
    monkeypatch.setattr(train_tiny, "held_out_bits", lambda config, params: 1.0)
    train_tiny.main(["--steps", "2", "--out", str(tmp_path), "--samples", "0"])
    config, params = load_checkpoint(tmp_path, FLOAT32)
    assert config.layers[0].attention.reach == Reach(64)
    assert all(bool(jnp.isfinite(x).all()) for x in params.values())
    assert Tokenizer.load(tmp_path) is not None
    assert "2 AdamW steps" in (tmp_path / "README.md").read_text(encoding="utf-8")

"""The training script of `tiny`: its parts, an interrupted run, and the first steps of the real training."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.model.hf.config import parse_config
from jswa.model.weights.load import load_checkpoint
from jswa.text.tokenizer import Tokenizer
from tools.tiny import optimizer, scores, train
from tools.tiny.attention import dense_attend
from tools.tiny.checkpoint import config_json

SMALL = (train.Stage(2, 1, 64), train.Stage(2, 1, 96))  # compile quickly
SMOKE = 50  # steps of the real training


@pytest.mark.parametrize("length", [300])
@pytest.mark.parametrize("layer", [0, 2])
def test_blockwise_attention_equals_dense_attention(layer: int, length: int) -> None:
    config = parse_config(config_json())
    attention = config.layers[layer].attention
    q, k, v = (
        jax.random.normal(jax.random.key(i), (length, heads, attention.head_dim)) for i, heads in enumerate((4, 2, 2))
    )
    behind = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (behind >= 0) & (behind < (attention.reach.size if attention.reach else length))
    expected = np.zeros(q.shape, np.float32)
    for head in range(4):
        scored = np.where(visible, np.asarray(q[:, head] @ k[:, head // 2].T) * attention.scale, -np.inf)
        weights = np.exp(scored - scored.max(axis=1, keepdims=True))
        expected[:, head] = weights / weights.sum(axis=1, keepdims=True) @ np.asarray(v[:, head // 2])
    out = dense_attend(config)(layer, q, jnp.concatenate([k, v], axis=-1), None)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [optimizer.learning_rate(i / 100) for i in range(101)]
    assert max(rates) == rates[20] == optimizer.PEAK
    assert rates[-1] == 0
    assert rates[0] < rates[1] < rates[2] < rates[3]


@pytest.mark.nightly
def test_a_resumed_run_gives_the_same_weights_as_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "STAGES", SMALL)
    monkeypatch.setattr(train, "EVERY", 1)
    monkeypatch.setattr(train, "STORIES", 50)
    monkeypatch.setattr(train, "print_samples", lambda folder: None)
    monkeypatch.setattr(scores, "summary", lambda config, params: {"some task": 0.5})
    whole, cut, saved = tmp_path / "whole", tmp_path / "cut", tmp_path / "saved"
    train.main([f"--out={whole}", f"--curve={tmp_path / 'whole.json'}"])
    saved.mkdir()
    train.main([f"--out={cut}", "--until=3", f"--resume={saved}"])
    assert not cut.exists()
    train.main([f"--out={cut}", f"--resume={saved}", f"--curve={tmp_path / 'cut.json'}"])
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    assert (tmp_path / "whole.json").read_text() == (tmp_path / "cut.json").read_text()
    _, params = load_checkpoint(whole, jnp.dtype(jnp.float32))
    assert all(bool(jnp.isfinite(x).all()) for x in params.values())
    assert Tokenizer.load(whole) is not None
    assert "| some task | 0.500 |" in (whole / "README.md").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_the_training_begins_like_that_of_the_shipped_weights() -> None:
    """Same data, initial weights and steps: the losses differ by the machine's rounding only."""
    shipped = {int(step): loss for step, loss in json.loads(train.CURVE.read_text(encoding="utf-8")).items()}
    config = parse_config(config_json())
    run = train.start(config, 0)
    train.train(config, run, 0, SMOKE, None)
    assert sorted(run.curve) == list(range(train.EVERY, SMOKE + 1, train.EVERY))
    for step, loss in run.curve.items():
        assert abs(loss - shipped[step]) < 0.05 * shipped[step], (step, loss, shipped[step])
    assert run.curve[SMOKE] < 0.75 * run.curve[train.EVERY]

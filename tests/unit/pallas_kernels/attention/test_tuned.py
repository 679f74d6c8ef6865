"""Tests of measured tunings: which shape finds which entry."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from pallas_kernels.attention import tuned
from pallas_kernels.attention.hopper.heuristics import default_tuning
from pallas_kernels.attention.tuned import Entry, key_of, save, tuning_for
from tests.support.kernels.calls import shape_of
from tools.cases.kernels.attention_layers import LAYERS
from tools.cases.kernels.attention_shapes import arguments

GEMMA = next(layer for layer in LAYERS if layer.name == "gemma-3-27b local")


def test_a_measured_tuning_is_found_by_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches up to the next power of two share an entry. Another window, type or device has its own."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    shape = shape_of(arguments(GEMMA))
    best = default_tuning(shape)._replace(stages=1)
    save(tmp_path / f"{tuned.device_name()}.json", [Entry(key_of(shape), best, 1e-5, 2e-5)], {"jax": jax.__version__})
    assert tuning_for(shape) == best
    assert tuning_for(shape_of(arguments(replace(GEMMA, batch=50)))) == best
    for change in ({"batch": 65}, {"window": 512}, {"dtype": "float16"}, {"page_size": 32}):
        assert tuning_for(shape_of(arguments(replace(GEMMA, **change)))) is None
    monkeypatch.setattr(tuned, "device_name", lambda: "another")
    assert tuning_for(shape) is None

"""Which kernels a device runs (jswa/exec/backends.py)."""

import importlib.util
import logging
from typing import Any

import jax.numpy as jnp
import pytest

from jswa.config import EngineConfig
from jswa.exec.backends import Backends, choose_backends


@pytest.mark.parametrize(
    ("device", "dtype", "want"),
    [
        (("cpu", None), "float32", Backends("xla", "xla")),
        (("cpu", None), "bfloat16", Backends("xla", "xla")),
        (("gpu", "9.0"), "bfloat16", Backends("mosaic", "mosaic")),
        (("gpu", "9.0"), "float32", Backends("triton", "xla")),
        (("gpu", "8.0"), "bfloat16", Backends("triton", "xla")),
        (("gpu", "10.0"), "float16", Backends("triton", "xla")),
        (("gpu", "7.5"), "float16", Backends("xla", "xla")),
    ],
)
def test_by_device(device: tuple[str, str | None], dtype: str, want: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's WGMMA is on no other GPU, newer ones included."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert choose_backends(EngineConfig(), jnp.dtype(dtype), *device) == want


def test_plain_xla_on_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The choice is open, but nobody should find out by a stopwatch."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "jswa"):
        chosen = choose_backends(EngineConfig(), jnp.dtype("bfloat16"), "gpu", "8.0")
    assert chosen == Backends("xla", "xla")
    assert "jax-triton is not installed" in caplog.text


@pytest.mark.parametrize("options", [{"attention_backend": "mosaic"}, {"moe_backend": "mosaic"}])
def test_a_named_one_is_taken(options: dict[str, Any]) -> None:
    """Whatever the device."""
    chosen = choose_backends(EngineConfig(**options), jnp.dtype("float32"), "cpu", None)
    assert "mosaic" in chosen

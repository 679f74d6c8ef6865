"""Glue and routing, whose kernels are chosen by device and by model (jswa/exec/backends.py)."""

import importlib.util
import logging
import re
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jswa.config import EngineConfig
from jswa.exec.backends import Backends, choose_backends, for_model
from jswa.model.hf.config import parse_config
from tools.cases.hub_configs import CONFIGS


@pytest.mark.parametrize(
    ("options", "installed", "want"),
    [
        ({}, True, ("mosaic", "triton")),
        ({}, False, ("mosaic", "xla")),
        ({"tensor_parallel_size": 2}, True, ("xla", "xla")),
        ({"deterministic": True}, True, ("xla", "xla")),
        ({"glue_backend": "xla", "routing_backend": "xla"}, True, ("xla", "xla")),
        ({"glue_backend": "mosaic", "tensor_parallel_size": 2}, True, ("mosaic", "xla")),
        ({"routing_backend": "triton", "deterministic": True}, True, ("xla", "triton")),
    ],
)
def test_one_hopper_has_glue_and_routing_in_few_kernels(
    options: dict[str, Any], installed: bool, want: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16-bit types, if rows need not be computed alone. A named kernel is the one that runs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    chosen = choose_backends(EngineConfig(**options), jnp.dtype("bfloat16"), "gpu", "9.0")
    assert (chosen.glue, chosen.routing) == want


def test_a_hopper_without_jax_triton_says_how_experts_are_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless they shall be chosen so."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "jswa"):
        choose_backends(
            EngineConfig(routing_backend="xla", sampling_backend="xla"), jnp.dtype("bfloat16"), "gpu", "9.0"
        )
        assert not caplog.text
        choose_backends(EngineConfig(), jnp.dtype("bfloat16"), "gpu", "9.0")
    assert "jax-triton is not installed: experts are chosen by plain XLA" in caplog.text


@pytest.mark.parametrize(
    ("model", "chosen", "want", "said"),
    [
        ("gpt-oss-20b", ("mosaic", "triton"), ("mosaic", "triton"), ""),
        ("gemma-3-27b", ("mosaic", "triton"), ("mosaic", "triton"), ""),
        ("Olmo-3-7B", ("mosaic", "triton"), ("xla", "triton"), "KV writes run on plain XLA: .* qk_norm_all_heads"),
        ("DeepSeek-V3-like", ("mosaic", "triton"), ("mosaic", "xla"), "chosen by plain XLA: a router with 4 groups"),
        ("Llama-4-Scout", ("cpu", "xla"), ("xla", "xla"), "KV writes run on plain XLA: interleaved pairs"),
        ("Mistral-7B-v0.1", ("cpu", "xla"), ("cpu", "xla"), ""),
    ],
)
def test_what_cannot_serve_a_model_is_xlas_if_it_is_not_named(
    model: str, chosen: tuple[Any, Any], want: tuple[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log says why. What is named stays, and is an error when it is compiled."""
    config = parse_config(CONFIGS["gpt-oss-20b" if model == "DeepSeek-V3-like" else model], weights=False)
    if model == "DeepSeek-V3-like":
        mixtures = (layer.moe for layer in config.layers)
        grouped = [replace(moe, router=replace(moe.router, groups=4)) for moe in mixtures if moe is not None]
        layers = zip(config.layers, grouped, strict=True)
        config = replace(config, layers=tuple(replace(layer, mlp=moe) for layer, moe in layers))
    given = Backends(glue=chosen[0], routing=chosen[1])
    with caplog.at_level(logging.INFO, "jswa"):
        found = for_model(given, EngineConfig(), config, jnp.dtype("bfloat16"))
    assert (found.glue, found.routing) == want
    assert re.search(said, caplog.text) if said else not caplog.text
    named: dict[str, Any] = {"glue_backend": chosen[0], "routing_backend": chosen[1]}
    assert for_model(given, EngineConfig(**named), config, jnp.dtype("bfloat16")) == given


def test_glue_on_a_cpu_writes_no_pages_of_8_bits() -> None:
    """On Hopper it does."""
    model, pages = parse_config(CONFIGS["Mistral-7B-v0.1"], weights=False), jnp.dtype("float8_e4m3fn")
    assert for_model(Backends(glue="cpu"), EngineConfig(), model, pages).glue == "xla"
    assert for_model(Backends(glue="mosaic"), EngineConfig(), model, pages).glue == "mosaic"

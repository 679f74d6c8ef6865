"""Tests of the decoder on the glue's kernels: how products are split, and which models it refuses."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jswa.model.glue.products import linear_parts, parts_of, router_parts_of
from jswa.model.glue.projection import heads_of, require_served
from jswa.model.hf.config import parse_config
from pallas_kernels.errors import NoGlueKernel
from tools.cases.hub_configs import CONFIGS


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "parts"),
    [
        (64, 5376, 8192, 4),  # gemma-3-27b, qkv: 64 blocks of columns
        (64, 21_504, 5376, 6),
        (64, 5376, 43_008, 1),
        (64, 2880, 5120, 5),  # gpt-oss-20b: 45 units of inputs
        (2048, 5376, 8192, 1),
        (1, 100, 64, 1),
    ],
)
def test_products_of_few_tokens_are_split(tokens: int, inputs: int, outputs: int, parts: int) -> None:
    """So that thread blocks keep the memory busy; each part has whole units of inputs."""
    assert parts_of(tokens, inputs, outputs) == parts


@pytest.mark.parametrize(
    ("tokens", "inputs", "parts"), [(64, 2880, 15), (1, 4096, 32), (256, 2880, 5), (256, 4096, 8), (300, 64, 1)]
)
def test_routers_are_split_into_short_parts(tokens: int, inputs: int, parts: int) -> None:
    """Fewer of more tokens, since one thread block adds them."""
    assert router_parts_of(tokens, inputs) == parts


def test_the_sum_of_the_parts_is_the_product() -> None:
    """In float32, before it is rounded."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 256)).astype(np.float32), rng.standard_normal((256, 128)).astype(np.float32)
    parts = linear_parts(jnp.asarray(x), nnx.Param(jnp.asarray(weight)), None, None)
    assert parts.values.shape == (4, 3, 128)
    np.testing.assert_allclose(np.asarray(parts.values).sum(axis=0), x @ weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ("gemma-3-27b", None),
        ("gpt-oss-20b", None),
        ("Mistral-7B-v0.1", None),
        ("MiMo-V2-Flash/V2.5", None),
        ("Llama-4-Scout", None),
        ("Olmo-3-7B", "qk_norm_all_heads"),
        ("gemma-4-E4B", "without KV"),
        ("Command-R7B", "more than attention"),
    ],
)
def test_models_that_the_kernels_cannot_serve_are_refused(model: str, refused: str | None) -> None:
    """By what they have."""
    config = parse_config(CONFIGS[model], weights=False)
    if refused is None:
        require_served(config, "mosaic")
        return
    with pytest.raises(NoGlueKernel, match=refused):
        require_served(config, "mosaic")


@pytest.mark.parametrize(
    ("model", "refused"), [("MiMo-V2-Flash/V2.5", "V of 128 numbers"), ("Llama-4-Scout", "interleaved pairs")]
)
def test_models_that_the_cpu_cannot_serve_are_refused(model: str, refused: str) -> None:
    """They run on XLA if nothing is named."""
    with pytest.raises(NoGlueKernel, match=refused):
        require_served(parse_config(CONFIGS[model], weights=False), "cpu")


def test_shared_kv_is_refused() -> None:
    """Such a layer has no K and V of its own."""
    attention = parse_config(CONFIGS["gemma-3-27b"], weights=False).layers[0].attention
    changes: dict[str, Any] = {"kv_from": 0}
    with pytest.raises(NoGlueKernel, match="kv_from"):
        heads_of(dataclasses.replace(attention, **changes))

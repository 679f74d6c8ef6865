"""Tests of the decoder on the elementwise kernels: how products are split, and which models it refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jswa.architecture import MlpConfig
from jswa.model.fused_products import hidden_of, linear_parts, parts_of
from jswa.model.fused_projection import heads_of, require_served
from jswa.model.hf.config import parse_config
from jswa.model.layers import Mlp
from jswa.model.routing import router_parts_of
from pallas_kernels.errors import NoElementwiseKernel
from pallas_kernels.experts.api import tiling_of
from pallas_kernels.experts.groups import Groups, list_one_group, list_tiles
from pallas_kernels.interpreter import interpreted, races_found
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
        (1, 5376, 8192, 1),  # XLA would write a product as large as the matrix
        (2, 5376, 8192, 4),
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


@pytest.mark.parametrize("tokens", [8, 24, 128, 12, 136])
def test_gates_and_ups_of_few_tokens_are_one_kernel(tokens: int) -> None:
    """With the numbers of XLA's product and activation; other numbers of tokens are XLA's own."""
    rng, config = np.random.default_rng(0), MlpConfig(192, "gelu_tanh", bias=True)
    mlp = Mlp(config, 128, jnp.dtype("bfloat16"))
    for name in ("gate_up", "gate_up_bias"):
        part = getattr(mlp, name)
        part[...] = jnp.asarray(rng.standard_normal(part.shape) / 8, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((tokens, 128)), jnp.bfloat16)
    one_kernel = tokens in (8, 24, 128)
    with interpreted(detect_races=True):
        found = np.asarray(hidden_of(mlp, x, None, "mosaic", None).astype(jnp.float32))
        assert not (one_kernel and races_found())
        names = str(jax.make_jaxpr(lambda x: hidden_of(mlp, x, None, "mosaic", None))(x))
    assert ("grouped_matmul" in names) == one_kernel
    wide = x.astype(jnp.float32) @ mlp.gate_up[...].astype(jnp.float32)
    assert mlp.gate_up_bias is not None
    wide += mlp.gate_up_bias[...].astype(jnp.float32)[None]
    right = jax.nn.gelu(wide[:, :192]) * wide[:, 192:]
    np.testing.assert_allclose(found, right, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("tokens", [8, 40, 128])
def test_the_tiles_of_one_group_are_a_constant(tokens: int) -> None:
    """That of `list_tiles`, whatever lies behind the last tile; the group is one tile, so weights are read once."""
    tiling = tiling_of(
        jnp.zeros((tokens, 128), jnp.float16), jnp.zeros((1, 128, 384), jnp.float16), None, None, "mosaic"
    )
    assert tiling is not None
    right = list_tiles(Groups(jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32)), tiling, tokens)
    found = list_one_group(tiling, tokens)
    assert found.shape == right.shape
    np.testing.assert_array_equal(found[:2], right[:2])


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
    with pytest.raises(NoElementwiseKernel, match=refused):
        require_served(config, "mosaic")


@pytest.mark.parametrize(
    ("width", "head_dim", "refused"),
    [(2880, 64, None), (100, 64, "100 columns"), (2880, 68, "head_dim = 68, 64 of it")],
)
def test_sizes_that_hopper_cannot_serve_are_refused(width: int, head_dim: int, refused: str | None) -> None:
    """Before anything is compiled."""
    model = parse_config(CONFIGS["gpt-oss-20b"], weights=False)
    layer = model.layers[0]
    attention = dataclasses.replace(layer.attention, head_dim=head_dim, v_head_dim=head_dim)
    model = dataclasses.replace(model, d_model=width, layers=(dataclasses.replace(layer, attention=attention),))
    if refused is None:
        require_served(model, "mosaic")
        return
    with pytest.raises(NoElementwiseKernel, match=refused):
        require_served(model, "mosaic")


@pytest.mark.parametrize(
    ("model", "refused"), [("MiMo-V2-Flash/V2.5", "V of 128 numbers"), ("Llama-4-Scout", "interleaved pairs")]
)
def test_models_that_the_cpu_cannot_serve_are_refused(model: str, refused: str) -> None:
    """They run on XLA if nothing is named."""
    with pytest.raises(NoElementwiseKernel, match=refused):
        require_served(parse_config(CONFIGS[model], weights=False), "cpu")


def test_shared_kv_is_refused() -> None:
    """Such a layer has no K and V of its own."""
    attention = parse_config(CONFIGS["gemma-3-27b"], weights=False).layers[0].attention
    changes: dict[str, Any] = {"kv_from": 0}
    with pytest.raises(NoElementwiseKernel, match="kv_from"):
        heads_of(dataclasses.replace(attention, **changes))


def test_norms_behind_the_rotation_are_refused() -> None:
    """The kernels norm q and k before they rotate them."""
    attention = parse_config(CONFIGS["gemma-3-27b"], weights=False).layers[0].attention
    with pytest.raises(NoElementwiseKernel, match="qk_norm_after_rope"):
        heads_of(dataclasses.replace(attention, qk_norm_after_rope=True))

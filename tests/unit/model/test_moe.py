"""Routers and mixtures of experts agree with a NumPy loop over tokens and experts."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Float, Int

from jswa.architecture import LayerConfig, MlpConfig, MoeConfig, Norm, RouterConfig, SideExperts
from jswa.forms.base.form import Form
from jswa.forms.mxfp4 import MXFP4, MXFP4_JOINED, MXFP4_TILES
from jswa.model.binding import bind, param_shapes
from jswa.model.moe import Moe
from jswa.model.routing import route
from jswa.model.transformer import Decoder
from pallas_kernels import interpreter
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import Mxfp4, joined, tiles, unpack
from tests.support.oracles import random_params, small_model

EXPERTS, WIDTH, HIDDEN = 8, 12, 10
FLOAT32 = jnp.dtype("float32")
ROUTERS = {
    "softmax": RouterConfig("softmax"),
    "softmax, normalised": RouterConfig("softmax", normalize=True),
    "sigmoid": RouterConfig("sigmoid"),
    "sigmoid, normalised, scaled": RouterConfig("sigmoid", normalize=True, eps=1e-20, scale=2.5),
    "sigmoid, a large eps": RouterConfig("sigmoid", normalize=True, eps=0.5),
    "sigmoid, selection bias": RouterConfig("sigmoid", selection_bias=True, normalize=True),
    "sigmoid, two of four groups": RouterConfig("sigmoid", groups=4, top_groups=2),
    "sigmoid, one of two groups, selection bias": RouterConfig("sigmoid", selection_bias=True, groups=2),
    "softmax, two of two groups": RouterConfig("softmax", groups=2, top_groups=2, normalize=True),
    "softmax of the chosen": RouterConfig("top_k_softmax"),
    "softmax of the chosen, scaled": RouterConfig("top_k_softmax", scale=0.5),
    "sigmoid of the chosen": RouterConfig("top_k_sigmoid"),
}


def sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return 1 / (1 + e^-x)."""
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return the softmax of one vector."""
    weight = np.exp(x - x.max())
    return np.asarray(weight / weight.sum())


def route_one(
    config: RouterConfig, logits: Float[np.ndarray, " E"], bias: Float[np.ndarray, " E"] | None, top_k: int
) -> tuple[list[int], Float[np.ndarray, " k"]]:
    """Return the experts of one token, best first, and their weights."""
    scores = logits
    if config.score in ("softmax", "sigmoid"):
        scores = (softmax if config.score == "softmax" else sigmoid)(logits)
    merit = scores if bias is None else scores + bias
    size = len(logits) // config.groups
    groups = [range(group * size, group * size + size) for group in range(config.groups)]
    groups.sort(key=lambda group: -sum(sorted(merit[list(group)])[-2:]))
    allowed = [e for group in groups[: config.top_groups] for e in group] if config.groups > 1 else range(len(logits))
    chosen = sorted(allowed, key=lambda e: (-merit[e], e))[:top_k]
    weights = scores[chosen]
    if config.score.startswith("top_k"):
        weights = (softmax if config.score == "top_k_softmax" else sigmoid)(weights)
    if config.normalize:
        weights = weights / (weights.sum() + config.eps)
    return chosen, weights * config.scale


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("router", list(ROUTERS.values()), ids=list(ROUTERS))
def test_the_selection_bias_changes_the_chosen_experts_but_not_their_weights(router: RouterConfig, top_k: int) -> None:
    """Experts are chosen by score plus selection bias within the best groups; weights come from the score alone."""
    rng = np.random.default_rng(top_k)
    logits = (2 * rng.standard_normal((40, EXPERTS))).astype(np.float32)
    bias = rng.standard_normal(EXPERTS).astype(np.float32) if router.selection_bias else None
    chosen, weights = route(router, jnp.asarray(logits), None if bias is None else jnp.asarray(bias), top_k)
    assert weights.dtype == FLOAT32
    changed = 0
    for token in range(len(logits)):
        expected, expected_weights = route_one(router, logits[token].astype(np.float64), bias, top_k)
        assert chosen[token].tolist() == expected
        np.testing.assert_allclose(weights[token], expected_weights, rtol=2e-6)
        plain = dataclasses.replace(router, groups=1)
        changed += route_one(plain, logits[token].astype(np.float64), None, top_k)[0] != expected
    assert (changed > 0) == (bias is not None or router.top_groups < router.groups), (
        "bias and groups made no difference"
    )


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softmax of the chosen", "sigmoid of the chosen"])
def test_ties_go_to_the_lowest_index(name: str) -> None:
    """Equal logits choose experts 0, 1 and 2, and normalized weights are equal."""
    router = dataclasses.replace(ROUTERS[name], normalize=True)
    chosen, weights = route(router, jnp.zeros((2, EXPERTS)), None, 3)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, np.full((2, 3), 1 / 3), rtol=1e-6)


def random_moe(config: MoeConfig, seed: int = 0) -> Moe:
    """Return a mixture with weights of unit gain and biases of about one half."""
    rng = np.random.default_rng(seed)
    moe = Moe(config, WIDTH, FLOAT32)
    parts = [getattr(moe, name) for name in ("router", "gate_up", "down", "gate_up_bias", "down_bias")]
    parts += [moe.router_bias, moe.selection_bias]
    parts += [moe.shared.gate_up, moe.shared.down] if moe.shared is not None else []
    for part in parts:
        if part is not None:
            scale = part.shape[-2] ** -0.5 if len(part.shape) > 1 and min(part.shape) >= EXPERTS else 0.5
            part[...] = jnp.asarray(scale * rng.standard_normal(part.shape), jnp.float32)
    return moe


def swiglu(gate_up: Float[np.ndarray, " n"], config: MoeConfig) -> Float[np.ndarray, " F"]:
    """Return the activation of one expert."""
    gate, up = np.split(gate_up, 2)
    if config.clamp is None:
        return np.asarray(gate * sigmoid(gate) * up)
    gate, up = np.minimum(gate, config.clamp), np.clip(up, -config.clamp, config.clamp)
    return np.asarray((up + 1) * gate * sigmoid(config.alpha * gate))


def dense_moe(moe: Moe, x: Float[np.ndarray, "T M"]) -> tuple[Float[np.ndarray, "T M"], Int[np.ndarray, " E"]]:
    """Return the float64 output of a loop over tokens and experts, and the number of tokens of each expert."""
    config = moe.config
    wide = {
        name: np.asarray(getattr(moe, name)[...], np.float64)
        for name in ("router", "gate_up", "down", "gate_up_bias", "down_bias", "router_bias", "selection_bias")
        if getattr(moe, name) is not None
    }
    out, counts = np.zeros(x.shape), np.zeros(config.num_experts, np.int32)
    for token, row in enumerate(x.astype(np.float64)):
        logits = row @ wide["router"] + wide.get("router_bias", 0.0)
        chosen, weights = route_one(config.router, logits, wide.get("selection_bias"), config.top_k)
        for expert, weight in zip(chosen, weights, strict=True):
            counts[expert] += 1
            gate_up = (weight * row if config.weight_on_input else row) @ wide["gate_up"][expert]
            if config.bias:
                gate_up = gate_up + wide["gate_up_bias"][expert]
            result = swiglu(gate_up, config) @ wide["down"][expert]
            if config.bias:
                result = result + wide["down_bias"][expert]
            out[token] += result if config.weight_on_input else weight * result
        if moe.shared is not None:
            hidden = row @ np.asarray(moe.shared.gate_up[...], np.float64)
            out[token] += swiglu(hidden, MOE) @ np.asarray(moe.shared.down[...], np.float64)
    return out, counts


MOE = MoeConfig(EXPERTS, 2, HIDDEN, "silu", RouterConfig("softmax", normalize=True))
MOES = {
    "plain": MOE,
    "biases and clamp": dataclasses.replace(
        MOE, router=RouterConfig("top_k_softmax", bias=True), bias=True, clamp=0.7, alpha=1.702
    ),
    "weight on the input, shared expert": dataclasses.replace(
        MOE, router=RouterConfig("top_k_sigmoid"), weight_on_input=True, shared=MlpConfig(6, "silu")
    ),
    "groups and selection bias": dataclasses.replace(
        MOE, router=RouterConfig("sigmoid", selection_bias=True, normalize=True, groups=2, top_groups=2, scale=1.5)
    ),
}


@pytest.mark.parametrize(("tokens", "top_k"), list(itertools.product((1, 5, 40), (1, 2, EXPERTS))))
@pytest.mark.parametrize("config", list(MOES.values()), ids=list(MOES))
def test_the_mixture_agrees_with_a_loop_over_tokens_and_experts(config: MoeConfig, tokens: int, top_k: int) -> None:
    """Cases have fewer tokens than experts, part-filled tiles, and several tiles of one expert."""
    moe = random_moe(dataclasses.replace(config, top_k=top_k), seed=tokens)
    x = np.random.default_rng(top_k).standard_normal((tokens, WIDTH)).astype(np.float32)
    expected, counts = dense_moe(moe, x)
    assert counts.sum() == tokens * top_k
    np.testing.assert_allclose(moe(jnp.asarray(x)), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("favourites", [(3,), (0, EXPERTS - 1), (2, 3, 4)])
def test_experts_without_tokens_are_never_read(favourites: tuple[int, ...], tokens: int) -> None:
    """All tokens go to a few experts, in full and part-filled tiles; NaN in other experts does not reach the output."""
    config = dataclasses.replace(MOE, top_k=len(favourites), router=RouterConfig("top_k_softmax", bias=True))
    moe = random_moe(config)
    idle = [expert for expert in range(EXPERTS) if expert not in favourites]
    assert moe.router_bias is not None
    moe.router_bias[...] = jnp.zeros(EXPERTS).at[jnp.array(favourites)].set(100.0)
    x = np.random.default_rng(tokens).standard_normal((tokens, WIDTH)).astype(np.float32)
    expected, counts = dense_moe(moe, x)
    assert counts.tolist() == [tokens * (expert in favourites) for expert in range(EXPERTS)]
    for part in (moe.gate_up, moe.down):
        assert isinstance(part, nnx.Param)
        part[...] = part[...].at[jnp.array(idle)].set(math.nan)
    np.testing.assert_allclose(moe(jnp.asarray(x)), expected, rtol=0, atol=2e-5)


def test_the_hopper_kernel_agrees_with_the_xla_loop() -> None:
    """Weights are bfloat16, and the kernel is simulated."""
    config = dataclasses.replace(MOES["biases and clamp"], hidden=64)
    model = dataclasses.replace(small_model("F", d_model=64), layers=(_layer(config),))
    half = {name: value.astype(jnp.bfloat16) for name, value in random_params(model).items()}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)), jnp.bfloat16)
    loop, kernel = (bind(model, half, experts=implementation).layers[0].mlp for implementation in ("xla", "mosaic"))
    expected = np.asarray(loop(x).astype(jnp.float32))
    with interpreter.interpreted(detect_races=True):
        out = np.asarray(kernel(x).astype(jnp.float32))
        assert not interpreter.races_found()
    np.testing.assert_allclose(out, expected, rtol=3e-2, atol=3e-2 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("implementation", "form"), [("xla", MXFP4), ("mosaic", MXFP4_TILES), ("mosaic_overlap", MXFP4_JOINED)]
)
def test_mxfp4_experts_agree_with_their_dequantized_weights(implementation: Implementation, form: Form) -> None:
    """`bind` recognizes MXFP4 by the names of the experts' parameters."""
    config = dataclasses.replace(MOES["biases and clamp"], hidden=64)
    model = dataclasses.replace(small_model("F", d_model=64), layers=(_layer(config),))
    plain = {name: value.astype(jnp.bfloat16) for name, value in random_params(model).items()}
    shapes = param_shapes(model, jnp.dtype("bfloat16"), form)
    packed = {name: plain[name] for name in shapes if name in plain}
    for name in ("layers.0.mlp.gate_up", "layers.0.mlp.down"):
        experts, inputs, columns = plain[name].shape
        rng = np.random.default_rng(0)
        blocks = jnp.asarray(rng.integers(0, 256, (experts, columns, inputs // 2), np.uint8))
        numbers = Mxfp4(blocks, jnp.full((experts, columns, inputs // 32), 122, jnp.uint8))
        plain[name] = unpack(numbers, jnp.dtype("bfloat16")).transpose(0, 2, 1)
        stored = numbers if form is MXFP4 else tiles(numbers)
        if form is MXFP4_JOINED:
            packed[f"{name}.joined"] = joined(tiles(numbers)).tiles
        else:
            packed |= {f"{name}.{field}": value for field, value in stored._asdict().items()}
    assert {name: (value.shape, value.dtype) for name, value in packed.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items()
    }
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)), jnp.bfloat16)
    expected = np.asarray(bind(model, plain).layers[0].mlp(x).astype(jnp.float32))
    with interpreter.interpreted():
        out = np.asarray(bind(model, packed, experts=implementation).layers[0].mlp(x).astype(jnp.float32))
    np.testing.assert_allclose(out, expected, rtol=3e-2, atol=3e-2 * np.abs(expected).max())


def test_bind_sets_the_implementation_of_every_mixture() -> None:
    """This includes experts beside a dense feed-forward; the default is "xla"."""
    norm = Norm(1e-6)
    side = SideExperts(MOE, norm, norm, norm)
    model = small_model("FF")
    layers = (_layer(MOE), dataclasses.replace(model.layers[1], side=side))
    model = dataclasses.replace(model, layers=layers)
    params = random_params(model)
    assert _implementations(bind(model, params)) == ["xla", "xla"]
    assert _implementations(bind(model, params, experts="mosaic")) == ["mosaic", "mosaic"]


def _layer(config: MoeConfig) -> LayerConfig:
    return dataclasses.replace(small_model("F").layers[0], mlp=config)


def _implementations(decoder: Decoder) -> list[str]:
    return [part.kernel.implementation for _, part in nnx.iter_modules(decoder) if isinstance(part, Moe)]

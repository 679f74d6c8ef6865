"""Tests of routing on Triton's kernels: the experts, rows and tiles of plain JAX.

Tests marked `triton` interpret the kernels: `make test-triton` runs them in .venv-gpu, because Triton takes 1 GB.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jswa.architecture import MoeConfig, RouterConfig
from jswa.model import moe
from jswa.model.routing import route
from pallas_kernels.errors import NoRoutingKernel
from pallas_kernels.experts.groups import Tiling, group_rows, list_tiles
from pallas_kernels.experts.routing import api
from pallas_kernels.experts.routing.arguments import Routed, Router, RouterWeights
from tests.support.kernels.device import hopper
from tools.cases.kernels.small.routing import CASES, GPT_OSS, Case, make_logits


def operands(case: Case, seed: int = 0) -> tuple[np.ndarray, RouterWeights]:
    """Return the parts of the logits, all but the last in eighths so that their sum is exact, and the weights."""
    rng = np.random.default_rng(seed)
    whole = make_logits(case.logits, case.tokens, case.experts, rng)
    parts = np.zeros((case.parts, *whole.shape), np.float32)
    parts[-1] = whole

    def numbers(wanted: bool) -> Any:
        return jnp.asarray(rng.uniform(0.5, 1.5, case.experts), jnp.float32) if wanted else None

    return parts, RouterWeights(numbers(case.bias), numbers(case.selection), numbers(case.scale))


def expected(case: Case, parts: Any, weights: RouterWeights) -> Routed:
    """Return the result of plain JAX."""
    router = case.router
    config = RouterConfig(
        router.score,
        logit_scale=router.factor,
        softcap=router.softcap or None,
        normalize=router.normalize,
        eps=router.eps,
        scale=router.scale,
    )
    logits = jnp.asarray(parts.sum(axis=0))
    if weights.bias is not None:
        logits += weights.bias[None]
    chosen, mass = route(config, logits, weights.selection, router.top_k)
    if weights.scale is not None:
        mass *= weights.scale[chosen]
    groups, rows, pair = group_rows(chosen, case.experts)
    tiles = tuple(list_tiles(groups, tiling, len(pair)) for tiling in case.tilings)
    return Routed(chosen, mass, groups, rows, pair, tiles)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.nightly) for case in CASES]
)
def test_routing_is_that_of_plain_jax(interpreter: Any, case: Case) -> None:
    """Every cell is written once, so no thread depends on another one's writes; a second run gives equal bits."""
    parts, weights = operands(case)
    found = api.route(jnp.asarray(parts), case.router, weights, case.tilings)
    right = jax.jit(partial(expected, case))(parts, weights)
    names = "chosen", "rows", "pair"
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)
    np.testing.assert_array_equal(found.groups, right.groups)
    np.testing.assert_allclose(found.weights, right.weights, rtol=1e-5, atol=1e-30)
    for own, other in zip(found.tiles, right.tiles, strict=True):
        count = int(other[0, 0])
        np.testing.assert_array_equal(own[: 1 + count], other[: 1 + count])
    assert found.inputs is None
    again = api.route(jnp.asarray(parts), case.router, weights, case.tilings)
    for first, second in zip(found[:2], again[:2], strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()
    assert set(interpreter.WRITES) >= {"rows", "pair", "starts", "sizes"}
    for name, count in interpreter.WRITES.items():
        assert (count == 1).all(), name


@pytest.mark.triton
@pytest.mark.parametrize("tokens", [8, 300])
def test_padding_has_the_experts_of_another_token(interpreter: Any, tokens: int) -> None:
    """In one kernel and in two: no expert is read that no other token chose."""
    parts, weights = operands(Case("", Router("top_k_softmax", 4), tokens, 32))
    last = tokens // 4
    stand_ins = jnp.where(jnp.arange(tokens) < last, jnp.arange(tokens), 1)
    found = api.route(jnp.asarray(parts), Router("top_k_softmax", 4), weights, (), None, stand_ins)
    alone = api.route(jnp.asarray(parts), Router("top_k_softmax", 4), weights)
    np.testing.assert_array_equal(found.chosen[:last], alone.chosen[:last])
    np.testing.assert_array_equal(found.chosen[last:], jnp.broadcast_to(alone.chosen[1], (tokens - last, 4)))
    np.testing.assert_array_equal(found.weights[:last], alone.weights[:last])
    used = np.flatnonzero(found.groups.sizes)
    assert set(used) == set(np.asarray(alone.chosen[:last]).ravel().tolist())


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "router"), [(70, 8, Router("softmax", 3)), (3, 16, Router("top_k_sigmoid", 1))]
)
def test_tokens_are_copied_to_the_rows_of_their_experts(
    interpreter: Any, tokens: int, experts: int, router: Router, scaled: bool
) -> None:
    """By several thread blocks, of which one writes the rest; every cell of a row that belongs to an expert, once."""
    parts, weights = operands(Case("", router, tokens, experts, parts=2))
    rng, tilings = np.random.default_rng(1), (Tiling(8, 80),)
    x = jnp.asarray(rng.standard_normal((tokens, 1_100)), jnp.bfloat16)
    found = api.route(jnp.asarray(parts), router, weights, tilings, x, scaled=scaled)
    plain = api.route(jnp.asarray(parts), router, weights, tilings)
    for own, other in zip(jax.tree.leaves(found[:6]), jax.tree.leaves(plain[:6]), strict=True):
        np.testing.assert_array_equal(own, other)
    assert found.inputs is not None
    right = jnp.broadcast_to(x[:, None], (tokens, router.top_k, 1_100))
    if scaled:
        right = right * found.weights.astype(x.dtype)[:, :, None]
    np.testing.assert_array_equal(found.inputs[found.rows].astype(jnp.float32), right.astype(jnp.float32))
    api.route(jnp.asarray(parts), router, weights, tilings, x, scaled=scaled)
    writes = dict(interpreter.WRITES)
    used = np.zeros(len(found.inputs), np.int64)
    used[np.asarray(found.rows).reshape(-1)] = 1
    assert (writes.pop("inputs").reshape(len(used), -1) == used[:, None]).all()
    assert all((count == 1).all() for count in writes.values())


@pytest.mark.triton
def test_parts_are_added_in_their_order(interpreter: Any) -> None:
    """In float32, in which the order changes a sum."""
    parts = np.array([1e8, -1e8, 1.0], np.float32)[:, None, None] * np.ones((3, 2, 4), np.float32)
    parts[:, :, 2] = np.array([1.0, 1e8, -1e8], np.float32)[:, None]
    found = api.route(jnp.asarray(parts), Router("top_k_sigmoid", 4), RouterWeights(), ())
    np.testing.assert_array_equal(found.chosen, [[0, 1, 3, 2]] * 2)


MIXTURE = MoeConfig(8, 2, 64, "silu", RouterConfig("top_k_softmax", bias=True), bias=True, clamp=0.7, alpha=1.702)


def mixture(config: MoeConfig, seed: int = 0, **kernel: Any) -> moe.Moe:
    """Return a mixture of width 64 with random weights."""
    rng, made = np.random.default_rng(seed), moe.Moe(config, 64, jnp.dtype("bfloat16"), moe.Experts(**kernel))
    for _, part in sorted(nnx.to_flat_state(nnx.state(made))):
        array = part[...]
        part[...] = jnp.asarray(0.3 * rng.standard_normal(array.shape), array.dtype)
    return made


@pytest.mark.triton
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="gpt-oss"),
        pytest.param(
            {"router": RouterConfig("top_k_sigmoid", expert_scale=True), "weight_on_input": True},
            id="weights on the input",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"router": RouterConfig("sigmoid", selection_bias=True, normalize=True, eps=1e-6), "bias": False},
            id="selection",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_mixture_is_that_of_plain_jax(interpreter: Any, changes: dict[str, Any]) -> None:
    """With its products on the interpreted Hopper kernel, which reads the lists of tiles."""
    config = dataclasses.replace(MIXTURE, **changes)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 64)), jnp.bfloat16)
    seen: list[Any] = []
    with hopper():
        found, right = (
            np.asarray(mixture(config, implementation="mosaic", routing=kernel)(x, routed=seen.append), np.float32)
            for kernel in ("triton", "xla")
        )
    np.testing.assert_array_equal(*seen)
    np.testing.assert_allclose(found, right, rtol=0, atol=2**-7 * np.abs(right).max())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"router": RouterConfig("sparsemixer")}, "sparsemixer"),
        ({"router": RouterConfig("sigmoid", groups=4, top_groups=2)}, "4 groups"),
        ({"devices": 2}, "2 devices"),
    ],
)
def test_mixtures_that_the_kernels_cannot_serve_are_refused(changes: dict[str, Any], named: str) -> None:
    """By what they have; nothing takes the kernels' place."""
    made = mixture(dataclasses.replace(MIXTURE, **changes), routing="triton")
    with pytest.raises(NoRoutingKernel, match=named):
        made(jnp.zeros((2, 64), jnp.bfloat16))


def test_what_the_kernels_cannot_serve_is_refused() -> None:
    """By type and number."""
    for parts, named in ((jnp.zeros((1, 2, 32), jnp.bfloat16), "bfloat16"), (jnp.zeros((1, 2, 3)), "3 experts")):
        with pytest.raises(NoRoutingKernel, match=named):
            api.route(parts, GPT_OSS, RouterWeights())
    with pytest.raises(ValueError, match="tilings"):
        api.route(jnp.zeros((1, 2, 32)), GPT_OSS, RouterWeights(), (Tiling(8, 4), Tiling(8, 4)))

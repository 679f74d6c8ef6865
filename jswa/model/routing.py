"""How a router chooses experts: on plain JAX, and as a mixture passes it to the kernel that does it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jswa.architecture import ModelConfig, RouterConfig
from jswa.model.fused_products import FEW_TOKENS, UNIT
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.elementwise.sums import apart, row_sums, softmax
from pallas_kernels.errors import NoRoutingKernel
from pallas_kernels.experts.routing.arguments import Router, require_held

Choice = tuple[Int[Array, "T k"], Float[Array, "T k"]]  # each token's experts, and their weights in float32
_ROUTER_PARTS, _ROUTER_NUMBERS = 32, 2_048  # parts, and parts times tokens, that one thread block adds


def router_parts_of(tokens: int, inputs: int) -> int:
    """Return into how many parts a router's product is split, whose few outputs one thread block computes.

    With parts of fewer inputs than two of XLA's, XLA does not split them again and add them in a kernel of its own.
    """
    if tokens > FEW_TOKENS or inputs % UNIT:
        return 1
    most = min(_ROUTER_PARTS, _ROUTER_NUMBERS // tokens, inputs // (2 * UNIT))
    return max((count for count in range(1, most + 1) if inputs // UNIT % count == 0), default=1)


def router_parts(x: Float[Array, "T M"], router: Float[Array, "M E"]) -> Float[Array, "S T E"]:
    """Return the router's product in float32, in parts if there are few tokens."""
    tokens, inputs = x.shape
    count = router_parts_of(tokens, inputs)
    split, pieces = x.reshape(tokens, count, -1), router.reshape(count, inputs // count, -1)
    return lax.dot_general(split, pieces, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.float32)


def router_of(config: RouterConfig, top_k: int) -> Router:
    """Return a router as the kernel knows it. Raises NoRoutingKernel if the kernel cannot serve it."""
    if config.score == "sparsemixer" or config.groups > 1:
        kind = config.score if config.groups == 1 else f"{config.groups} groups of experts"
        raise NoRoutingKernel(f"a router with {kind}: choose routing=xla for this model")
    return Router(
        config.score,
        top_k,
        factor=config.logit_scale,
        softcap=config.softcap or 0.0,
        normalize=config.normalize,
        eps=config.eps,
        scale=config.scale,
    )


def require_routed(model: ModelConfig) -> None:
    """Raise NoRoutingKernel if the kernel cannot serve a router of the model, with the reason."""
    for layer in model.layers:
        if layer.moe is not None:
            require_held(layer.moe.num_experts, router_of(layer.moe.router, layer.moe.top_k))


def route(
    config: RouterConfig,
    logits: Float[Array, "T E"],
    selection_bias: Float[Array, " E"] | None,
    top_k: int,
    sums: Sums = "xla",
) -> Choice:
    """Return the chosen experts and their weights."""
    logits = logits * config.logit_scale
    if config.softcap is not None:
        logits = config.softcap * apart(jnp.tanh(apart(logits / config.softcap, sums)), sums)
    if config.score == "sparsemixer":
        return _sparsemixer(config.jitter, logits, sums)
    if config.score == "softmax":
        scores = softmax(logits, sums)
    else:
        scores = apart(jax.nn.sigmoid(apart(logits, sums)), sums) if config.score == "sigmoid" else logits
    merit = scores if selection_bias is None else scores + selection_bias[None]
    if config.groups > 1:
        merit = _best_groups(config, merit)
    _, chosen = lax.top_k(merit, top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.score == "top_k_softmax":
        weights = softmax(weights, sums)
    if config.score == "top_k_sigmoid":
        weights = apart(jax.nn.sigmoid(apart(weights, sums)), sums)
    if config.normalize:
        weights = weights / (row_sums(weights, sums) + config.eps)
    return chosen, weights * config.scale


def _best_groups(config: RouterConfig, merit: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Return the scores, with -inf outside the best groups.

    A group is ranked by the sum of its two best scores (DeepSeek-V3).
    """
    grouped = merit.reshape(len(merit), config.groups, -1)
    best_two, _ = lax.top_k(grouped, 2)
    _, best = lax.top_k(best_two.sum(axis=-1), config.top_groups)
    inside = jax.nn.one_hot(best, config.groups, dtype=jnp.float32).sum(axis=1) > 0
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(merit.shape)


def _sparsemixer(jitter: float, logits: Float[Array, "T E"], sums: Sums) -> Choice:
    """Return the two best experts and their weights (Phi-3.5-MoE; SparseMixer, arXiv 2310.00811).

    The weight of each is its softmax over the experts near it: those with
    (best - logit) / max(|logit|, best) ≤ 2 · jitter. The second expert is chosen and weighted without the first.
    """
    chosen, weights, open_logits = [], [], logits
    for _ in range(2):
        best = open_logits.max(axis=-1, keepdims=True)
        choice = jnp.argmax(open_logits, axis=-1)
        near = (best - logits) / jnp.maximum(jnp.abs(logits), best) <= 2 * jitter
        scores = softmax(jnp.where(near, open_logits, -jnp.inf), sums)
        chosen.append(choice.astype(jnp.int32))
        weights.append(jnp.take_along_axis(scores, choice[:, None], axis=-1)[:, 0])
        open_logits = jnp.where(jax.nn.one_hot(choice, logits.shape[1], dtype=jnp.bool_), -jnp.inf, open_logits)
    return jnp.stack(chosen, axis=-1), jnp.stack(weights, axis=-1)

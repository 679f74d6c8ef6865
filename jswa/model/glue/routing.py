"""A router and its product, as a mixture passes them to the kernel that chooses experts."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jswa.architecture import RouterConfig
from jswa.model.glue.products import FEW_TOKENS, UNIT
from pallas_kernels.errors import NoRoutingKernel
from pallas_kernels.experts.routing.plan import Router

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
        raise NoRoutingKernel(f"a router with {kind}: routing_backend must be xla for this model")
    return Router(
        config.score,
        top_k,
        factor=config.logit_scale,
        softcap=config.softcap or 0.0,
        normalize=config.normalize,
        eps=config.eps,
        scale=config.scale,
    )

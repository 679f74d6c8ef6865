"""`route`: the experts of each token, their weights, and its rows in the order of experts, in one kernel or two.

Without it XLA runs some eleven small kernels between the router's product and the experts': the sum of the product's
parts, a sort, a softmax, the counting of `group_rows` and the lists of tiles of `grouped_matmul`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Routing
from pallas_kernels.errors import NoRoutingKernel
from pallas_kernels.experts.groups import Tiling
from pallas_kernels.experts.routing.arguments import Routed, Router, RouterWeights, require_held

Implementation = Routing

_MOST_TILINGS = 2  # of a mixture's two grouped products


def route(
    parts: Float[Array, "S T E"],
    router: Router,
    weights: RouterWeights,
    tilings: tuple[Tiling, ...] = (),
    x: Float[Array, "T M"] | None = None,
    stand_ins: Int[Array, " T"] | None = None,
    *,
    scaled: bool = False,
) -> Routed:
    """Choose the experts of each token, sort the pairs by expert, and cut the rows into tiles.

    The choice, the rows and the lists are those of plain JAX; weights differ by rounding. Equal inputs give equal bits.

    Args:
        parts: partial sums of the router's product, which are added in their order.
        tilings: of the grouped products, each once.
        x: what the experts read of each token. If one kernel does it all, it copies the tokens to their rows too, in
            several thread blocks, each of which routes for itself; two kernels leave that to the caller.
        stand_ins: by the scores of which token each is routed; None: its own. A token that is padding has the experts
            of one that is not, so that no weights are read for it alone.
        scaled: tokens are multiplied by their experts' weights, both in the type of x.

    Raises:
        NoRoutingKernel: the logits are not float32, or the kernel does not hold so many experts.
        ValueError: there are more than two tilings, or one of them twice.
        ImportError: jax-triton is not installed.
    """
    if parts.dtype != jnp.float32:
        raise NoRoutingKernel(f"logits of {parts.dtype}: routing=triton takes float32")
    require_held(parts.shape[2], router)
    if len(set(tilings)) != len(tilings) or len(tilings) > _MOST_TILINGS:
        raise ValueError(f"tilings = {tilings}: must be at most {_MOST_TILINGS}, each another")
    from pallas_kernels.experts.routing import call

    return call.route(parts, router, weights, tilings, x, stand_ins, scaled=scaled)

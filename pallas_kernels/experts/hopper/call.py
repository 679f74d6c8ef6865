"""The grouped matmul for Hopper in Pallas Mosaic GPU: make the list of tiles, run the kernel."""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import Groups, list_tiles
from pallas_kernels.experts.hopper import kernel
from pallas_kernels.experts.hopper.heuristics import default_tuning
from pallas_kernels.experts.hopper.launch import HopperWeights, Launch, Shape, Tuning, launch
from pallas_kernels.hopper import SMS


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: HopperWeights,
    groups: Groups,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
    tuning: Tuning | None = None,
    sms: int | None = None,
    tiles: Int[Array, "B 4"] | None = None,
    *,
    wide: bool = False,
) -> Float[Array, "R N"]:
    """See `api.grouped_matmul`. The grid and the length of the list of tiles are static; how many count is data.

    `wide`: the result has float32 in place of the type of x; then the tiles must have all rows, each once.

    Raises NoExpertKernel if the kernel cannot serve the shapes, and ValueError if the tuning does not fit them.
    """
    plan = plan_of(Shape.of(x, weights, bias, gated, wide=wide), sms, tuning)
    if tiles is None:
        tiles = list_tiles(groups, plan.tiling, plan.rows)
    out: Array = _run(plan, x, weights, tiles, bias)
    return out.T if wide else out


def plan_of(shape: Shape, sms: int | None = None, tuning: Tuning | None = None) -> Launch:
    """Return the launch for a shape. Raises ValueError if the tuning does not fit it."""
    return launch(shape, tuning or default_tuning(shape, sms or SMS))


@partial(jax.jit, static_argnames="plan", inline=False)
def _run(
    plan: Launch,
    x: Float[Array, "R K"],
    weights: HopperWeights,
    tiles: Int[Array, "B 4"],
    bias: Float[Array, "E C"] | None,
) -> Float[Array, "_ _"]:
    """Run the kernel. Jitted by itself, so that layers of one shape share one trace and hence one kernel."""
    run = mosaic.kernel(
        partial(kernel.body, plan),
        name="grouped_matmul",
        outputs=[((plan.outputs, plan.rows) if plan.wide else (plan.rows, plan.outputs), plan.out_dtype)],
        grid={"block": min(plan.blocks // plan.tuning.cluster, plan.most_tiles * plan.column_groups)},
        cluster=None if plan.cluster_axis is None else {plan.cluster_axis: plan.tuning.cluster},
        num_threads=plan.tuning.consumers + 1,
        scratch={"shared": kernel.scratch(plan)},
    )
    (out,) = run(x, tiles, *(() if bias is None else (bias,)), *jax.tree.leaves(weights))
    return out

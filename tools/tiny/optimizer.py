"""The optimizer (Muon for matrices, Adam for everything else) and the gradient of a batch on all cores."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jswa.architecture import ModelConfig
from jswa.model.binding import param_shapes
from jswa.model.transformer import Params
from tools.tiny.scores import token_losses

PEAK, ADAM_PEAK = 0.02, 3e-3  # highest learning rates of Muon and of Adam
WARM_UP, DECAY = 0.03, 0.6  # shares of the training steps

Step = Callable[[Params, Any, Int[Array, "B T+1"], Float[Array, "B T+1"], float], tuple[Params, Any, Array]]

ALL, SPLIT = PartitionSpec(), PartitionSpec("rows")  # type: ignore[no-untyped-call]


def optimizer(config: ModelConfig) -> optax.GradientTransformation:
    """Return Muon (Jordan et al., 2024) for all matrices but the embedding, and Adam for the rest."""
    shapes = param_shapes(config, jnp.dtype(jnp.float32))
    return muon({name for name, value in shapes.items() if len(value.shape) == 2 and name != "embed"})


def muon(matrices: Collection[str]) -> optax.GradientTransformation:
    """Return Muon for these matrices, and Adam for all other parameters; `learning_rate` scales the updates."""

    def dimensions(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {name: optax.contrib.MuonDimensionNumbers() if name in matrices else None for name in tree}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,
            adam_learning_rate=ADAM_PEAK / PEAK,
            adam_b1=0.9,
            adam_b2=0.98,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def learning_rate(progress: float) -> float:
    """Return the learning rate at `progress` in [0, 1]: linear warm-up, constant, then linear decay to 0."""
    return PEAK * min(1.0, (progress + 1e-3) / WARM_UP, (1 - progress) / DECAY)


@functools.lru_cache(maxsize=2)
def make_step(config: ModelConfig, rows: int) -> Step:
    """Return the jitted training step on `rows` rows; it takes the learning rate as an argument."""
    gradients, optimize = _gradients(config, rows), optimizer(config)

    def step(params: Params, state: Any, ids: Array, weights: Array, rate: float) -> tuple[Params, Any, Array]:
        loss, grads = gradients(params, ids, weights)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimize.update(grads, state, params)
            return {name: value + rate * updates[name] for name, value in params.items()}, state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def _gradients(config: ModelConfig, rows: int) -> Callable[[Params, Array, Array], tuple[Array, Params]]:
    """Return the function for the weighted mean loss and its gradient.

    The rows are split over the devices, and each device computes one row at a time. On a CPU a device is a core, and
    the activations of one row stay in its cache: several times faster than one program over all rows.
    """

    def row_loss(params: Params, ids: Array, weights: Array, total: Array) -> Array:
        return (token_losses(config, params, ids)[0] * weights[1:]).sum() / total

    row_gradient = jax.value_and_grad(row_loss)

    def share(params: Params, ids: Array, weights: Array) -> tuple[Array, Params]:
        total = _sum_of_devices(weights[:, 1:].sum())

        def add_row(so_far: tuple[Array, Params], row: tuple[Array, Array]) -> tuple[tuple[Array, Params], None]:
            return jax.tree.map(jnp.add, so_far, row_gradient(params, *row, total)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        mine, _ = jax.lax.scan(add_row, zero, (ids, weights))
        mean: tuple[Array, Params] = jax.tree.map(_sum_of_devices, mine)
        return mean

    return jax.shard_map(share, mesh=row_mesh(rows), in_specs=(ALL, SPLIT, SPLIT), out_specs=ALL, check_vma=False)


def _sum_of_devices(x: Array) -> Array:
    total: Array = jax.lax.psum(x, "rows")  # type: ignore[no-untyped-call]
    return total


def row_mesh(rows: int) -> Mesh:
    """Return a mesh of as many devices as divide a batch evenly."""
    return Mesh(np.array(jax.local_devices()[: math.gcd(rows, jax.local_device_count())]), ("rows",))

"""Checks of the experts' products: a few groups of rows, in every tuning of the steps."""

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jswa.architecture import ModelConfig, MoeConfig
from jswa.exec.selfcheck.cases import Case, CheckedEngine
from jswa.forms.base.form import MatrixPlace
from jswa.forms.table import matrix_at
from jswa.kernels import Kernels
from pallas_kernels.experts.api import grouped_matmul, variant
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups, row_count
from pallas_kernels.experts.stacks import stack_of

_GROUP_UNITS = 40  # of 8 rows: the largest group of an expert


def expert_cases(engine: CheckedEngine) -> Iterator[Case]:
    """Yield a check of experts in every tuning that the buckets lead to."""
    params, kernels = engine.params, engine.kernels
    seen: set[Hashable] = set()
    for owner, moe in _mixtures(engine.model):
        for matrix in ("gate_up", "down"):
            prefix = f"{owner}.{matrix}"
            weights = stack_of(matrix_at(MatrixPlace(prefix, (0, 0, 0)), params))  # its arrays tell its sizes
            bias = params.get(f"{prefix}_bias")
            unit = matrix == "gate_up" and f"{prefix}.lora_a" not in params  # what adapters add goes into the unit
            gated = Glu(moe.activation, moe.clamp, moe.alpha) if unit else None
            for bucket in engine.buckets:
                x: Any = jax.ShapeDtypeStruct((_rows(moe, bucket.tokens), weights.inputs), engine.dtype)  # type: ignore[no-untyped-call]
                key = _variant(x, weights, bias, gated, kernels)
                if (matrix, gated, key) in seen:
                    continue
                seen.add((matrix, gated, key))
                run = partial(_expert_results, x, weights, bias, gated, kernels)
                yield Case(f"expert kernel {kernels.experts!r}, {prefix}, {bucket.tokens} tokens", run)


def _mixtures(model: ModelConfig) -> Iterator[tuple[str, MoeConfig]]:
    """Yield the names of the mixtures of experts, and their configs."""
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoeConfig):
            yield f"layers.{index}.mlp", layer.mlp
        if layer.side is not None:
            yield f"layers.{index}.side.moe", layer.side.moe


def _rows(moe: MoeConfig, tokens: int) -> int:
    experts = moe.num_experts // moe.devices
    return row_count(tokens * moe.top_k, experts + (moe.devices > 1))


def _variant(x: jax.ShapeDtypeStruct, weights: Any, bias: Any, gated: Glu | None, kernels: Kernels) -> Hashable:
    """Return what tells the kernel of a call apart, from the shape of its input alone."""
    found = list[Hashable]()
    jax.eval_shape(lambda rows: found.append(variant(rows, weights, bias, gated, kernels.experts, kernels.sms)), x)
    return found[0]


def _expert_results(
    x: jax.ShapeDtypeStruct, weights: Any, bias: Array | None, gated: Glu | None, kernels: Kernels
) -> tuple[Array, Array]:
    """Return the results of an expert kernel and of XLA in float32, [R, N]: 0 for rows of no expert."""
    rows = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape, np.float32)).astype(x.dtype)
    arrays = jax.tree.leaves(weights)
    experts = arrays[0].shape[0]
    units = x.shape[0] // ALIGN
    # The first expert has one row, the last has five, and the one between them several tiles if there is room.
    sizes = np.zeros(experts, np.int32)
    sizes[0] = 1
    if units > 1 and experts > 1:
        sizes[-1] = 5
    if units > 2 and experts > 2:
        sizes[experts // 2] = ALIGN * min(units - 2, _GROUP_UNITS) - 3
    aligned = -(-sizes // ALIGN) * ALIGN
    starts = (np.cumsum(aligned) - aligned).astype(np.int32)
    groups, busy = Groups(jnp.asarray(starts), jnp.asarray(sizes)), np.flatnonzero(sizes)
    found = _multiply(rows, weights, groups, bias, gated, kernels)
    few: Any = jax.tree.map(lambda array: array[busy], weights)
    own = None if bias is None else bias[busy].astype(jnp.float32)
    wide = few.numbers()
    few_groups = Groups(groups.starts[busy], groups.sizes[busy])
    expected = _multiply(rows.astype(jnp.float32), wide, few_groups, own, gated, Kernels(experts="reference"))
    return found, expected


@partial(jax.jit, static_argnames=("gated", "kernels"))
def _multiply(
    x: Array, weights: Any, groups: Groups, bias: Array | None, gated: Glu | None, kernels: Kernels
) -> Float[Array, "R N"]:
    out = grouped_matmul(x, weights, groups, bias=bias, gated=gated, implementation=kernels.experts, sms=kernels.sms)
    row = jnp.arange(len(x))[:, None]
    mine = ((row >= groups.starts[None]) & (row < (groups.starts + groups.sizes)[None])).any(axis=1)
    return jnp.where(mine[:, None], out.astype(jnp.float32), 0.0)

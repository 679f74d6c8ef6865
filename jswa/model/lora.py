"""LoRA adapters beside a matrix (Hu et al. 2021, arXiv 2106.09685): one product for all adapters, masked by token.

An adapted matrix N [K, C] has three more parameters: N.lora_a [K, R], N.lora_b [R, C] and N.lora_owner [R]. R is the
sum of all adapters' ranks; column r of A and row r of B belong to adapter owner[r], numbered from 1. Each token's x·A
is masked to the columns of its own adapter and then multiplied by B: two dense products without a gather of weights.
They cost 2·R·(K + C) operations per token, which is little beside 2·K·C for a handful of adapters.
`jswa.model.weights.lora.files` reads adapters from disk.

A stack of experts' matrices N [E, K, C] has N.lora_a [E, K, R] and N.lora_b [E, R, C]: the same two products by the
kernel of the experts, whose rows are sorted by expert. So each expert's A and B are read once, whatever adapters its
rows have.

Room for adapters that are loaded later is columns of A and rows of B without an owner (owner -1, zeros). Each adapter
gets a slot, an equal share of them, and a number that no other adapter has had.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Shaped

from pallas_kernels.experts.api import HOPPER, Implementation, grouped_matmul
from pallas_kernels.experts.groups import Groups

HOPPER_UNIT = 64  # columns of a weight that Hopper's kernel multiplies at once
_A, _B, _OWNER = ".lora_a", ".lora_b", ".lora_owner"
# A and B of one adapter by matrix.
Pairs = Mapping[str, tuple[Shaped[np.ndarray, "*E K r"], Shaped[np.ndarray, "*E r C"]]]
AdapterIds = Int[Array, " T"]  # the adapter of each token; 0 for none


class Adapted(NamedTuple):
    """A matrix, or a stack of experts' matrices, and the adapters beside it."""

    base: Any
    a: Float[Array, "*E K R"]
    b: Float[Array, "*E R C"]
    owner: Int32[Array, " R"]


def with_adapters(name: str, held: Any, params: dict[str, Array]) -> Any:
    """Return the parameter `name` with the adapters that `params` has for it, if any."""
    if name + _A not in params:
        return held
    return Adapted(held, params[name + _A], params[name + _B], params[name + _OWNER])


def adapter_params[T](name: str, a: T, b: T, owner: T) -> dict[str, T]:
    """Return the parameters that adapt the matrix `name`: arrays or their shapes."""
    return {name + _A: a, name + _B: b, name + _OWNER: owner}


def unadapted(held: Any) -> Any:
    """Return what holds a parameter, without the adapters beside it."""
    return held.base if isinstance(held, Adapted) else held


def adapted_names(params: Iterable[str]) -> list[str]:
    """Return the names of the matrices that have adapters beside them."""
    return sorted(name.removesuffix(_OWNER) for name in params if name.endswith(_OWNER))


def has_adapters(params: Mapping[str, object]) -> bool:
    """Return whether any parameter belongs to an adapter."""
    return any(name.endswith(_OWNER) for name in params)


def without_adapters(params: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of the base model."""
    return {name: value for name, value in params.items() if not name.endswith((_A, _B, _OWNER))}


def lora_product(x: Float[Array, "T K"], matrix: Adapted, ids: AdapterIds) -> Float[Array, "T C"]:
    """Return what each token's adapter adds to x · base, in x's dtype; zeros for adapter 0."""
    # `where`, not `* 0`: another adapter's product may be inf, and inf * 0 is NaN.
    own = jnp.where(ids[:, None] == matrix.owner[None], x @ matrix.a, 0)
    return own @ matrix.b


def expert_lora_product(
    x: Float[Array, "R K"],
    stack: Adapted,
    ids: Int[Array, " R"],
    groups: Groups,
    implementation: Implementation,
    sms: int | None = None,
) -> Float[Array, "R C"]:
    """Return what each row's adapter adds to x · the matrix of its expert, in x's dtype; zeros for adapter 0.

    Args:
        x: rows, sorted by expert; those of no expert may hold anything, here and in the result.
        ids: the adapter of each row.
        implementation, sms: those of the experts' products; see `lora_kernel`.
    """
    by = lora_kernel(implementation, stack.a.shape[-1])
    found = grouped_matmul(x, stack.a, groups, implementation=by, sms=sms)
    own = jnp.where(ids[:, None] == stack.owner[None], found, 0)
    return grouped_matmul(own, stack.b, groups, implementation=by, sms=sms)


def lora_kernel(experts: Implementation, width: int) -> Implementation:
    """Return the implementation that multiplies by adapters of experts of `width` columns: their kernel if it can.

    The library for CPUs reads panels alone. The kernel for Hopper takes multiples of `HOPPER_UNIT` columns: adapters
    are laid out so for it (`lora_width`).
    """
    if experts == "cpu":
        return "xla"
    if experts in HOPPER:
        return "xla" if width % HOPPER_UNIT else "mosaic"
    return experts


def lora_width(width: int, experts: Implementation) -> int:
    """Return how many columns adapters of experts have that need `width`: columns without an owner fill up the last."""
    return -(-width // HOPPER_UNIT) * HOPPER_UNIT if experts in HOPPER else width

"""LoRA adapters beside a matrix (Hu et al. 2021, arXiv 2106.09685): one product for all adapters, masked by token.

An adapted matrix N [K, C] has three more parameters: N.lora_a [K, R], N.lora_b [R, C] and N.lora_owner [R]. R is the
sum of all adapters' ranks; column r of A and row r of B belong to adapter owner[r], numbered from 1. Each token's x·A
is masked to the columns of its own adapter and then multiplied by B: two dense products without a gather of weights.
They cost 2·R·(K + C) operations per token, which is little beside 2·K·C for a handful of adapters.
`jswa.model.weights.lora_files` reads adapters from disk.

Room for adapters that are loaded later is columns of A and rows of B without an owner (owner -1, zeros). Each adapter
gets a slot, an equal share of them, and a number that no other adapter has had.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Shaped

from jswa.forms.matrix import Matrix

_A, _B, _OWNER = ".lora_a", ".lora_b", ".lora_owner"
Pairs = Mapping[str, tuple[Shaped[np.ndarray, "K r"], Shaped[np.ndarray, "r C"]]]  # A and B of one adapter by matrix
AdapterIds = Int[Array, " T"]  # the adapter of each token; 0 for none


class Adapted(NamedTuple):
    """A matrix and the adapters beside it."""

    base: Array | Matrix
    a: Float[Array, "K R"]
    b: Float[Array, "R C"]
    owner: Int32[Array, " R"]


def with_adapters(name: str, held: Any, params: dict[str, Array]) -> Any:
    """Return the parameter `name` with the adapters that `params` has for it, if any."""
    if name + _A not in params:
        return held
    return Adapted(held, params[name + _A], params[name + _B], params[name + _OWNER])


def adapter_params[T](name: str, a: T, b: T, owner: T) -> dict[str, T]:
    """Return the parameters that adapt the matrix `name`: arrays or their shapes."""
    return {name + _A: a, name + _B: b, name + _OWNER: owner}


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

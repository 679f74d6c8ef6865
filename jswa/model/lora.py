"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) beside a matrix: all of them at once, masked by row.

An adapted matrix N [K, C] has three parameters more: N.lora_a [K, R], N.lora_b [R, C] and N.lora_owner [R], where R is
the sum of all adapters' ranks, and column r of A and row r of B belong to adapter owner[r], numbered from 1. Each token
gets x·A cut to the columns of its own adapter, times B: two dense products, nothing gathered, no weights per token.
They cost 2·R·(K + C) operations a token, little beside 2·K·C for a handful of adapters.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.quantized import Quantized

_A, _B, _OWNER = ".lora_a", ".lora_b", ".lora_owner"
Ids = Int[Array, " T"]  # the adapter of each token; 0: none


class Adapted(NamedTuple):
    """A matrix and its adapters."""

    base: Float[Array, "K C"] | Quantized
    a: Float[Array, "K R"]
    b: Float[Array, "R C"]
    owner: Int32[Array, " R"]


def with_adapters(name: str, base: Array | Quantized, params: dict[str, Array]) -> Array | Quantized | Adapted:
    """The matrix `name` with the adapters that the parameters have for it, if any."""
    if name + _A not in params:
        return base
    return Adapted(base, params[name + _A], params[name + _B], params[name + _OWNER])


def adapter_params[T](name: str, a: T, b: T, owner: T) -> dict[str, T]:
    """The parameters that adapt the matrix `name`: arrays, or their shapes."""
    return {name + _A: a, name + _B: b, name + _OWNER: owner}


def has_adapters(params: Mapping[str, object]) -> bool:
    """Whether any parameter belongs to adapters."""
    return any(name.endswith(_OWNER) for name in params)


def without_adapters(params: Mapping[str, Array]) -> dict[str, Array]:
    """The model's own parameters."""
    return {name: value for name, value in params.items() if not name.endswith((_A, _B, _OWNER))}


def low_rank(x: Float[Array, "T K"], matrix: Adapted, ids: Ids) -> Float[Array, "T C"]:
    """What each token's adapter adds to x · base; zeros for adapter 0. In x's type."""
    # A choice, not a product with 0: what another's adapter makes of a token may be infinite.
    own = jnp.where(ids[:, None] == matrix.owner[None], x @ matrix.a, 0)
    return own @ matrix.b

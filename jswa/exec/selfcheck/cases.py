"""What a check of a kernel is, and what it is made of."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.kernels import Kernels
from jswa.model.transformer import Params


class Case(NamedTuple):
    """A kernel's name for people, and a function that returns its result and XLA's.

    Of integers a few may differ: a sum that is rounded otherwise may choose another token.
    """

    kernel: str
    run: Callable[[], tuple[Num[Array, "..."], Num[Array, "..."]]]


class CheckedEngine(NamedTuple):
    """The engine whose kernels are checked.

    Attributes:
        model, params, layout: of one device's part.
        chosen: the buckets in which kernels are checked that have other code in other buckets.
        dtype: of the activations.
    """

    model: ModelConfig
    params: Params
    layout: KVLayout
    limits: Limits
    buckets: Sequence[Bucket]
    chosen: Sequence[Bucket]
    kernels: Kernels
    dtype: np.dtype
    kv_dtype: np.dtype


def widened(array: Array) -> Array:
    """Return numbers in float32, and integers as they are."""
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def normal(rng: np.random.Generator, *size: int) -> Float[Array, "..."]:
    """Return normally distributed numbers in float32."""
    return jnp.asarray(rng.standard_normal(size, np.float32))

"""Sampling masks in the jitted step: the token ids that constraints and limits leave of each draw."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jswa.model.collectives import psum, shard_start, sum_before
from jswa.ribs.hooks import Hooks
from jswa.ribs.sampling_mask.host import MASKED, NAME
from jswa.types import MAX_SAMPLING_MASK
from pallas_kernels.elementwise.sums import Implementation as Sums


class MaskRows(NamedTuple):
    """The ids of the tokens that may be drawn, ascending, and their number: after that many, ids are 0.

    If the number is larger than `most`, some ids are missing.
    """

    ids: Int[Array, "N most"]
    size: Int[Array, " N"]


def drawn(
    logits: Float[Array, "N V"],
    tokens: Int[Array, " N"],
    random: Bool[Array, " N"],
    limited: Callable[[], Float[Array, "N V"]],
    devices: int = 1,
    sums: Sums = "xla",
) -> MaskRows:
    """Return the tokens that may be drawn; of a greedy row its token. Arguments as of `hooks.Drawn`."""
    with jax.named_scope("sampling_mask"):
        most = min(MAX_SAMPLING_MASK, logits.shape[1] * devices)
        ids, count = listed(limited() > -jnp.inf, most, devices)
        greedy = jnp.zeros_like(ids).at[:, 0].set(jnp.maximum(tokens, 0))
        return MaskRows(jnp.where(random[:, None], ids, greedy), jnp.where(random, count, 1))


def listed(kept: Bool[Array, "N V"], most: int, devices: int) -> tuple[Int[Array, "N most"], Int[Array, " N"]]:
    """Return the columns of the first `most` tokens that are kept, in the vocabulary of all devices, and their number.

    kept       0 1 0 0 1 1
    so far     0 1 1 1 2 3      the n-th token is where n are first counted: a binary search for 1, 2, 3, …
    """
    so_far = jnp.cumsum(kept, axis=1, dtype=jnp.int32)
    own, wanted = so_far[:, -1], jnp.arange(1, most + 1, dtype=jnp.int32)
    before = sum_before(own, devices)
    columns = jax.vmap(lambda counts, first: jnp.searchsorted(counts, wanted - first))(so_far, before)
    here = (wanted[None] > before[:, None]) & (wanted[None] <= (before + own)[:, None])
    ids = jnp.where(here, columns.astype(jnp.int32) + shard_start(kept.shape[1], devices), 0)
    return psum(ids, devices), psum(own, devices)


HOOKS = {MASKED: Hooks({}, {NAME: drawn})}

"""A list of splits of keys that thread blocks share, made on the device, so that a long row costs its share.

A row's splits depend on its own length alone: `Tuning.split_keys` keys each, doubled until there are at most
`Tuning.most_splits`, and then made equal. So neither other rows nor the size of a step change a bit of a row's result,
and memory for the parts is bounded. The entries of the longest items come first, and those of an item lie side by side.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.hopper.launch import Launch

_TINY = 1e-30


class WorkList(NamedTuple):
    """The entries of a step. E is the most that its shapes allow; those from `used` on mean nothing.

    Attributes:
        entries: numbers of each entry: those of `refs.Item` in memory, then split, first block and blocks.
        used: number of entries in use.
        first: first entry of each item, by the item's index.
        splits: entries of each item, by the item's index; 0: dead.
    """

    entries: Int[Array, "E 9"]
    used: Int[Array, " 1"]
    first: Int[Array, " I"]
    splits: Int[Array, " I"]


def work_list(plan: Launch, items: Int[Array, "I 6"]) -> WorkList:
    """Return the list of items that are sorted by length. The list is the same for all layers of a kind."""
    block = plan.tuning.block
    first_block = items[:, 2] // block
    blocks = -(-items[:, 3] // block) - first_block
    share = _blocks_of_a_split(plan, blocks)
    splits = -(-blocks // share)
    ends = jnp.cumsum(splits, dtype=jnp.int32)
    first = ends - splits
    split = jnp.arange(plan.most_splits, dtype=jnp.int32)[None]
    begin = split * share[:, None]
    fields = [jnp.broadcast_to(items[:, field, None], begin.shape) for field in range(items.shape[1])]
    own = jnp.broadcast_to(split, begin.shape), first_block[:, None] + begin
    count = jnp.minimum(share[:, None], blocks[:, None] - begin)
    cells = jnp.stack([*fields, *own, count], axis=-1).reshape(plan.entries, -1)
    # Positions of splits that do not exist are distinct too, and dropped.
    unused = plan.entries + jnp.arange(plan.entries, dtype=jnp.int32)
    at = jnp.where(split < splits[:, None], first[:, None] + split, unused.reshape(begin.shape)).reshape(-1)
    entries = jnp.zeros_like(cells).at[at].set(cells, mode="drop", unique_indices=True)
    by_index = jnp.zeros((plan.items, 2), jnp.int32)
    by_index = by_index.at[items[:, 0]].set(jnp.stack([first, splits], axis=1), unique_indices=True)
    return WorkList(entries, ends[-1:], by_index[:, 0], by_index[:, 1])


def _blocks_of_a_split(plan: Launch, blocks: Int[Array, " I"]) -> Int[Array, " I"]:
    """Return the blocks of keys of each item's splits, which are equal but for the last."""
    share, most = plan.tuning.split_keys // plan.tuning.block, plan.tuning.most_splits
    out = jnp.full_like(blocks, share)
    while share * most < plan.most_blocks(plan.tuning.block, plan.chunk_queries):
        out = jnp.where(-(-blocks // out) > most, 2 * share, out)
        share *= 2
    splits = jnp.maximum(-(-blocks // out), 1)
    return jnp.maximum(-(-blocks // splits), 1)


class _Entries(NamedTuple):
    """The entries of each item, split by split: their index, whether they exist, and their logarithms."""

    at: list[Int[Array, " I"]]
    live: list[Bool[Array, "I 1 1"]]
    lse: list[Float[Array, "I K rows"]]

    @classmethod
    def of(cls, work: WorkList, most: int, lse: Float[Array, "E K rows"]) -> "_Entries":
        """Look up the entries; -inf stands for the logarithm of one that does not exist."""
        last = jnp.maximum(work.first + work.splits - 1, 0)
        at = [jnp.minimum(work.first + split, last) for split in range(most)]
        live = [(split < work.splits)[:, None, None] for split in range(most)]
        return cls(
            at, live, [jnp.where(is_live, lse[index], -jnp.inf) for index, is_live in zip(at, live, strict=True)]
        )

    def top(self) -> Float[Array, "I K rows"]:
        """Return the largest logarithm of each item; 0 for dead items."""
        top = self.lse[0]
        for own in self.lse[1:]:
            top = jnp.maximum(top, own)
        return jnp.where(self.live[0], top, 0.0)


def combine_entries(
    work: WorkList, most: int, parts: Float[Array, "E K rows V"], lse: Float[Array, "E K rows"]
) -> Float[Array, "I K rows V"]:
    """Return the softmax over all splits of each item; dead items get zeros.

    Splits are added one after another, so that the sum is the same in every program.

    Args:
        most: splits of an item at most.
        parts, lse: the softmax over each entry's keys, and the base-2 logarithm of its sum.
    """
    entries = _Entries.of(work, most, lse)
    top = entries.top()
    total, weight = jnp.zeros(()), jnp.zeros(())
    for index, is_live, own in zip(*entries, strict=True):
        share = jnp.exp2(own - top)
        weight = weight + share
        total = total + jnp.where(is_live[..., None], parts[index] * share[..., None], 0.0)
    out: Array = total / jnp.maximum(weight, _TINY)[..., None]
    return out


def combined_entries_lse(work: WorkList, most: int, lse: Float[Array, "E K rows"]) -> Float[Array, "I K rows"]:
    """Return the base-2 logarithm of the sum over all splits of each item; dead items get a very small one."""
    entries = _Entries.of(work, most, lse)
    top, weight = entries.top(), jnp.zeros(())
    for own in entries.lse:
        weight = weight + jnp.exp2(own - top)
    return top + jnp.log2(jnp.maximum(weight, _TINY))

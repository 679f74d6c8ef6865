"""Log probabilities of a drawn token, in the second Triton kernel of sampling. Importing this module imports Triton."""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_rows import INFINITY, LEAST, TINY


@triton.jit
@no_type_check
def write_logprobs(
    row: tl.tensor,
    scores: tl.tensor,  # the row's logits
    token: tl.tensor,
    raw_tops: tl.tensor,
    raw_masses: tl.tensor,
    chosen_logs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logs: tl.tensor,
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    SUBS_PAD: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Write the token's log probability under the model, its rank, and the most likely tokens with theirs.

    Only blocks whose largest logit is more likely than the token are read for its rank.
    """
    every = tl.arange(0, SUBS_PAD)
    tops = tl.load(raw_tops + row * SUBS + every, mask=every < SUBS, other=-INFINITY)
    masses = tl.load(raw_masses + row * SUBS + every, mask=every < SUBS, other=0.0)
    most = tl.maximum(tl.max(tops, axis=0), LEAST)
    log = tl.log(tl.maximum(tl.sum(masses * tl.exp(tops - most), axis=0), TINY))
    own = tl.load(scores + token) - most - log
    tl.store(chosen_logs + row, own)
    rank = 1
    for start in range(0, SUBS, TILE):
        subs = start + tl.arange(0, TILE)
        top = tl.load(raw_tops + row * SUBS + subs, mask=subs < SUBS, other=-INFINITY)
        near = (subs < SUBS) & (top - most - log > own)
        if tl.max(near.to(tl.int32), axis=0) > 0:
            columns = subs[:, None] * SUB + tl.arange(0, SUB)[None]
            x = tl.load(scores + columns, mask=(columns < VOCAB) & near[:, None], other=-INFINITY)
            rank += tl.sum(tl.sum((x - most - log > own).to(tl.int32), axis=1), axis=0)
    tl.store(ranks + row, rank)
    _write_top(row, scores, most, log, tops, top_ids, top_logs, VOCAB, SUBS, SUB, SUBS_PAD, TOP)


@triton.jit
@no_type_check
def _write_top(
    row: tl.tensor,
    scores: tl.tensor,
    most: tl.tensor,
    log: tl.tensor,
    tops: tl.tensor,
    top_ids: tl.tensor,
    top_logs: tl.tensor,
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    SUBS_PAD: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Write the TOP most likely tokens, one after the other: each is the first of the block with the largest logit.

    What is left of the block follows from the token: smaller logits, and equal ones in later columns.
    """
    subs = tl.arange(0, SUBS_PAD)
    taken = tl.full([SUBS_PAD], -1, tl.int32)  # the last column that was taken of each block with its largest logit
    for place in range(TOP):
        largest = tl.max(tops, axis=0)
        block = tl.minimum(tl.min(tl.where(tops == largest, subs, SUBS_PAD), axis=0), SUBS - 1)
        before = tl.max(tl.where(subs == block, taken, -1), axis=0)
        columns = block * SUB + tl.arange(0, SUB)
        x = tl.load(scores + columns, mask=columns < VOCAB, other=-INFINITY)
        token = tl.min(tl.where((x == largest) & (columns > before) & (columns < VOCAB), columns, VOCAB), axis=0)
        tl.store(top_ids + row * TOP + place, tl.minimum(token, VOCAB - 1))
        tl.store(top_logs + row * TOP + place, largest - most - log)
        left = (x < largest) | ((x == largest) & (columns > token))
        rest = tl.max(tl.where(left, x, -INFINITY), axis=0)
        tops = tl.where(subs == block, rest, tops)
        taken = tl.where(subs == block, tl.where(rest == largest, token, -1), taken)

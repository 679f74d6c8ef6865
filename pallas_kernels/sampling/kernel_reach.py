"""How far from the largest logit a token can be and still be drawn, from one number of each block of a row.

Importing this module imports Triton.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_rows import (
    COUNTED,
    FARTHEST,
    TEMPERATURE,
    TOP_N_SIGMA,
    TOP_P,
    noise,
    real,
    top_k_of,
)

_FARTHEST = tl.constexpr(110.0)  # exp(-104) is 0 in float32
_MOST_NOISE = tl.constexpr(15.95)  # -log(-log(1 - 2^-23)) is 15.942, the largest noise that jax.random draws


@triton.jit
@no_type_check
def free_reach(record: tl.tensor, distance: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Return the reach of a row without limits: with the most noise of all, a token beyond it loses.

    It loses against the best of the blocks' largest logits, which have these distances and columns.
    """
    return _MOST_NOISE - tl.max(noise(record, column) - distance, axis=0)


@triton.jit
@no_type_check
def sigma_floor(
    record: tl.tensor, moments: tl.tensor, most: tl.tensor, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr
) -> tl.tensor:
    """Return the largest distance that top-n-sigma keeps, from the moments of a row's chunks; see the first kernel."""
    chunks = tl.arange(0, CHUNKS_PAD)
    at, inside = moments + 4 * chunks, chunks < CHUNKS
    count = tl.load(at + 1, mask=inside, other=0.0)
    there = count > 0.0
    gap = most - tl.load(at, mask=there, other=0.0) + tl.load(at + 2, mask=there, other=0.0)
    gap = tl.where(there, tl.minimum(gap, FARTHEST), 0.0)
    total = tl.maximum(tl.sum(count, axis=0), 1.0)
    off = tl.where(there, gap - tl.sum(count * gap, axis=0) / total, 0.0)
    squares = tl.load(at + 3, mask=there, other=0.0) + count * off * off
    deviation = tl.sqrt(tl.sum(tl.where(there, squares, 0.0), axis=0) / total)
    return real(record, TOP_N_SIGMA) * deviation / real(record, TEMPERATURE)


@triton.jit
@no_type_check
def reach_of(
    record: tl.tensor,
    own: tl.tensor,
    floor: tl.tensor,
    distance: tl.tensor,
    mass: tl.tensor,
    total: tl.tensor,
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
) -> tl.tensor:
    """Return the reach of a row with limits. `distance` and `mass` are those of the blocks; see `floor_of`."""
    reach = floor
    if own == COUNTED:
        # k blocks have a token at this distance or nearer, each another one.
        wanted = top_k_of(record, VOCAB)
        if (wanted > 0) & (wanted <= SUBS):
            kth = _nearest(distance.to(tl.int32, bitcast=True), wanted).to(tl.float32, bitcast=True)
            reach = tl.minimum(kth, reach)
    else:
        # Of a block whose largest is within reach, no other token beyond it is more likely than one at the reach.
        reach = _nucleus_reach(distance, mass, (1.0 - real(record, TOP_P)) * total * 0.999, SUB)
    return reach


@triton.jit
@no_type_check
def near_blocks(
    near: tl.tensor, distance: tl.tensor, reach: tl.tensor, SUBS: tl.constexpr, SUBS_PAD: tl.constexpr
) -> tl.tensor:
    """List the blocks with a token within reach; return how many they are."""
    subs = tl.arange(0, SUBS_PAD)
    flags = ((distance <= reach) & (subs < SUBS)).to(tl.int32)
    tl.store(near + tl.cumsum(flags, axis=0) - 1, subs, mask=flags == 1)
    tl.debug_barrier()
    return tl.sum(flags, axis=0)


@triton.jit
@no_type_check
def _nucleus_reach(distance: tl.tensor, mass: tl.tensor, rest: tl.tensor, SUB: tl.constexpr) -> tl.tensor:
    """Return a distance beyond which the tokens of all blocks have no more than `rest` of the mass.

    The mass of a block is relative to its largest logit.
    """
    share = tl.exp(-distance)
    near, far = tl.zeros([], tl.float32), tl.full([], _FARTHEST, tl.float32)
    for _ in range(20):
        middle = 0.5 * (near + far)
        within = tl.minimum((mass - 1.0) * share, (SUB - 1) * tl.exp(-middle))
        enough = tl.sum(tl.where(distance > middle, mass * share, within), axis=0) <= rest
        far = tl.where(enough, middle, far)
        near = tl.where(enough, near, middle)
    return far


@triton.jit
@no_type_check
def _nearest(bits: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the smallest number that so many of the bits do not exceed."""
    found = tl.zeros([], tl.int32)
    for number in range(31):
        bit = 1 << (30 - number)
        count = tl.sum((bits <= (found | (bit - 1))).to(tl.int32), axis=0)
        found = tl.where(count >= wanted, found, found | bit)
    return found

"""Draws from a row that has more tokens within reach than the list holds. Importing this module imports Triton.

One thread block reads the row some twenty times. Such rows are rare: distributions that are nearly flat, and top-k of
thousands. It draws the same tokens as from a list.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_rows import (
    COUNTED,
    INFINITY,
    TEMPERATURE,
    TINY,
    TOP_P,
    better,
    distance_of,
    kind_of,
    noise,
    real,
    top_k_of,
)

_EVERY = tl.constexpr(0x7FFFFFFE)
_LINES = tl.constexpr(64)  # of 128 columns, which are read at a time: so many that memory is busy
_NOISY = tl.constexpr(32)  # the same where noise is computed, which takes registers


@triton.jit
@no_type_check
def draw_again(
    record: tl.tensor, scores: tl.tensor, most: tl.tensor, total: tl.tensor, floor: tl.tensor, VOCAB: tl.constexpr
) -> tuple:
    """Return a token, the reach of the limits, the mass within it, and the token's distance."""
    wanted, share = top_k_of(record, VOCAB), real(record, TOP_P)
    warmth = real(record, TEMPERATURE)
    edge, every = tl.full([], _EVERY, tl.int32), total
    if wanted > 0:
        edge = _edge_of_row(scores, most, warmth, floor, edge, wanted.to(tl.float32), True, VOCAB)
    if share < 1.0:
        if kind_of(record, VOCAB) == COUNTED:
            every = tl.zeros([], tl.float32)
            for start in range(0, VOCAB, _LINES * 128):
                distance = _distances(_read(scores, start, VOCAB, _LINES), most, warmth, floor)
                kept = distance.to(tl.int32, bitcast=True) <= edge
                every += _sum(tl.where(kept, tl.exp(-distance), 0.0))
        edge = _edge_of_row(scores, most, warmth, floor, edge, tl.maximum(share, TINY) * every, False, VOCAB)
    token, mass = tl.full([], VOCAB, tl.int32), tl.zeros([], tl.float32)
    its, best = tl.full([], INFINITY, tl.float32), tl.full([], -INFINITY, tl.float32)
    for start in range(0, VOCAB, _NOISY * 128):
        columns = start + tl.arange(0, _NOISY)[:, None] * 128 + tl.arange(0, 128)[None]
        distance = _distances(_read(scores, start, VOCAB, _NOISY), most, warmth, floor)
        kept = (columns < VOCAB) & (distance.to(tl.int32, bitcast=True) <= edge)
        mass += _sum(tl.where(kept, tl.exp(-distance), 0.0))
        score = tl.where(kept, noise(record, columns) - distance, -INFINITY)
        token, best, its = better(score, columns, distance, token, best, its)
    reach = tl.where(edge >= 0x7F800000, INFINITY, edge.to(tl.float32, bitcast=True))
    return token, tl.minimum(reach, floor), mass, its


@triton.jit
@no_type_check
def _edge_of_row(
    scores: tl.tensor,
    most: tl.tensor,
    warmth: tl.tensor,
    floor: tl.tensor,
    edge: tl.tensor,  # bits: no token beyond it counts
    goal: tl.tensor,
    COUNTS: tl.constexpr,  # a token weighs one; else exp(-distance)
    VOCAB: tl.constexpr,
) -> tl.tensor:
    """Return the bits of the smallest distance within which the tokens weigh as much as `goal`; at most `edge`.

    Each reading of the row finds two bits. What is read next is on its way while weights are added.
    """
    found = edge * 0
    for number in range(16):
        shift = 30 - 2 * number
        bit = 1 << shift
        one, two, three = tl.zeros([], tl.float32), tl.zeros([], tl.float32), tl.zeros([], tl.float32)
        x = _read(scores, 0, VOCAB, _LINES)
        for start in range(0, VOCAB, _LINES * 128):
            following = _read(scores, start + _LINES * 128, VOCAB, _LINES)
            distance = _distances(x, most, warmth, floor)
            bits = distance.to(tl.int32, bitcast=True)
            weight = tl.where(bits <= edge, 1.0 if COUNTS else tl.exp(-distance), 0.0)
            one += _sum(tl.where(bits <= (found | (bit - 1)), weight, 0.0))
            two += _sum(tl.where(bits <= (found | (2 * bit - 1)), weight, 0.0))
            three += _sum(tl.where(bits <= (found | (3 * bit - 1)), weight, 0.0))
            x = following
        # Of the first digit, whose highest bit is the sign's, all tokens are within the second number.
        digit = tl.where(three >= goal, 2, 3)
        digit = tl.where(two >= goal, 1, digit)
        digit = tl.where(one >= goal, 0, digit)
        found = found | (digit << shift)
    return tl.where((found < 0) | (found > edge), edge, found)


@triton.jit
@no_type_check
def _sum(weights: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(weights, axis=1), axis=0)


@triton.jit
@no_type_check
def _read(scores: tl.tensor, start: tl.tensor, VOCAB: tl.constexpr, LINES: tl.constexpr) -> tl.tensor:
    """Return logits from a column on; NaN past the vocabulary."""
    columns = start + tl.arange(0, LINES)[:, None] * 128 + tl.arange(0, 128)[None]
    return tl.load(scores + columns, mask=columns < VOCAB, other=float("nan"))


@triton.jit
@no_type_check
def _distances(x: tl.tensor, most: tl.tensor, warmth: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Return distances; those beyond the floor, and those past the vocabulary, are beyond every edge."""
    distance = distance_of(x, most, warmth)
    nowhere = tl.full(x.shape, 0x7FFFFFFF, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(distance <= floor, distance, nowhere)

"""Draws from a row that has more tokens within reach than the lists hold. Importing this module imports Triton.

One thread block reads the row some twenty times. Such rows are rare: distributions that are nearly flat, and top-k of
thousands. It draws the same tokens as from lists.
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
    floor_of,
    kind_of,
    noise,
    read,
    real,
    top_k_of,
)

_EVERY = tl.constexpr(0x7FFFFFFE)


@triton.jit
@no_type_check
def draw_again(
    record: tl.tensor,
    scores: tl.tensor,
    seen: tl.tensor,
    mask: tl.tensor,
    ahead: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
) -> tuple:
    """Return a token, the reach of the limits, the mass within it, and the token's distance."""
    floor, wanted, share = floor_of(record), top_k_of(record, VOCAB), real(record, TOP_P)
    edge, every = tl.full([], _EVERY, tl.int32), total
    if wanted > 0:
        edge = _edge_of_row(
            record, scores, seen, mask, ahead, bias_ids, bias, most, floor, edge, wanted.to(tl.float32), 0.0,
            VOCAB, CHUNKS, SUB, TILE, WORDS, PLACES, DRAFTS, BANS, BIASES,
        )  # fmt: skip
    if share < 1.0:
        if kind_of(record, VOCAB) == COUNTED:
            every = tl.zeros([], tl.float32)
            for chunk in range(CHUNKS):
                distance, _columns, inside = _distances(
                    record, scores, seen, mask, ahead, bias_ids, bias, most, chunk,
                    VOCAB, SUB, TILE, WORDS, PLACES, DRAFTS, BANS, BIASES,
                )  # fmt: skip
                kept = inside & (distance <= floor) & (distance.to(tl.int32, bitcast=True) <= edge)
                every += tl.sum(tl.sum(tl.where(kept, tl.exp(-distance), 0.0), axis=1), axis=0)
        goal, scale = tl.maximum(share, TINY), tl.where(every > 0.0, every, 1.0)
        edge = _edge_of_row(
            record, scores, seen, mask, ahead, bias_ids, bias, most, floor, edge, goal, scale,
            VOCAB, CHUNKS, SUB, TILE, WORDS, PLACES, DRAFTS, BANS, BIASES,
        )  # fmt: skip
    token, mass = tl.full([], VOCAB, tl.int32), tl.zeros([], tl.float32)
    its, best = tl.full([], INFINITY, tl.float32), tl.full([], -INFINITY, tl.float32)
    for chunk in range(CHUNKS):
        distance, columns, inside = _distances(
            record, scores, seen, mask, ahead, bias_ids, bias, most, chunk,
            VOCAB, SUB, TILE, WORDS, PLACES, DRAFTS, BANS, BIASES,
        )  # fmt: skip
        kept = inside & (distance <= floor) & (distance.to(tl.int32, bitcast=True) <= edge)
        mass += tl.sum(tl.sum(tl.where(kept, tl.exp(-distance), 0.0), axis=1), axis=0)
        score = tl.where(kept, noise(record, columns) - distance, -INFINITY)
        token, best, its = better(score, columns, distance, token, best, its)
    reach = tl.where(edge >= 0x7F800000, INFINITY, edge.to(tl.float32, bitcast=True))
    return token, tl.minimum(reach, floor), mass, its


@triton.jit
@no_type_check
def _edge_of_row(
    record: tl.tensor,
    scores: tl.tensor,
    seen: tl.tensor,
    mask: tl.tensor,
    ahead: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    most: tl.tensor,
    floor: tl.tensor,
    edge: tl.tensor,  # bits: no token beyond it counts
    goal: tl.tensor,
    scale: tl.tensor,  # a token weighs exp(-distance) / scale; 0: one
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
) -> tl.tensor:
    """Return the bits of the smallest distance within which the tokens weigh as much as `goal`; at most `edge`.

    Each reading of the row finds two bits.
    """
    found = edge * 0
    for number in range(16):
        shift = 30 - 2 * number
        bit = 1 << shift
        one = tl.zeros([TILE, SUB], tl.float32)
        two = tl.zeros([TILE, SUB], tl.float32)
        three = tl.zeros([TILE, SUB], tl.float32)
        for chunk in range(CHUNKS):
            distance, _columns, inside = _distances(
                record, scores, seen, mask, ahead, bias_ids, bias, most, chunk,
                VOCAB, SUB, TILE, WORDS, PLACES, DRAFTS, BANS, BIASES,
            )  # fmt: skip
            bits = distance.to(tl.int32, bitcast=True)
            weight = tl.where(scale > 0.0, tl.exp(-distance) / tl.where(scale > 0.0, scale, 1.0), 1.0)
            weight = tl.where(inside & (distance <= floor) & (bits <= edge), weight, 0.0)
            one += tl.where(bits <= (found | (bit - 1)), weight, 0.0)
            two += tl.where(bits <= (found | (2 * bit - 1)), weight, 0.0)
            three += tl.where(bits <= (found | (3 * bit - 1)), weight, 0.0)
        # Of the first digit, whose highest bit is the sign's, all tokens are within the second number.
        digit = tl.where(_sum(three) >= goal, 2, 3)
        digit = tl.where(_sum(two) >= goal, 1, digit)
        digit = tl.where(_sum(one) >= goal, 0, digit)
        found = found | (digit << shift)
    return tl.where((found < 0) | (found > edge), edge, found)


@triton.jit
@no_type_check
def _sum(weights: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(weights, axis=1), axis=0)


@triton.jit
@no_type_check
def _distances(
    record: tl.tensor,
    scores: tl.tensor,
    seen: tl.tensor,
    mask: tl.tensor,
    ahead: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    most: tl.tensor,
    chunk: tl.tensor,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
) -> tuple:
    """Return the distances of a chunk's tokens, their columns, and which of these there are."""
    columns = (chunk * TILE + tl.arange(0, TILE))[:, None] * SUB + tl.arange(0, SUB)[None]
    inside = columns < VOCAB
    x = read(
        record, scores, seen, mask, ahead, bias_ids, bias, chunk, columns, inside,
        VOCAB, TILE * SUB, WORDS, PLACES, DRAFTS, BANS, BIASES,
    )  # fmt: skip
    return distance_of(x, most, real(record, TEMPERATURE)), columns, inside

"""The second Triton kernel of sampling: it draws. Importing this module imports Triton.

It knows logits by their distance from the row's largest: d = (largest - logit) / temperature, in float32. A token with
a smaller distance is more likely. Distances are not negative, so their bits are in the same order as they.

    numbers of blocks  →  reach: no token that can be drawn is farther  →  near blocks, which alone are read again
    near blocks        →  list of the tokens within reach               →  edge of the limits  →  the best score

A token's score is its noise less its distance. If the list is too short, the row is read again (`kernel_again`). A row
without limits is drawn by several thread blocks, each with a part of the near blocks and a list of its own.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_again import draw_again
from pallas_kernels.sampling.kernel_logprobs import write_logprobs
from pallas_kernels.sampling.kernel_reach import free_reach, near_blocks, reach_of, sigma_floor
from pallas_kernels.sampling.kernel_rows import (
    DONE,
    FINITE,
    FREE,
    GREEDY,
    INFINITY,
    LEAST,
    NUCLEUS,
    TABLE,
    TEMPERATURE,
    TINY,
    TOP_N_SIGMA,
    TOP_P,
    better,
    distance_of,
    floor_of,
    kind_of,
    last_of,
    noise,
    real,
    top_k_of,
)

_EVERY = tl.constexpr(0x7FFFFFFE)  # an edge that no token is beyond


@triton.jit
@no_type_check
def draw(
    rows: tl.tensor,  # in and out [R, RECORD]; the thread blocks of a row are counted in it
    logits: tl.tensor,
    changed: tl.tensor,  # None: no row has constraints
    tops: tl.tensor,
    masses: tl.tensor,
    firsts: tl.tensor,
    finite: tl.tensor,
    moments: tl.tensor,
    raw_tops: tl.tensor,  # None: without log probabilities
    raw_masses: tl.tensor,
    near: tl.tensor,  # out [R, SUBS]: numbers of the near blocks
    distances: tl.tensor,  # out [R, SPLITS, LIST]
    tokens: tl.tensor,  # out [R, SPLITS, LIST]
    bests: tl.tensor,  # out [R, SPLITS, 2]: the best score of a part, and the distance of its token
    best_tokens: tl.tensor,  # out [R, SPLITS]
    drawn: tl.tensor,  # out [R]
    reaches: tl.tensor,  # out [R]
    kept: tl.tensor,  # out [R]
    chosen_logs: tl.tensor,  # out [R], or None, as all that follow
    drawn_logs: tl.tensor,  # out [R]
    ranks: tl.tensor,  # out [R]
    top_ids: tl.tensor,  # out [R, TOP]
    top_logs: tl.tensor,  # out [R, TOP]
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,  # thread blocks of a row, at most; a power of two
    RECORD: tl.constexpr,
    SUBS_PAD: tl.constexpr,  # powers of two
    CHUNKS_PAD: tl.constexpr,
    TOP: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    NONE_ALLOWED: tl.constexpr,
) -> None:
    """Draw the token of a row, or a part of a row without limits."""
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    record, part = rows + row * RECORD, row * splits + split
    own, last = kind_of(record, VOCAB), split == 0
    if last | (own == FREE):
        scores = logits + row.to(tl.int64) * VOCAB
        if changed is not None:  # noqa: SIM102 - Triton compiles both sides of an `and`
            if tl.load(record + TABLE) >= 0:
                scores = changed + row.to(tl.int64) * VOCAB
        subs = tl.arange(0, SUBS_PAD)
        top = tl.load(tops + row * SUBS + subs, mask=subs < SUBS, other=-INFINITY)
        largest = tl.max(top, axis=0)
        first = tl.minimum(tl.min(tl.where(top == largest, subs, SUBS_PAD), axis=0), SUBS - 1)
        token = tl.load(firsts + row * SUBS + first)
        reach, mass, its = tl.zeros([], tl.float32), tl.full([], 1.0, tl.float32), tl.zeros([], tl.float32)
        if own != GREEDY:
            most, warmth = tl.maximum(largest, LEAST), real(record, TEMPERATURE)
            block_distance = tl.where(subs < SUBS, distance_of(top, most, warmth), INFINITY)
            block_mass = tl.load(masses + row * SUBS + subs, mask=subs < SUBS, other=0.0)
            mass = tl.sum(block_mass * tl.exp(-block_distance), axis=0)
            if own == FREE:
                reach = tl.full([], INFINITY, tl.float32)
                token, its, last = _draw_free(
                    row, split, record, scores, block_distance, firsts, near, distances, tokens, bests, best_tokens,
                    most, warmth, VOCAB, SUBS, SUB, TILE, LIST, MOST_SPLITS, SUBS_PAD,
                )  # fmt: skip
            else:
                floor = floor_of(record)
                if real(record, TOP_N_SIGMA) > 0.0:
                    sigmas = sigma_floor(record, moments + row * CHUNKS * 4, most, CHUNKS, CHUNKS_PAD)
                    floor = tl.minimum(floor, sigmas)
                bound = reach_of(record, own, floor, block_distance, block_mass, mass, VOCAB, SUBS, SUB)
                count = near_blocks(near + row * SUBS, block_distance, bound, SUBS, SUBS_PAD)
                listed = _list(
                    scores, near + row * SUBS, count, distances + part * LIST, tokens + part * LIST,
                    most, warmth, bound, VOCAB, SUB, TILE, LIST,
                )  # fmt: skip
                token, reach, listed_mass, its, enough = _draw_listed(
                    record, own, floor, distances + part * LIST, tokens + part * LIST, listed, mass, VOCAB, LIST
                )
                if enough:
                    mass = listed_mass
                else:
                    token, reach, mass, its = draw_again(record, scores, most, mass, floor, VOCAB)
        if last:
            chunks = tl.arange(0, CHUNKS_PAD)
            whole = tl.min(tl.load(finite + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=1), axis=0)
            whole = (whole == 1) & (tl.load(record + FINITE) != 0)
            final = tl.where(largest > -INFINITY, token, NONE_ALLOWED)
            final = tl.where(whole, final, NOT_FINITE)
            tl.store(drawn + row, final)
            tl.store(reaches + row, reach)
            tl.store(kept + row, mass)
            if raw_tops is not None:
                tl.store(drawn_logs + row, tl.where(own == GREEDY, 0.0, -its - tl.log(tl.maximum(mass, TINY))))
                write_logprobs(
                    row, logits + row.to(tl.int64) * VOCAB, tl.maximum(final, 0), raw_tops, raw_masses,
                    chosen_logs, ranks, top_ids, top_logs, VOCAB, SUBS, SUB, TILE, SUBS_PAD, TOP,
                )  # fmt: skip


@triton.jit
@no_type_check
def _draw_free(
    row: tl.tensor,
    split: tl.tensor,
    record: tl.tensor,
    scores: tl.tensor,
    block_distance: tl.tensor,
    firsts: tl.tensor,
    near: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    bests: tl.tensor,
    best_tokens: tl.tensor,
    most: tl.tensor,
    warmth: tl.tensor,
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    SUBS_PAD: tl.constexpr,
) -> tuple:
    """Draw a part of a row without limits; return token, distance, and whether all parts are drawn.

    If they are, the token is that of the row.
    """
    subs, splits, last = tl.arange(0, SUBS_PAD), tl.num_programs(1), split == 0
    part = row * splits + split
    column = tl.load(firsts + row * SUBS + subs, mask=subs < SUBS, other=0)
    bound = free_reach(record, block_distance, column)
    count = near_blocks(near + row * SUBS, block_distance, bound, SUBS, SUBS_PAD)
    token, best, its = _best_near(
        record, scores, near + row * SUBS, count, distances + part * LIST, tokens + part * LIST,
        most, warmth, bound, split, splits, VOCAB, SUB, TILE, LIST,
    )  # fmt: skip
    if splits > 1:
        tl.store(bests + 2 * part, best)
        tl.store(bests + 2 * part + 1, its)
        tl.store(best_tokens + part, token)
        last = last_of(record + DONE, splits)
        if last:
            token, its = _best_of_parts(
                bests + 2 * row * splits, best_tokens + row * splits, splits, VOCAB, MOST_SPLITS
            )
    return token, its, last


@triton.jit
@no_type_check
def _near_distances(
    scores: tl.tensor,
    near: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    warmth: tl.tensor,
    reach: tl.tensor,
    group: tl.tensor,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple:
    """Return the distances of the tokens of TILE near blocks, their columns, and which of them are within reach."""
    slots = group * TILE + tl.arange(0, TILE)
    blocks = tl.load(near + slots, mask=slots < count, other=0)
    columns = blocks[:, None] * SUB + tl.arange(0, SUB)[None]
    inside = (slots < count)[:, None] & (columns < VOCAB)
    x = tl.load(scores + columns, mask=inside, other=-INFINITY)
    distance = distance_of(x, most, warmth)
    return distance, columns, inside & (distance <= reach)


@triton.jit
@no_type_check
def _append(
    distances: tl.tensor,
    tokens: tl.tensor,
    distance: tl.tensor,
    columns: tl.tensor,
    within: tl.tensor,
    size: tl.tensor,
    LIST: tl.constexpr,
) -> None:
    """Append the tokens within reach to a list that has `size`, as far as it holds them."""
    flags = within.to(tl.int32)
    in_block = tl.sum(flags, axis=1)
    before = tl.cumsum(in_block, axis=0) - in_block
    slot = size + before[:, None] + tl.cumsum(flags, axis=1) - 1
    fits = within & (slot < LIST)
    tl.store(distances + slot, distance, mask=fits)
    tl.store(tokens + slot, columns, mask=fits)


@triton.jit
@no_type_check
def _list(
    scores: tl.tensor,
    near: tl.tensor,
    count: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    most: tl.tensor,
    warmth: tl.tensor,
    reach: tl.tensor,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
) -> tl.tensor:
    """List the tokens within reach; return how many there are. If there are more than LIST, not all are counted."""
    size, group = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while (group * TILE < count) & (size <= LIST):
        distance, columns, within = _near_distances(scores, near, count, most, warmth, reach, group, VOCAB, SUB, TILE)
        _append(distances, tokens, distance, columns, within, size, LIST)
        size += tl.sum(tl.sum(within.to(tl.int32), axis=1), axis=0)
        group += 1
    tl.debug_barrier()
    return size


@triton.jit
@no_type_check
def _best_near(
    record: tl.tensor,
    scores: tl.tensor,
    near: tl.tensor,
    count: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    most: tl.tensor,
    warmth: tl.tensor,
    reach: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    VOCAB: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
) -> tuple:
    """Return the best token of a part of the near blocks, its score and its distance.

    Noise takes more time than all else. So it is computed of the list, and of blocks only if the list is full.
    """
    size, group = tl.zeros([], tl.int32), split
    token, best = tl.full([], VOCAB, tl.int32), tl.full([], -INFINITY, tl.float32)
    its = tl.full([], INFINITY, tl.float32)
    while group * TILE < count:
        distance, columns, within = _near_distances(scores, near, count, most, warmth, reach, group, VOCAB, SUB, TILE)
        found = tl.sum(tl.sum(within.to(tl.int32), axis=1), axis=0)
        if size + found <= LIST:
            _append(distances, tokens, distance, columns, within, size, LIST)
            size += found
        else:
            score = tl.where(within, noise(record, columns) - distance, -INFINITY)
            token, best, its = better(score, columns, distance, token, best, its)
        group += splits
    tl.debug_barrier()
    start = tl.zeros([], tl.int32)
    while start < size:
        slots = start + tl.arange(0, 8)[:, None] * 128 + tl.arange(0, 128)[None]
        some = tl.load(distances + slots, mask=slots < size, other=INFINITY)
        column = tl.load(tokens + slots, mask=slots < size, other=VOCAB)
        listed = tl.where(slots < size, noise(record, column) - some, -INFINITY)
        token, best, its = better(listed, column, some, token, best, its)
        start += 1024
    return token, best, its


@triton.jit
@no_type_check
def _best_of_parts(
    bests: tl.tensor, best_tokens: tl.tensor, splits: tl.tensor, VOCAB: tl.constexpr, MOST_SPLITS: tl.constexpr
) -> tuple:
    """Return the token with the best score of all parts of a row, and its distance."""
    parts = tl.arange(0, MOST_SPLITS)
    there = parts < splits
    score = tl.load(bests + 2 * parts, mask=there, other=-INFINITY, cache_modifier=".cg")
    column = tl.load(best_tokens + parts, mask=there, other=VOCAB, cache_modifier=".cg")
    distance = tl.load(bests + 2 * parts + 1, mask=there, other=INFINITY, cache_modifier=".cg")
    token = tl.min(tl.where(score == tl.max(score, axis=0), column, VOCAB), axis=0)
    return token, tl.min(tl.where(column == token, distance, INFINITY), axis=0)


@triton.jit
@no_type_check
def _draw_listed(
    record: tl.tensor,
    own: tl.tensor,
    floor: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    total: tl.tensor,
    VOCAB: tl.constexpr,
    LIST: tl.constexpr,
) -> tuple:
    """Draw from the list: return token, reach, mass, the token's distance, and whether the list has what is needed."""
    slots = tl.arange(0, LIST // 128)[:, None] * 128 + tl.arange(0, 128)[None]
    held = slots < size
    distance = tl.load(distances + slots, mask=held, other=INFINITY)
    bits = tl.where(held, distance.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    wanted, share, enough = top_k_of(record, VOCAB), real(record, TOP_P), size <= LIST
    edge = tl.full([], _EVERY, tl.int32)
    if enough & (wanted > 0):
        edge = _edge(bits, held.to(tl.float32), wanted.to(tl.float32))
    likely = tl.where(bits <= edge, tl.exp(-distance), 0.0)
    if enough & (share < 1.0):
        every = tl.sum(tl.sum(likely, axis=1), axis=0)
        if own == NUCLEUS:
            every = total
        nearest = _edge(bits, likely / tl.where(every > 0.0, every, 1.0), tl.maximum(share, TINY))
        if own == NUCLEUS:
            enough = enough & (nearest <= _EVERY)
        edge = tl.minimum(edge, nearest)
    mass = tl.sum(tl.sum(tl.where(bits <= edge, likely, 0.0), axis=1), axis=0)
    token, best = tl.full([], VOCAB, tl.int32), tl.full([], -INFINITY, tl.float32)
    its = tl.full([], INFINITY, tl.float32)
    if enough:
        column = tl.load(tokens + slots, mask=held, other=VOCAB)
        score = tl.where(held & (bits <= edge), noise(record, column) - distance, -INFINITY)
        token, best, its = better(score, column, distance, token, best, its)
    reach = tl.where(edge >= 0x7F800000, INFINITY, edge.to(tl.float32, bitcast=True))
    return token, tl.minimum(reach, floor), mass, its, enough


@triton.jit
@no_type_check
def _edge(bits: tl.tensor, weights: tl.tensor, goal: tl.tensor) -> tl.tensor:
    """Return the smallest number for which the tokens whose bits do not exceed it weigh as much as `goal`.

    2^31 - 1 if all of them weigh less.
    """
    found = tl.zeros([], tl.int32)
    for number in range(31):
        bit = 1 << (30 - number)
        weight = tl.sum(tl.sum(tl.where(bits <= (found | (bit - 1)), weights, 0.0), axis=1), axis=0)
        found = tl.where(weight >= goal, found, found | bit)
    return found

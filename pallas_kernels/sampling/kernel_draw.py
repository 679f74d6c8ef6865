"""The second Triton kernel of sampling: it draws. Importing this module imports Triton.

The blocks within reach are read again. Without limits, each thread block keeps the token with the best score, the noise
less the distance. With limits, the tokens of a chunk within reach go to a list of CAP, and the row's last thread block
looks for the limits' edge in these lists; if one of them is too short, it reads the row again (`kernel_again`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_again import draw_again
from pallas_kernels.sampling.kernel_logprobs import write_logprobs
from pallas_kernels.sampling.kernel_rows import (
    CHOICE,
    COUNTED,
    DONE,
    FINITE,
    FREE,
    GREEDY,
    INFINITY,
    MOST,
    NUCLEUS,
    NUMBERS,
    REACH,
    STATE,
    TEMPERATURE,
    TINY,
    TOP_P,
    TOTAL,
    better,
    distance_of,
    floor_of,
    kind_of,
    last_of,
    noise,
    read,
    real,
    top_k_of,
)

_EVERY = tl.constexpr(0x7FFFFFFE)  # an edge that no token is beyond
_SLOTS = tl.constexpr(8)  # of each chunk whose noise is computed at a time


@triton.jit
@no_type_check
def draw(
    rows: tl.tensor,  # in and out [R, RECORD]; the arrivals are counted in it
    logits: tl.tensor,
    seen: tl.tensor,  # None: no row has constraints; likewise the others of the tables
    mask: tl.tensor,
    ahead: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    choices: tl.tensor,
    raw_tops: tl.tensor,  # None: without log probabilities
    counts: tl.tensor,  # out [R, CHUNKS]: tokens within reach
    distances: tl.tensor,  # out [R, CHUNKS, CAP]: of the first CAP; without limits, the best score and its distance
    tokens: tl.tensor,  # out [R, CHUNKS, CAP]: their columns
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
    CAP: tl.constexpr,
    SPLITS: tl.constexpr,  # thread blocks of a row
    RECORD: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
    SUBS_PAD: tl.constexpr,  # powers of two
    CHUNKS_PAD: tl.constexpr,
    TOP: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    NONE_ALLOWED: tl.constexpr,
) -> None:
    """Read the chunks of a part of a row; the row's last thread block draws its token."""
    row, split = tl.program_id(0), tl.program_id(1)
    record = rows + row * RECORD
    scores = logits + row.to(tl.int64) * VOCAB
    own, last = kind_of(record, VOCAB), split == 0
    if own != GREEDY:
        for chunk in range(split, CHUNKS, SPLITS):
            _collect(
                row, record, scores, own, chunk, seen, mask, ahead, bias_ids, bias, tops, numbers,
                counts, distances, tokens,
                VOCAB, SUBS, CHUNKS, SUB, TILE, CAP, WORDS, PLACES, DRAFTS, BANS, BIASES,
            )  # fmt: skip
        if SPLITS > 1:
            last = last_of(record + DONE, SPLITS)
        else:
            tl.debug_barrier()
    if last:
        token, reach, mass, distance = tl.load(choices + row * 2 + CHOICE), 0.0, 1.0, 0.0
        if own == FREE:
            token, distance = _best_of_chunks(row, counts, distances, tokens, VOCAB, CHUNKS, CHUNKS_PAD, CAP)
            reach, mass = tl.full([], INFINITY, tl.float32), tl.load(numbers + row * NUMBERS + TOTAL)
        if own >= COUNTED:
            token, reach, mass, distance, enough = _draw_listed(
                row, record, own, numbers, counts, distances, tokens, VOCAB, CHUNKS, CHUNKS_PAD, CAP
            )
            if enough == 0:
                token, reach, mass, distance = draw_again(
                    record, scores, seen, mask, ahead, bias_ids, bias,
                    tl.load(numbers + row * NUMBERS + MOST), tl.load(numbers + row * NUMBERS + TOTAL),
                    VOCAB, 2 * CHUNKS, SUB, TILE // 2, WORDS, PLACES, DRAFTS, BANS, BIASES,
                )  # fmt: skip
        state = tl.load(choices + row * 2 + STATE)
        whole = (state % 2 == 1) & (tl.load(record + FINITE) != 0)
        final = tl.where(whole & (state >= 2), token, tl.where(whole, NONE_ALLOWED, NOT_FINITE))
        tl.store(drawn + row, final)
        tl.store(reaches + row, reach)
        tl.store(kept + row, mass)
        if raw_tops is not None:
            tl.store(drawn_logs + row, tl.where(own == GREEDY, 0.0, -distance - tl.log(tl.maximum(mass, TINY))))
            write_logprobs(
                row, scores, tl.maximum(final, 0), raw_tops, numbers, chosen_logs, ranks, top_ids, top_logs,
                VOCAB, SUBS, CHUNKS, SUB, TILE, SUBS_PAD, TOP,
            )  # fmt: skip


@triton.jit
@no_type_check
def _collect(
    row: tl.tensor,
    record: tl.tensor,
    scores: tl.tensor,
    own: tl.tensor,
    chunk: tl.tensor,
    seen: tl.tensor,
    mask: tl.tensor,
    ahead: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    tops: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
) -> None:
    """List the tokens of a chunk within reach, or the best of them if the row has no limits."""
    subs = chunk * TILE + tl.arange(0, TILE)
    most, farthest = tl.load(numbers + row * NUMBERS + MOST), tl.load(numbers + row * NUMBERS + REACH)
    warmth = real(record, TEMPERATURE)
    top = tl.load(tops + row * SUBS + subs, mask=subs < SUBS, other=-INFINITY)
    near = (subs < SUBS) & (distance_of(top, most, warmth) <= farthest)
    place = row * CHUNKS + chunk
    found = 0
    if tl.max(near.to(tl.int32), axis=0) > 0:
        columns = subs[:, None] * SUB + tl.arange(0, SUB)[None]
        inside = (columns < VOCAB) & near[:, None]
        x = read(
            record, scores, seen, mask, ahead, bias_ids, bias, chunk, columns, inside,
            VOCAB, TILE * SUB, WORDS, PLACES, DRAFTS, BANS, BIASES,
        )  # fmt: skip
        distance = distance_of(x, most, warmth)
        within = inside & (distance <= farthest)
        if own == FREE:
            score = tl.where(within, noise(record, columns) - distance, -INFINITY)
            best = tl.max(tl.max(score, axis=1), axis=0)
            first = tl.min(tl.min(tl.where(score == best, columns, VOCAB), axis=1), axis=0)
            its = tl.where(columns == first, distance, INFINITY)
            tl.store(distances + place * CAP, best)
            tl.store(distances + place * CAP + 1, tl.min(tl.min(its, axis=1), axis=0))
            tl.store(tokens + place * CAP, first)
            found = 1
        else:
            flags = within.to(tl.int32)
            in_block = tl.sum(flags, axis=1)
            before = tl.cumsum(in_block, axis=0) - in_block
            slot = before[:, None] + tl.cumsum(flags, axis=1) - 1
            fits = within & (slot < CAP)
            tl.store(distances + place * CAP + slot, distance, mask=fits)
            tl.store(tokens + place * CAP + slot, columns, mask=fits)
            found = tl.sum(in_block, axis=0)
    tl.store(counts + place, found)


@triton.jit
@no_type_check
def _best_of_chunks(
    row: tl.tensor,
    counts: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple:
    """Return the token with the best score of a row without limits, and its distance."""
    chunks = tl.arange(0, CHUNKS_PAD)
    place = row * CHUNKS + chunks
    count = tl.load(counts + place, mask=chunks < CHUNKS, other=0, cache_modifier=".cg")
    score = tl.load(distances + place * CAP, mask=count > 0, other=-INFINITY, cache_modifier=".cg")
    column = tl.load(tokens + place * CAP, mask=count > 0, other=VOCAB, cache_modifier=".cg")
    token = tl.min(tl.where(score == tl.max(score, axis=0), column, VOCAB), axis=0)
    distance = tl.load(distances + place * CAP + 1, mask=count > 0, other=INFINITY, cache_modifier=".cg")
    return token, tl.min(tl.where(column == token, distance, INFINITY), axis=0)


@triton.jit
@no_type_check
def _draw_listed(
    row: tl.tensor,
    record: tl.tensor,
    own: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple:
    """Draw from the lists: return token, reach, mass, the token's distance, and 1 if the lists hold what is needed."""
    chunks = tl.arange(0, CHUNKS_PAD)
    place = row * CHUNKS + chunks
    count = tl.load(counts + place, mask=chunks < CHUNKS, other=0, cache_modifier=".cg")
    enough = (tl.max(count, axis=0) <= CAP).to(tl.int32)
    slots = tl.arange(0, CAP)
    held = slots[None] < tl.minimum(count, CAP)[:, None]
    at = place[:, None] * CAP + slots[None]
    distance = tl.load(distances + at, mask=held, other=INFINITY, cache_modifier=".cg")
    bits = tl.where(held, distance.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    wanted, share = top_k_of(record, VOCAB), real(record, TOP_P)
    edge = tl.full([], _EVERY, tl.int32)
    if wanted > 0:
        edge = _edge(bits, held.to(tl.float32), wanted.to(tl.float32))
    likely = tl.where(held & (bits <= edge), tl.exp(-distance), 0.0)
    if share < 1.0:
        every = tl.sum(tl.sum(likely, axis=1), axis=0)
        if own == NUCLEUS:
            every = tl.load(numbers + row * NUMBERS + TOTAL)
        nearest = _edge(bits, likely / tl.where(every > 0.0, every, 1.0), tl.maximum(share, TINY))
        if own == NUCLEUS:
            enough = enough & (nearest <= _EVERY).to(tl.int32)
        edge = tl.minimum(edge, nearest)
    mass = tl.sum(tl.sum(tl.where(bits <= edge, likely, 0.0), axis=1), axis=0)
    token, best = tl.full([], VOCAB, tl.int32), tl.full([], -INFINITY, tl.float32)
    its = tl.full([], INFINITY, tl.float32)
    for start in range(0, CAP, _SLOTS):  # a part after the other, since noise takes many registers
        few = start + tl.arange(0, _SLOTS)
        there = few[None] < tl.minimum(count, CAP)[:, None]
        line = place[:, None] * CAP + few[None]
        own_distance = tl.load(distances + line, mask=there, other=INFINITY, cache_modifier=".cg")
        column = tl.load(tokens + line, mask=there, other=VOCAB, cache_modifier=".cg")
        kept = there & (own_distance.to(tl.int32, bitcast=True) <= edge)
        score = tl.where(kept, noise(record, column) - own_distance, -INFINITY)
        token, best, its = better(score, column, own_distance, token, best, its)
    reach = tl.where(edge >= 0x7F800000, INFINITY, edge.to(tl.float32, bitcast=True))
    return token, tl.minimum(reach, floor_of(record)), mass, its, enough


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

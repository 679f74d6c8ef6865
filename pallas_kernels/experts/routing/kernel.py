"""The Triton kernels of routing. Importing this module imports Triton.

A thread block holds the scores of its tokens, [TOKENS, EXPERTS], in registers. Experts are chosen one after the other:
the best score of each token, as an integer in the same order, is replaced by the least integer, which marks what is
chosen. An expert's pairs are in the order of their tokens, so the row of a pair is the first row of its expert plus the
number of earlier tokens that chose it: a cumulative sum over the marks. Every cell of every output is written by one
thread alone, so nothing depends on their order.

With many tokens `choose` writes marks and counts by blocks of tokens, and `place` gives every pair its row; with few,
`route` does both in one thread block, or in each of those that share out the copies of tokens (`copies`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.experts.routing.copies import copy_tokens

SOFTMAX, SIGMOID, TOP_K_SOFTMAX, TOP_K_SIGMOID = (tl.constexpr(score) for score in range(4))
_INFINITY = tl.constexpr(float("inf"))
_TAKEN = tl.constexpr(-(2**31))  # no number has it: the integer of -inf is larger
_ALIGN = tl.constexpr(8)  # of `groups`

# no_type_check: Triton compiles the source of these functions, and cannot compile the checks that tests add to it.


@triton.jit
@no_type_check
def route(
    parts: tl.tensor,  # [S, T, E]
    bias: tl.tensor,  # [E] or None, as the next two
    selection: tl.tensor,
    scale: tl.tensor,
    stand_ins: tl.tensor,  # [T] or None: by the scores of which token each is routed
    x: tl.tensor,  # [T, M] or None
    chosen: tl.tensor,  # out [T, k]
    weights: tl.tensor,  # out [T, k]
    starts: tl.tensor,  # out [E]
    sizes: tl.tensor,  # out [E]
    rows: tl.tensor,  # out [T, k]
    pair: tl.tensor,  # out [R]
    tiles: tl.tensor,  # out [B, 4] or None, as the next one
    more_tiles: tl.tensor,
    inputs: tl.tensor,  # out [R, M] or None, with x
    PARTS: tl.constexpr,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile
    MOST: tl.constexpr,  # tiles at most
    MORE_TILE: tl.constexpr,
    MORE_MOST: tl.constexpr,
    TOKENS: tl.constexpr,  # powers of two, as the next three
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TAIL: tl.constexpr,  # rows behind the last group, at most
    AT_ONCE: tl.constexpr,  # tiles of a list
    BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,  # whether `inputs` are multiplied by the weights
    COLUMNS: tl.constexpr,  # of a row that are copied at once
) -> None:
    """Route all tokens in one thread block. Several do the same: the first one writes, all share out the copies."""
    block, tokens = tl.program_id(0), tl.arange(0, TOKENS)
    count = tl.where(block == 0, T, 0)
    which, mark, found = _choose(
        *(parts, bias, selection, scale, stand_ins, chosen, weights, tokens, count),
        *(PARTS, T, E, K, SCORE, FACTOR, SOFTCAP, NORMALIZE, EPS, SCALE, EXPERTS, CHOICES),
    )
    size = tl.sum(mark, axis=0)
    start = _starts(size)
    row = _place(rows, pair, tokens, which, mark, start, count, K, EXPERTS, CHOICES)
    if block == 0:
        _fill(starts, sizes, pair, start, size, E, R, EXPERTS, TAIL)
        if tiles is not None:
            _list(tiles, start, size, 0, 1, E, R, TILE, MOST, EXPERTS, AT_ONCE)
        if more_tiles is not None:
            _list(more_tiles, start, size, 0, 1, E, R, MORE_TILE, MORE_MOST, EXPERTS, AT_ONCE)
    if x is not None:
        copy_tokens(x, inputs, tokens, row, found, block, T, K, M, CHOICES, BLOCKS, SCALED, COLUMNS)


@triton.jit
@no_type_check
def choose(
    parts: tl.tensor,
    bias: tl.tensor,
    selection: tl.tensor,
    scale: tl.tensor,
    stand_ins: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    counts: tl.tensor,  # out [BLOCKS, E]: pairs of each expert
    PARTS: tl.constexpr,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    """Choose the experts of a block of tokens."""
    block = tl.program_id(0)
    _, mark, _ = _choose(
        *(parts, bias, selection, scale, stand_ins, chosen, weights, block * TOKENS + tl.arange(0, TOKENS), T),
        *(PARTS, T, E, K, SCORE, FACTOR, SOFTCAP, NORMALIZE, EPS, SCALE, EXPERTS, CHOICES),
    )
    experts = tl.arange(0, EXPERTS)
    tl.store(counts + block * E + experts, tl.sum(mark, axis=0), mask=experts < E)


@triton.jit
@no_type_check
def place(
    chosen: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    sizes: tl.tensor,
    rows: tl.tensor,
    pair: tl.tensor,
    tiles: tl.tensor,
    more_tiles: tl.tensor,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    MORE_TILE: tl.constexpr,
    MORE_MOST: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TAIL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Give the pairs of a block of tokens their rows. The blocks share the lists of tiles."""
    block = tl.program_id(0)
    experts, slots = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    size = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, BLOCKS, 16):
        blocks = first + tl.arange(0, 16)
        inside = (blocks < BLOCKS)[:, None] & (experts < E)[None]
        count = tl.load(counts + blocks[:, None] * E + experts[None], mask=inside, other=0)
        size += tl.sum(count, axis=0)
        before += tl.sum(tl.where((blocks < block)[:, None], count, 0), axis=0)
    start = _starts(size)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    held = (tokens < T)[:, None] & (slots < K)[None]
    which = tl.load(chosen + tokens[:, None] * K + slots[None], mask=held, other=EXPERTS)
    mark = tl.zeros([TOKENS, EXPERTS], tl.int32)
    for j in range(K):
        own = tl.load(chosen + tokens * K + j, mask=tokens < T, other=EXPERTS)
        mark += (experts[None] == own[:, None]).to(tl.int32)
    _place(rows, pair, tokens, which, mark, start + before, T, K, EXPERTS, CHOICES)
    if block == 0:
        _fill(starts, sizes, pair, start, size, E, R, EXPERTS, TAIL)
    if tiles is not None:
        _list(tiles, start, size, block, BLOCKS, E, R, TILE, MOST, EXPERTS, AT_ONCE)
    if more_tiles is not None:
        _list(more_tiles, start, size, block, BLOCKS, E, R, MORE_TILE, MORE_MOST, EXPERTS, AT_ONCE)


@triton.jit
@no_type_check
def _choose(
    parts: tl.tensor,
    bias: tl.tensor,
    selection: tl.tensor,
    scale: tl.tensor,
    stand_ins: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,  # tokens, from the first on, that this thread block writes
    PARTS: tl.constexpr,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> tuple:
    """Write experts and weights of tokens.

    Return the experts [TOKENS, CHOICES], 1 for each chosen expert, and the weights.
    """
    experts, slots = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    inside = (tokens < T)[:, None] & (experts < E)[None]
    source = tokens
    if stand_ins is not None:
        source = tl.load(stand_ins + tokens, mask=tokens < T, other=0)
    at = parts + source[:, None] * E + experts[None]
    scores = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        scores += tl.load(at + part * T * E, mask=inside, other=0.0)
    if bias is not None:
        scores += tl.load(bias + experts, mask=experts < E, other=0.0).to(tl.float32)[None]
    scores = _scored(scores, inside, SCORE, FACTOR, SOFTCAP)
    merit = scores
    if selection is not None:
        merit = scores + tl.load(selection + experts, mask=experts < E, other=0.0).to(tl.float32)[None]
    key = tl.where(inside, _ordered(merit), _TAKEN)
    which = tl.full([tokens.shape[0], CHOICES], EXPERTS, tl.int32)
    found = tl.zeros([tokens.shape[0], CHOICES], tl.float32)
    for j in range(K):
        best = tl.max(key, axis=1)
        first = tl.where((key == best[:, None]) & (key > _TAKEN), experts[None], EXPERTS)
        own = tl.min(first, axis=1)
        here = experts[None] == own[:, None]
        score = tl.sum(tl.where(here, scores, 0.0), axis=1)
        which = tl.where(slots[None] == j, own[:, None], which)
        found = tl.where(slots[None] == j, score[:, None], found)
        key = tl.where(here, _TAKEN, key)
    held = (tokens < T)[:, None] & (slots < K)[None]
    found = _weighed(found, slots[None] < K, SCORE, NORMALIZE, EPS, SCALE)
    if scale is not None:
        found *= tl.load(scale + which, mask=held, other=0.0).to(tl.float32)
    place_of = tokens[:, None] * K + slots[None]
    own = (tokens < count)[:, None] & (slots < K)[None]
    tl.store(chosen + place_of, which, mask=own)
    tl.store(weights + place_of, found, mask=own)
    return which, (inside & (key == _TAKEN)).to(tl.int32), found


@triton.jit
@no_type_check
def _scored(
    logits: tl.tensor, inside: tl.tensor, SCORE: tl.constexpr, FACTOR: tl.constexpr, SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Return the scores by which experts are ranked."""
    logits = logits * FACTOR
    if SOFTCAP > 0.0:
        logits = SOFTCAP * (1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.div_rn(logits, SOFTCAP)) + 1.0))
    if SCORE == SIGMOID:
        logits = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    if SCORE == SOFTMAX:
        masked = tl.where(inside, logits, -_INFINITY)
        top = tl.max(masked, axis=1)
        likely = tl.where(inside, tl.exp(masked - top[:, None]), 0.0)
        logits = tl.div_rn(likely, tl.sum(likely, axis=1)[:, None])
    return logits


@triton.jit
@no_type_check
def _weighed(
    found: tl.tensor,
    held: tl.tensor,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
) -> tl.tensor:
    """Return the weights of the chosen experts from their scores."""
    if SCORE == TOP_K_SOFTMAX:
        masked = tl.where(held, found, -_INFINITY)
        likely = tl.where(held, tl.exp(masked - tl.max(masked, axis=1)[:, None]), 0.0)
        found = tl.div_rn(likely, tl.sum(likely, axis=1)[:, None])
    if SCORE == TOP_K_SIGMOID:
        found = tl.div_rn(1.0, 1.0 + tl.exp(-found))
    if NORMALIZE:
        found = tl.div_rn(found, tl.sum(tl.where(held, found, 0.0), axis=1)[:, None] + EPS)
    return found * SCALE


@triton.jit
@no_type_check
def _ordered(numbers: tl.tensor) -> tl.tensor:
    """Return integers in the order of the numbers. NaN is the largest, so that it reaches the weights."""
    bits = numbers.to(tl.int32, bitcast=True)
    return tl.where(numbers == numbers, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
@no_type_check
def _starts(size: tl.tensor) -> tl.tensor:
    """Return the first row of each expert."""
    aligned = (size + (_ALIGN - 1)) // _ALIGN * _ALIGN
    return tl.cumsum(aligned, axis=0) - aligned


@triton.jit
@no_type_check
def _place(
    rows: tl.tensor,
    pair: tl.tensor,
    tokens: tl.tensor,
    which: tl.tensor,  # [TOKENS, CHOICES]; EXPERTS where there is none
    mark: tl.tensor,  # [TOKENS, EXPERTS]
    first: tl.tensor,  # [EXPERTS]: row of these tokens' first pair of each expert
    count: tl.tensor,  # tokens, from the first on, that this thread block writes
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> tl.tensor:
    """Write the row of each pair, and the pair of each such row. Return the rows [TOKENS, CHOICES]."""
    slots = tl.arange(0, CHOICES)
    row_of = first[None] + tl.cumsum(mark, axis=0) - mark
    row = tl.gather(row_of, tl.minimum(which, EXPERTS - 1), axis=1)
    own = (tokens < count)[:, None] & (slots < K)[None]
    number = tokens[:, None] * K + slots[None]
    tl.store(rows + number, row, mask=own)
    tl.store(pair + row, number, mask=own)
    return row


@triton.jit
@no_type_check
def _fill(
    starts: tl.tensor,
    sizes: tl.tensor,
    pair: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    E: tl.constexpr,
    R: tl.constexpr,
    EXPERTS: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Write the groups, and pair 0 for the rows that belong to no expert."""
    experts = tl.arange(0, EXPERTS)
    tl.store(starts + experts, start, mask=experts < E)
    tl.store(sizes + experts, size, mask=experts < E)
    spare = tl.arange(0, 8)[None] + (start + size)[:, None]
    end = start + (size + (_ALIGN - 1)) // _ALIGN * _ALIGN
    tl.store(pair + spare, tl.zeros_like(spare), mask=spare < end[:, None])
    tail = tl.max(end, axis=0) + tl.arange(0, TAIL)
    tl.store(pair + tail, tl.zeros_like(tail), mask=tail < R)


@triton.jit
@no_type_check
def _list(
    tiles: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    block: tl.tensor,
    BLOCKS: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    EXPERTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Write this block's share of a list of tiles: see `groups.list_tiles`."""
    experts, fields = tl.arange(0, EXPERTS), tl.arange(0, 4)
    count = (size + (TILE - 1)) // TILE
    ends = tl.cumsum(count, axis=0)
    if block == 0:
        tl.store(tiles + fields, tl.where(fields == 0, tl.sum(count, axis=0), 0))
    for first in range(block * AT_ONCE, MOST, BLOCKS * AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        expert = tl.minimum(tl.sum((ends[None] <= index[:, None]).to(tl.int32), axis=1), E - 1)
        here = experts[None] == expert[:, None]
        begin = tl.sum(tl.where(here, (ends - count)[None], 0), axis=1)
        own_start = tl.sum(tl.where(here, start[None], 0), axis=1) + (index - begin) * TILE
        left = tl.sum(tl.where(here, size[None], 0), axis=1) - (index - begin) * TILE
        at = tl.minimum(own_start, R - TILE)
        own = tl.minimum(TILE, (left + (_ALIGN - 1)) // _ALIGN * _ALIGN)
        entry, inside = tiles + 4 * (1 + index), index < MOST
        tl.store(entry, expert, mask=inside)
        tl.store(entry + 1, at, mask=inside)
        tl.store(entry + 2, own_start - at, mask=inside)
        tl.store(entry + 3, own, mask=inside)

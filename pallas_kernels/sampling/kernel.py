"""The Triton kernels of sampling. Importing this module imports Triton.

All of them know logits by their distance from the row's largest: d = (largest - logit) / temperature, in float32. A
token with a smaller distance is more likely. Distances are not negative, so their bits are in the same order as they.

The largest logit of each block of SUB columns tells where likely tokens can be (`plan`), so that the second reading
reads these blocks alone (`collect`), and the search for the limits' thresholds and the noise are left to a few numbers
(`choose`). Noise is jax.random's: threefry2x32 (Salmon et al. 2011) of the column under the row's key.
"""

from typing import no_type_check

import triton
import triton.language as tl

GREEDY, FREE, COUNTED, NUCLEUS = (tl.constexpr(kind) for kind in range(4))
_FARTHEST = tl.constexpr(110.0)  # exp(-104) is 0 in float32
_TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
_INFINITY = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(-3.4028234663852886e38)

# no_type_check: Triton compiles the source of these functions, and cannot compile the checks that tests add to it.


@triton.jit
@no_type_check
def scan(
    logits: tl.tensor,  # [R, V]
    kind: tl.tensor,  # [R]
    temperature: tl.tensor,  # [R]
    tops: tl.tensor,  # out [R, SUBS]: largest of each block
    masses: tl.tensor,  # out [R, SUBS]: sum of exp((logit - top) / temperature); of rows with top-p alone
    finite: tl.tensor,  # out [R, CHUNKS]: 1 if all numbers are
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Read TILE blocks of a row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    subs = chunk * TILE + tl.arange(0, TILE)
    columns = subs[:, None] * SUB + tl.arange(0, SUB)[None]
    inside = columns < VOCAB
    x = tl.load(logits + row.to(tl.int64) * VOCAB + columns, mask=inside, other=-_INFINITY)
    top = tl.max(x, axis=1)
    tl.store(tops + row * SUBS + subs, top, mask=subs < SUBS)
    whole = (tl.abs(x) < _INFINITY) | ~inside
    tl.store(finite + row * CHUNKS + chunk, tl.min(tl.min(whole.to(tl.int32), axis=1), axis=0))
    if tl.load(kind + row) == NUCLEUS:
        safe = tl.where(top > -_INFINITY, top, 0.0)
        mass = tl.sum(tl.exp((x - safe[:, None]) / tl.load(temperature + row)), axis=1)
        tl.store(masses + row * SUBS + subs, mass, mask=subs < SUBS)


@triton.jit
@no_type_check
def plan(
    logits: tl.tensor,
    kind: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,  # [R]: 0: off
    top_p: tl.tensor,  # [R]
    floor: tl.tensor,  # [R]: the distance that min-p allows
    tops: tl.tensor,
    masses: tl.tensor,
    finite: tl.tensor,
    most: tl.tensor,  # out [R]: the largest logit, or the least float32
    greedy: tl.tensor,  # out [R]: its first column
    state: tl.tensor,  # out [R]: 1 if all logits are finite, plus 2 if any is more than -inf
    reach: tl.tensor,  # out [R]: no token at a larger distance can be drawn
    total: tl.tensor,  # out [R]: sum of exp(-d) of all tokens; of rows with top-p alone
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    SUBS_PAD: tl.constexpr,  # powers of two
    CHUNKS_PAD: tl.constexpr,
    FREE_REACH: tl.constexpr,  # how much noise can add to one token and take from another
) -> None:
    """Find the largest logit of a row, and how far the tokens that can be drawn are from it at most."""
    row = tl.program_id(0)
    subs = tl.arange(0, SUBS_PAD)
    top = tl.load(tops + row * SUBS + subs, mask=subs < SUBS, other=-_INFINITY)
    largest = tl.max(top, axis=0)
    first = tl.minimum(tl.min(tl.where(top == largest, subs, SUBS_PAD), axis=0), SUBS - 1)
    columns = first * SUB + tl.arange(0, SUB)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + columns, mask=columns < VOCAB, other=-_INFINITY)
    tl.store(greedy + row, tl.min(tl.where((x == largest) & (columns < VOCAB), columns, VOCAB - 1), axis=0))
    chunks = tl.arange(0, CHUNKS_PAD)
    whole = tl.min(tl.load(finite + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=1), axis=0)
    tl.store(state + row, whole + 2 * (largest > -_INFINITY).to(tl.int32))
    largest = tl.maximum(largest, _LEAST)
    tl.store(most + row, largest)
    own, warmth = tl.load(kind + row), tl.load(temperature + row)
    if own == FREE:
        tl.store(reach + row, FREE_REACH)
    if own >= COUNTED:
        distance = tl.where(subs < SUBS, tl.div_rn(largest - top, warmth), _INFINITY)
        if own == COUNTED:
            # k blocks have a token at this distance or nearer, each another one.
            wanted = tl.load(top_k + row)
            bits = distance.to(tl.int32, bitcast=True)
            kth = _INFINITY
            if (wanted > 0) & (wanted <= SUBS):
                kth = _nearest(bits, wanted).to(tl.float32, bitcast=True)
            tl.store(reach + row, tl.minimum(kth, tl.load(floor + row)))
        else:
            # Of a block whose largest is within reach, no other token beyond it is more likely than one at the reach.
            mass = tl.load(masses + row * SUBS + subs, mask=subs < SUBS, other=0.0)
            share = tl.exp(-distance)
            every = tl.sum(mass * share, axis=0)
            rest = (1.0 - tl.load(top_p + row)) * every * 0.999
            tl.store(reach + row, _nucleus_reach(distance, mass, share, rest, SUB))
            tl.store(total + row, every)


@triton.jit
@no_type_check
def collect(
    logits: tl.tensor,
    kind: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,  # [R, 2]: of the draw at the row's position
    tops: tl.tensor,
    most: tl.tensor,
    reach: tl.tensor,
    counts: tl.tensor,  # out [R, CHUNKS]: tokens within reach
    distances: tl.tensor,  # out [R, CHUNKS, CAP]: of the first CAP; without limits, the best score
    tokens: tl.tensor,  # out [R, CHUNKS, CAP]: their columns
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """Read the blocks of a chunk that have a token within reach."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    own = tl.load(kind + row)
    if own != GREEDY:
        subs = chunk * TILE + tl.arange(0, TILE)
        largest, warmth, farthest = tl.load(most + row), tl.load(temperature + row), tl.load(reach + row)
        top = tl.load(tops + row * SUBS + subs, mask=subs < SUBS, other=-_INFINITY)
        near = (subs < SUBS) & (tl.div_rn(largest - top, warmth) <= farthest)
        place = row * CHUNKS + chunk
        found = 0
        if tl.max(near.to(tl.int32), axis=0) > 0:
            columns = subs[:, None] * SUB + tl.arange(0, SUB)[None]
            inside = (columns < VOCAB) & near[:, None]
            x = tl.load(logits + row.to(tl.int64) * VOCAB + columns, mask=inside, other=-_INFINITY)
            distance = tl.div_rn(largest - x, warmth)
            kept = inside & (distance <= farthest)
            if own == FREE:
                score = tl.where(kept, _noise(keys, row, columns) - distance, -_INFINITY)
                best = tl.max(tl.max(score, axis=1), axis=0)
                first = tl.min(tl.min(tl.where(score == best, columns, VOCAB), axis=1), axis=0)
                tl.store(distances + place * CAP, best)
                tl.store(tokens + place * CAP, first)
                found = 1
            else:
                flags = kept.to(tl.int32)
                in_block = tl.sum(flags, axis=1)
                before = tl.cumsum(in_block, axis=0) - in_block
                slot = before[:, None] + tl.cumsum(flags, axis=1) - 1
                fits = kept & (slot < CAP)
                tl.store(distances + place * CAP + slot, distance, mask=fits)
                tl.store(tokens + place * CAP + slot, columns, mask=fits)
                found = tl.sum(in_block, axis=0)
        tl.store(counts + place, found)


@triton.jit
@no_type_check
def choose(
    kind: tl.tensor,
    keys: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    greedy: tl.tensor,
    total: tl.tensor,
    counts: tl.tensor,
    distances: tl.tensor,
    tokens: tl.tensor,
    drawn: tl.tensor,  # out [R]
    undecided: tl.tensor,  # out [R]: 1 if `tokens` do not decide it
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """Draw a row's token from those that `collect` has found."""
    row = tl.program_id(0)
    own, open_ = tl.load(kind + row), 0
    token = tl.load(greedy + row)
    chunks = tl.arange(0, CHUNKS_PAD)
    place = row * CHUNKS + chunks
    if own == FREE:
        count = tl.load(counts + place, mask=chunks < CHUNKS, other=0)
        score = tl.load(distances + place * CAP, mask=count > 0, other=-_INFINITY)
        column = tl.load(tokens + place * CAP, mask=count > 0, other=VOCAB)
        token = tl.min(tl.where(score == tl.max(score, axis=0), column, VOCAB), axis=0)
    if own >= COUNTED:
        count = tl.load(counts + place, mask=chunks < CHUNKS, other=0)
        open_ = (tl.max(count, axis=0) > CAP).to(tl.int32)
        slots = tl.arange(0, CAP)
        held = slots[None] < tl.minimum(count, CAP)[:, None]
        at = place[:, None] * CAP + slots[None]
        distance = tl.load(distances + at, mask=held, other=_INFINITY)
        column = tl.load(tokens + at, mask=held, other=VOCAB)
        bits = tl.where(held, distance.to(tl.int32, bitcast=True), 0x7FFFFFFF)
        wanted, enough = tl.load(top_k + row), tl.load(top_p + row)
        edge = 0x7FFFFFFE
        if wanted > 0:
            edge = _nearest(bits, wanted)
        if enough < 1.0:
            likely = tl.where(held & (bits <= edge), tl.exp(-distance), 0.0)
            every = tl.sum(tl.sum(likely, axis=1), axis=0)
            if own == NUCLEUS:
                every = tl.load(total + row)
            share = likely / tl.where(every > 0.0, every, 1.0)
            goal = tl.maximum(enough, _TINY)
            if own == NUCLEUS:
                open_ = open_ | (tl.sum(tl.sum(share, axis=1), axis=0) < goal).to(tl.int32)
            edge = tl.minimum(edge, _nearest_with(bits, share, goal))
        kept = held & (bits <= edge)
        score = tl.where(kept, _noise(keys, row, column) - distance, -_INFINITY)
        best = tl.max(tl.max(score, axis=1), axis=0)
        token = tl.min(tl.min(tl.where(kept & (score == best), column, VOCAB), axis=1), axis=0)
    tl.store(drawn + row, token)
    tl.store(undecided + row, open_)


@triton.jit
@no_type_check
def _nucleus_reach(
    distance: tl.tensor, mass: tl.tensor, share: tl.tensor, rest: tl.tensor, SUB: tl.constexpr
) -> tl.tensor:
    """Return a distance beyond which the tokens of all blocks have no more than `rest` of the mass.

    `distance` and `share` are those of the blocks' largest logits, `mass` of a block is relative to its `share`.
    """
    near, far = 0.0, _FARTHEST
    for _ in range(20):
        middle = 0.5 * (near + far)
        within = tl.minimum((mass - 1.0) * share, (SUB - 1) * tl.exp(-middle))
        enough = tl.sum(tl.where(distance > middle, mass * share, within), axis=0) <= rest
        far = tl.where(enough, middle, far)
        near = tl.where(enough, near, middle)
    return far


@triton.jit
@no_type_check
def _nearest_with(bits: tl.tensor, share: tl.tensor, goal: tl.tensor) -> tl.tensor:
    """Return the smallest number for which the tokens whose bits do not exceed it have `goal` of the shares."""
    found = 0
    for number in range(31):
        bit = 1 << (30 - number)
        mass = tl.sum(tl.sum(tl.where(bits <= (found | (bit - 1)), share, 0.0), axis=1), axis=0)
        found = tl.where(mass >= goal, found, found | bit)
    return found


@triton.jit
@no_type_check
def _nearest(bits: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the smallest number that so many of the bits do not exceed; 2^31 - 1 if there are not so many below it."""
    found = 0
    for number in range(31):
        bit = 1 << (30 - number)
        count = tl.sum((tl.ravel(bits) <= (found | (bit - 1))).to(tl.int32), axis=0)
        found = tl.where(count >= wanted, found, found | bit)
    return found


@triton.jit
@no_type_check
def _noise(keys: tl.tensor, row: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of columns: bit by bit the uniform numbers of jax.random.gumbel."""
    first = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    third = first ^ second ^ 0x1BD11BDA
    a = tl.zeros_like(columns).to(tl.uint32) + first
    b = columns.to(tl.uint32) + second
    a, b = _rounds(a, b, 13, 15, 26, 6)
    a, b = _rounds(a + second, b + third + 1, 17, 29, 16, 24)
    a, b = _rounds(a + third, b + first + 2, 13, 15, 26, 6)
    a, b = _rounds(a + first, b + second + 3, 17, 29, 16, 24)
    a, b = _rounds(a + second, b + third + 4, 13, 15, 26, 6)
    random = (a + third) ^ (b + first + 5)
    uniform = ((random >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return -tl.log(-tl.log(tl.maximum(uniform, _TINY)))


@triton.jit
@no_type_check
def _rounds(
    a: tl.tensor, b: tl.tensor, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr
) -> tuple:
    """Four rounds of threefry2x32."""
    a += b
    b = ((b << r0) | (b >> (32 - r0))) ^ a
    a += b
    b = ((b << r1) | (b >> (32 - r1))) ^ a
    a += b
    b = ((b << r2) | (b >> (32 - r2))) ^ a
    a += b
    b = ((b << r3) | (b >> (32 - r3))) ^ a
    return a, b

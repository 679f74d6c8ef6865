r"""The first Triton kernel of sampling: it reads the logits once. Importing this module imports Triton.

    logits of a row    |  block  |  block  |  block  | ...      a thread block reads a chunk: TILE blocks of SUB columns
    tops, masses, firsts  top       top       top               of each block, under constraints
                              \       |       /
    numbers, choices      the largest, the reach, the sum       by the row's last thread block

All kernels know logits by their distance from the row's largest: d = (largest - logit) / temperature, in float32. A
token with a smaller distance is more likely. Distances are not negative, so their bits are in the same order as they.
The reach is a distance that no token which can be drawn exceeds: so the second kernel reads few blocks again.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_rows import (
    ARRIVED,
    CHOICE,
    COUNTED,
    GREEDY,
    INFINITY,
    LEAST,
    MOST,
    NUCLEUS,
    NUMBERS,
    RAW_LOG,
    RAW_MOST,
    REACH,
    STATE,
    TABLE,
    TEMPERATURE,
    TINY,
    TOP_P,
    TOTAL,
    constrain,
    distance_of,
    floor_of,
    kind_of,
    last_of,
    real,
    top_k_of,
)

_FARTHEST = tl.constexpr(110.0)  # exp(-104) is 0 in float32
# Gumbel noise of jax.random lies between -log(-log(2^-126)) and -log(-log(1 - 2^-23)): 20.42 apart.
_FREE_REACH = tl.constexpr(20.5)


@triton.jit
@no_type_check
def survey(
    rows: tl.tensor,  # in and out [R, RECORD]; the arrivals are counted in it
    logits: tl.tensor,  # [R, V]
    seen: tl.tensor,  # [M, V], or None: no row has constraints; likewise the others of the tables
    mask: tl.tensor,  # [M, WORDS]
    ahead: tl.tensor,  # [M, PLACES, WORDS]
    bias_ids: tl.tensor,  # [M, BIASES]
    bias: tl.tensor,  # [M, BIASES]
    tops: tl.tensor,  # out [R, SUBS]: the largest of each block
    masses: tl.tensor,  # out [R, SUBS]: the sum of exp((logit - top) / temperature); of greedy rows nothing
    firsts: tl.tensor,  # out [R, SUBS]: the first column with the largest
    finite: tl.tensor,  # out [R, CHUNKS]: 1 if all logits are
    numbers: tl.tensor,  # out [R, NUMBERS]
    choices: tl.tensor,  # out [R, 2]
    raw_tops: tl.tensor,  # out [R, SUBS], or None: without constraints
    raw_masses: tl.tensor,  # out [R, SUBS], or None: also at temperature 1
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    RECORD: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
    SUBS_PAD: tl.constexpr,  # powers of two
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """Read a chunk of a row; the row's last thread block also sums up what all have found."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    record = rows + row * RECORD
    subs = chunk * TILE + tl.arange(0, TILE)
    columns = subs[:, None] * SUB + tl.arange(0, SUB)[None]
    inside = columns < VOCAB
    x = tl.load(logits + row.to(tl.int64) * VOCAB + columns, mask=inside, other=-INFINITY)
    whole = (tl.abs(x) < INFINITY) | ~inside
    tl.store(finite + row * CHUNKS + chunk, tl.min(tl.min(whole.to(tl.int32), axis=1), axis=0))
    place = row * SUBS + subs
    if raw_tops is not None:
        top = tl.max(x, axis=1)
        tl.store(raw_tops + place, top, mask=subs < SUBS)
        tl.store(raw_masses + place, _mass(x, top, 1.0), mask=subs < SUBS)
    if seen is not None:  # noqa: SIM102 - Triton compiles both sides of an `and`
        if tl.load(record + TABLE) >= 0:
            x = constrain(
                x, record, seen, mask, ahead, bias_ids, bias, chunk, columns, inside,
                VOCAB, TILE * SUB, WORDS, PLACES, DRAFTS, BANS, BIASES,
            )  # fmt: skip
    top = tl.max(x, axis=1)
    tl.store(tops + place, top, mask=subs < SUBS)
    tl.store(firsts + place, tl.min(tl.where(x == top[:, None], columns, VOCAB - 1), axis=1), mask=subs < SUBS)
    if kind_of(record, VOCAB) != GREEDY:
        tl.store(masses + place, _mass(x, top, real(record, TEMPERATURE)), mask=subs < SUBS)
    if last_of(record + ARRIVED, CHUNKS):
        _sum_up(
            row, record, tops, masses, firsts, finite, numbers, choices, VOCAB, SUBS, CHUNKS, SUB, SUBS_PAD, CHUNKS_PAD
        )
        if raw_tops is not None:
            at = tl.arange(0, SUBS_PAD)
            raw_top = tl.load(raw_tops + row * SUBS + at, mask=at < SUBS, other=-INFINITY, cache_modifier=".cg")
            raw_mass = tl.load(raw_masses + row * SUBS + at, mask=at < SUBS, other=0.0, cache_modifier=".cg")
            most = tl.maximum(tl.max(raw_top, axis=0), LEAST)
            tl.store(numbers + row * NUMBERS + RAW_MOST, most)
            tl.store(
                numbers + row * NUMBERS + RAW_LOG,
                tl.log(tl.maximum(tl.sum(raw_mass * tl.exp(raw_top - most), axis=0), TINY)),
            )


@triton.jit
@no_type_check
def _mass(x: tl.tensor, top: tl.tensor, warmth: tl.tensor) -> tl.tensor:
    """Return for each line the sum of exp((x - top) / warmth)."""
    safe = tl.where(top > -INFINITY, top, 0.0)
    return tl.sum(tl.exp((x - safe[:, None]) / warmth), axis=1)


@triton.jit
@no_type_check
def _sum_up(
    row: tl.tensor,
    record: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    firsts: tl.tensor,
    finite: tl.tensor,
    numbers: tl.tensor,
    choices: tl.tensor,
    VOCAB: tl.constexpr,
    SUBS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUB: tl.constexpr,
    SUBS_PAD: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """Find the largest logit of a row, and how far the tokens that can be drawn are from it at most.

    The choice is the first column with the largest logit. The state is 1 if all logits are finite, plus 2 if any token
    is allowed. The total is the sum of exp(-distance) of all tokens; it and the reach mean nothing for greedy rows.
    """
    subs, chunks = tl.arange(0, SUBS_PAD), tl.arange(0, CHUNKS_PAD)
    top = tl.load(tops + row * SUBS + subs, mask=subs < SUBS, other=-INFINITY, cache_modifier=".cg")
    largest = tl.max(top, axis=0)
    first = tl.minimum(tl.min(tl.where(top == largest, subs, SUBS_PAD), axis=0), SUBS - 1)
    tl.store(choices + row * 2 + CHOICE, tl.load(firsts + row * SUBS + first, cache_modifier=".cg"))
    whole = tl.load(finite + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=1, cache_modifier=".cg")
    tl.store(choices + row * 2 + STATE, tl.min(whole, axis=0) + 2 * (largest > -INFINITY).to(tl.int32))
    largest = tl.maximum(largest, LEAST)
    own = kind_of(record, VOCAB)
    reach, total = tl.full([], _FREE_REACH, tl.float32), tl.full([], 1.0, tl.float32)
    if own != GREEDY:
        distance = tl.where(subs < SUBS, distance_of(top, largest, real(record, TEMPERATURE)), INFINITY)
        mass = tl.load(masses + row * SUBS + subs, mask=subs < SUBS, other=0.0, cache_modifier=".cg")
        share = tl.exp(-distance)
        total = tl.sum(mass * share, axis=0)
        if own == COUNTED:
            # k blocks have a token at this distance or nearer, each another one.
            wanted, kth = top_k_of(record, VOCAB), tl.full([], INFINITY, tl.float32)
            if (wanted > 0) & (wanted <= SUBS):
                kth = _nearest(distance.to(tl.int32, bitcast=True), wanted).to(tl.float32, bitcast=True)
            reach = tl.minimum(kth, floor_of(record))
        if own == NUCLEUS:
            # Of a block whose largest is within reach, no other token beyond it is more likely than one at the reach.
            rest = (1.0 - real(record, TOP_P)) * total * 0.999
            reach = _nucleus_reach(distance, mass, share, rest, SUB)
    tl.store(numbers + row * NUMBERS + MOST, largest)
    tl.store(numbers + row * NUMBERS + REACH, reach)
    tl.store(numbers + row * NUMBERS + TOTAL, total)


@triton.jit
@no_type_check
def _nucleus_reach(
    distance: tl.tensor, mass: tl.tensor, share: tl.tensor, rest: tl.tensor, SUB: tl.constexpr
) -> tl.tensor:
    """Return a distance beyond which the tokens of all blocks have no more than `rest` of the mass.

    `distance` and `share` are those of the blocks' largest logits, `mass` of a block is relative to its `share`.
    """
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

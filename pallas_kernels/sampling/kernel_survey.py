"""The first Triton kernel of sampling: it reads the logits once. Importing this module imports Triton.

    logits of a row        |  block  |  block  |  block  | ...      TILE blocks of SUB columns are read at a time
    changed                   logits under constraints              of rows that have any
    tops, masses, firsts      one number of each block              of the changed logits, if there are
    raw tops, raw masses      one number of each block              of the model's own logits, for log probabilities

From these few numbers the second kernel knows which blocks have tokens that can be drawn.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.kernel_rows import (
    BY_PLACE,
    FARTHEST,
    FIXED,
    FREQUENCY,
    GREEDY,
    INFINITY,
    PRESENCE,
    REPETITION,
    TABLE,
    TEMPERATURE,
    TOP_N_SIGMA,
    kind_of,
    real,
)

_COUNT_BITS = tl.constexpr(0x7FFF)


@triton.jit
@no_type_check
def survey(
    rows: tl.tensor,  # [R, RECORD]
    logits: tl.tensor,  # [R, V]
    seen: tl.tensor,  # [M, V], or None: no row has constraints; likewise the others of the tables
    mask: tl.tensor,  # [M, WORDS]
    ahead: tl.tensor,  # [M, PLACES, WORDS], or None
    bias_ids: tl.tensor,  # [M, BIASES]
    bias: tl.tensor,  # [M, BIASES]
    tops: tl.tensor,  # out [R, SUBS]: the largest of each block
    masses: tl.tensor,  # out [R, SUBS]: the sum of exp((logit - top) / temperature); of greedy rows nothing
    firsts: tl.tensor,  # out [R, SUBS]: the first column with the largest
    finite: tl.tensor,  # out [R, CHUNKS]: 1 if all the model's logits are
    moments: tl.tensor,  # out [R, CHUNKS, 4]: see `_moments`; of rows without top-n-sigma nothing
    changed: tl.tensor,  # out [R, V], or None without tables: of rows without constraints nothing
    raw_tops: tl.tensor,  # out [R, SUBS], or None
    raw_masses: tl.tensor,  # out [R, SUBS], or None: at temperature 1
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
) -> None:
    """Read the chunks of a part of a row. The next chunk is on its way meanwhile."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    record, line = rows + row * RECORD, row.to(tl.int64) * VOCAB
    own, warmth, table = kind_of(record, VOCAB), real(record, TEMPERATURE), tl.load(record + TABLE)
    following = _read(logits + line, part, VOCAB, SUB, TILE)
    for chunk in range(part, CHUNKS, parts):
        x = following
        following = _read(logits + line, chunk + parts, VOCAB, SUB, TILE)
        subs = chunk * TILE + tl.arange(0, TILE)
        columns = subs[:, None] * SUB + tl.arange(0, SUB)[None]
        inside, place = columns < VOCAB, row * SUBS + subs
        whole = (tl.abs(x) < INFINITY) | ~inside
        tl.store(finite + row * CHUNKS + chunk, tl.min(tl.min(whole.to(tl.int32), axis=1), axis=0))
        if raw_tops is not None:
            raw_top = tl.max(x, axis=1)
            tl.store(raw_tops + place, raw_top, mask=subs < SUBS)
            tl.store(raw_masses + place, _mass(x, raw_top, 1.0), mask=subs < SUBS)
        if seen is not None:  # noqa: SIM102 - Triton compiles both sides of an `and`
            if table >= 0:
                x = _constrained(
                    x, record, seen, mask, ahead, bias_ids, bias, chunk, columns, inside,
                    VOCAB, TILE * SUB, WORDS, PLACES, DRAFTS, BANS, BIASES,
                )  # fmt: skip
                tl.store(changed + line + columns, x, mask=inside)
        top = tl.max(x, axis=1)
        tl.store(tops + place, top, mask=subs < SUBS)
        tl.store(firsts + place, tl.min(tl.where(x == top[:, None], columns, VOCAB - 1), axis=1), mask=subs < SUBS)
        if (own != GREEDY) & (real(record, TOP_N_SIGMA) > 0.0):
            _moments(moments + (row * CHUNKS + chunk) * 4, x, tl.max(top, axis=0))
        if own != GREEDY:
            tl.store(masses + place, _mass(x, top, warmth), mask=subs < SUBS)


@triton.jit
@no_type_check
def _read(logits: tl.tensor, chunk: tl.tensor, VOCAB: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the logits of a chunk, and -inf past the vocabulary."""
    columns = (chunk * TILE + tl.arange(0, TILE))[:, None] * SUB + tl.arange(0, SUB)[None]
    return tl.load(logits + columns, mask=columns < VOCAB, other=-INFINITY)


@triton.jit
@no_type_check
def _mass(x: tl.tensor, top: tl.tensor, warmth: tl.tensor) -> tl.tensor:
    """Return for each line the sum of exp((x - top) / warmth)."""
    safe = tl.where(top > -INFINITY, top, 0.0)
    return tl.sum(tl.exp((x - safe[:, None]) / warmth), axis=1)


@triton.jit
@no_type_check
def _moments(out: tl.tensor, x: tl.tensor, top: tl.tensor) -> None:
    """Store a chunk's largest logit, its number of finite ones, and of how far these are from it: mean and squares.

    The squares are the sum of the squared deviations from the mean, as Chan et al. (1983) join them.
    """
    there = x > -INFINITY
    gap = tl.where(there, tl.minimum(tl.where(top > -INFINITY, top, 0.0) - x, FARTHEST), 0.0)
    count = tl.sum(tl.sum(there.to(tl.float32), axis=1), axis=0)
    mean = tl.sum(tl.sum(gap, axis=1), axis=0) / tl.maximum(count, 1.0)
    off = tl.where(there, gap - mean, 0.0)
    tl.store(out, top)
    tl.store(out + 1, count)
    tl.store(out + 2, mean)
    tl.store(out + 3, tl.sum(tl.sum(off * off, axis=1), axis=0))


@triton.jit
@no_type_check
def _constrained(
    x: tl.tensor,
    record: tl.tensor,
    seen: tl.tensor,
    mask: tl.tensor,
    ahead: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    chunk: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    VOCAB: tl.constexpr,
    SIZE: tl.constexpr,  # columns of a chunk
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BANS: tl.constexpr,
    BIASES: tl.constexpr,
) -> tl.tensor:
    """Apply bias, penalties, mask and bans, in this order, to the logits of a row that has constraints."""
    table = tl.load(record + TABLE).to(tl.int64)
    x = _biased(x, table, bias_ids, bias, chunk, columns, VOCAB, SIZE, BIASES)
    noted = tl.load(seen + table * VOCAB + columns, mask=inside, other=0).to(tl.int32)
    times, place = noted & _COUNT_BITS, 0
    for number in tl.static_range(DRAFTS):
        draft = tl.load(record + FIXED + number)
        times += (columns == draft).to(tl.int32)
        place += (draft >= 0).to(tl.int32)
    penalty = tl.where((noted > 0) | (times > 0), real(record, REPETITION), 1.0)
    x = tl.where(x > 0.0, tl.div_rn(x, penalty), x * penalty)
    x -= real(record, FREQUENCY) * times.to(tl.float32)
    x -= real(record, PRESENCE) * (times > 0).to(tl.float32)
    words = mask + table * WORDS
    if PLACES > 0:  # noqa: SIM102
        if (tl.load(record + BY_PLACE) != 0) & (place > 0):
            words = ahead + (table * PLACES + place - 1) * WORDS
    bits = tl.load(words + columns // 32, mask=inside, other=0)
    x = tl.where(((bits >> (columns % 32)) & 1) == 1, x, -INFINITY)
    for number in range(BANS):
        x = tl.where(columns == tl.load(record + FIXED + DRAFTS + number), -INFINITY, x)
    return x


@triton.jit
@no_type_check
def _biased(
    x: tl.tensor,
    table: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    chunk: tl.tensor,
    columns: tl.tensor,
    VOCAB: tl.constexpr,
    SIZE: tl.constexpr,
    BIASES: tl.constexpr,  # a power of two
) -> tl.tensor:
    """Add the biases of a chunk's tokens, one token after the other: mostly there are none."""
    ids = tl.load(bias_ids + table * BIASES + tl.arange(0, BIASES))
    here = (ids >= chunk * SIZE) & (ids < tl.minimum(chunk * SIZE + SIZE, VOCAB))
    left = tl.sum(here.to(tl.int32), axis=0)
    if left > 0:
        values = tl.load(bias + table * BIASES + tl.arange(0, BIASES))
        while left > 0:
            token = tl.min(tl.where(here, ids, VOCAB), axis=0)
            own = here & (ids == token)
            x = tl.where(columns == token, x + tl.sum(tl.where(own, values, 0.0), axis=0), x)
            here = here & (ids != token)
            left -= tl.sum(own.to(tl.int32), axis=0)
    return x

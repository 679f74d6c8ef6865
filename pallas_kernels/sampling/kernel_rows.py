"""What both Triton kernels of sampling know of a row: its record, its constrained logits, its noise.

Importing this module imports Triton. A row's record is a line of int32 numbers, floats by their bits (`call.packed`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.sampling.arguments import OPTIONS

GREEDY, FREE, COUNTED, NUCLEUS = (tl.constexpr(kind) for kind in range(4))
# Columns of a record. DONE counts the thread blocks that have finished their part of the row.
_AFTER = len(OPTIONS) + 7
_FIELDS = tuple(tl.constexpr(column) for column in range(_AFTER))
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, TOP_N_SIGMA = _FIELDS[: len(OPTIONS)]
KEY_HIGH, KEY_LOW, POSITION, TABLE, BY_PLACE, FINITE, DONE = _FIELDS[len(OPTIONS) :]
FIXED = tl.constexpr(_AFTER)  # then the drafts, then the banned tokens
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
INFINITY = tl.constexpr(float("inf"))
FARTHEST = tl.constexpr(1e14)  # from the largest logit, for a standard deviation: the squares of farther ones overflow
LEAST = tl.constexpr(-3.4028234663852886e38)
_COUNTED_BITS = tl.constexpr(0x7FFF)

# no_type_check: Triton compiles the source of these functions, and cannot compile the checks that tests add to it.


@triton.jit
@no_type_check
def real(record: tl.tensor, COLUMN: tl.constexpr) -> tl.tensor:
    """Return a float of a record."""
    return tl.load(record + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def top_k_of(record: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Return how many tokens top-k keeps; 0: all."""
    wanted = tl.load(record + TOP_K)
    return tl.where(wanted >= VOCAB, 0, wanted)


@triton.jit
@no_type_check
def kind_of(record: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Return the kind of a row."""
    kind = tl.where(real(record, TOP_P) < 1.0, NUCLEUS, FREE)
    floored = (real(record, MIN_P) > 0.0) | (real(record, TOP_N_SIGMA) > 0.0)
    kind = tl.where((top_k_of(record, VOCAB) > 0) | floored, COUNTED, kind)
    return tl.where(real(record, TEMPERATURE) > 0.0, kind, GREEDY)


@triton.jit
@no_type_check
def floor_of(record: tl.tensor) -> tl.tensor:
    """Return the largest distance that min-p keeps."""
    least = real(record, MIN_P)
    return tl.where(least > 0.0, -tl.log(tl.maximum(least, TINY)), INFINITY)


@triton.jit
@no_type_check
def distance_of(x: tl.tensor, most: tl.tensor, warmth: tl.tensor) -> tl.tensor:
    """Return how far logits are from the largest, by temperature."""
    return tl.div_rn(most - x, warmth)


@triton.jit
@no_type_check
def better(
    score: tl.tensor, columns: tl.tensor, distances: tl.tensor, token: tl.tensor, best: tl.tensor, its: tl.tensor
) -> tuple:
    """Return the best token of those scored and the one before, its score and its distance; of equals the first."""
    own = tl.max(tl.max(score, axis=1), axis=0)
    if own >= best:
        first = tl.min(tl.min(tl.where(score == own, columns, 0x7FFFFFFF), axis=1), axis=0)
        first = tl.where((own == best) & (token < first), token, first)
        at = tl.min(tl.min(tl.where(columns == first, distances, INFINITY), axis=1), axis=0)
        its = tl.where((own == best) & (token == first), its, at)
        token, best = first, own
    return token, best, its


@triton.jit
@no_type_check
def last_of(counter: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Count this thread block's arrival; return whether all others have arrived.

    The last one sees what the others have stored, if it loads it past the L1 cache (`cache_modifier=".cg"`).
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    tl.debug_barrier()
    return last


@triton.jit
@no_type_check
def noise(record: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of columns: the numbers of jax.random.gumbel under the row's key, its position folded in.

    Noise is threefry2x32's (Salmon et al. 2011): of a column under a key, which is that of a position under a key.
    """
    high = tl.load(record + KEY_HIGH).to(tl.uint32, bitcast=True)
    low = tl.load(record + KEY_LOW).to(tl.uint32, bitcast=True)
    at = tl.load(record + POSITION).to(tl.uint32, bitcast=True)
    high, low = _threefry(high, low, at * 0, at)
    first, second = _threefry(high, low, tl.zeros_like(columns).to(tl.uint32), columns.to(tl.uint32))
    uniform = (((first ^ second) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return -tl.log(-tl.log(tl.maximum(uniform, TINY)))


@triton.jit
@no_type_check
def _threefry(first: tl.tensor, second: tl.tensor, a: tl.tensor, b: tl.tensor) -> tuple:
    third = first ^ second ^ 0x1BD11BDA
    a, b = a + first, b + second
    a, b = _rounds(a, b, 13, 15, 26, 6)
    a, b = _rounds(a + second, b + third + 1, 17, 29, 16, 24)
    a, b = _rounds(a + third, b + first + 2, 13, 15, 26, 6)
    a, b = _rounds(a + first, b + second + 3, 17, 29, 16, 24)
    a, b = _rounds(a + second, b + third + 4, 13, 15, 26, 6)
    return a + third, b + first + 5


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

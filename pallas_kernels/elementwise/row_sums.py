"""The Triton kernels of sums along rows. Importing this module imports Triton.

A thread block has a row to itself. Each of BLOCK numbers is the sum of every BLOCK-th column in order, and these are
added in the order of Triton's reduction, which follows from BLOCK and the number of warps. So the bits of a sum depend
on the row and its size alone.
"""

from typing import no_type_check

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))

# no_type_check: Triton compiles the source of these functions, and cannot compile the checks that tests add to it.


@triton.jit
@no_type_check
def add(
    values: tl.tensor,  # [R, COLUMNS]
    keys: tl.tensor,  # [R, COLUMNS], unsigned numbers as int32; None: every column counts
    thresholds: tl.tensor,  # [R, COUNT], the same
    sums: tl.tensor,  # out [R, COUNT]
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the values of a row whose key is at least a threshold."""
    row, which = tl.program_id(0), tl.program_id(1)
    first = row.to(tl.int64) * COLUMNS
    total = tl.zeros([BLOCK], tl.float32)
    if keys is not None:
        least = tl.load(thresholds + row * COUNT + which).to(tl.uint32, bitcast=True)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < COLUMNS
        own = tl.load(values + first + columns, mask=inside, other=0.0)
        if keys is not None:
            key = tl.load(keys + first + columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
            own = tl.where(key >= least, own, 0.0)
        total += own
    tl.store(sums + row * COUNT + which, tl.sum(total, axis=0))


@triton.jit
@no_type_check
def share(
    values: tl.tensor,  # [R, COLUMNS]
    logs: tl.tensor,  # out [R]: the logarithm of the sum of exp(value - largest)
    shares: tl.tensor,  # out [R, COLUMNS]: the softmax; or None
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the softmax of a row."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * COLUMNS
    largest = tl.full([BLOCK], -_INFINITY, tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        own = tl.load(values + first + columns, mask=columns < COLUMNS, other=-_INFINITY)
        largest = tl.maximum(largest, own)
    top = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        own = tl.load(values + first + columns, mask=columns < COLUMNS, other=-_INFINITY)
        total += tl.exp(own - top)
    every = tl.sum(total, axis=0)
    tl.store(logs + row, tl.log(every))
    if shares is not None:
        for start in range(0, COLUMNS, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            own = tl.load(values + first + columns, mask=columns < COLUMNS, other=-_INFINITY)
            tl.store(shares + first + columns, tl.exp(own - top) / every, mask=columns < COLUMNS)

"""The Triton kernel of the grouped product. Importing this module imports Triton."""

from typing import no_type_check

import triton
import triton.language as tl

ITEM = tl.constexpr(4)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_GELU_TANH = tl.constexpr(1.5957691216057308)  # 2 · √(2 / π)

# no_type_check: Triton compiles the source of these functions, and cannot compile the checks that tests add to it.


@triton.jit
@no_type_check
def multiply(
    x: tl.tensor,  # [R, K]
    weights: tl.tensor,  # [E, K, C]; C = N, or 2N: gates, then ups
    tiles: tl.tensor,  # [B, 4]: their number, then of each: expert, first row, index of its own first row, own rows
    bias: tl.tensor,  # [E, C] or None
    out: tl.tensor,  # [R, N]
    K: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    MOST: tl.constexpr,  # tiles that there may be
    BAND: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # index in `glu.Activation`
    CLAMP: tl.constexpr,  # 0.0: none
    ALPHA: tl.constexpr,  # 0.0: none
    PRECISION: tl.constexpr,
) -> None:
    """Multiply the own rows of one tile by COLUMNS columns of its expert.

    Programs go through bands of columns, in each through tiles, and for each tile through the band's columns.
    """
    band, within = tl.program_id(0) // (MOST * BAND), tl.program_id(0) % (MOST * BAND)
    tile, begin = within // BAND, (band * BAND + within % BAND) * COLUMNS
    if (tile >= tl.load(tiles)) | (begin >= N):
        return
    entry = tiles + (1 + tile) * ITEM
    expert = tl.load(entry).to(tl.int64)
    first, own = tl.load(entry + 2), tl.load(entry + 3)
    index = tl.arange(0, ROWS)
    held = (index >= first) & (index < first + own)
    row = (tl.load(entry + 1) + index).to(tl.int64)  # less than 0 where x has fewer rows than a tile: not held
    column = begin + tl.arange(0, COLUMNS)

    matrix = weights + expert * (K * C)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if GATED:
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for turn in range(0, K, DEPTH):
        inputs = turn + tl.arange(0, DEPTH)
        read = held[:, None]
        if K % DEPTH > 0:
            read &= inputs[None, :] < K
        part = tl.load(x + row[:, None] * K + inputs[None, :], mask=read, other=0.0)
        total = tl.dot(part, _piece(matrix, inputs, column, K, C, N, DEPTH, COLUMNS), total, input_precision=PRECISION)
        if GATED:
            piece = _piece(matrix + N, inputs, column, K, C, N, DEPTH, COLUMNS)
            ups = tl.dot(part, piece, ups, input_precision=PRECISION)

    stored = column < N
    if bias is not None:
        total += tl.load(bias + expert * C + column, mask=stored, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            ups += tl.load(bias + expert * C + N + column, mask=stored, other=0.0).to(tl.float32)[None, :]
        total = _glu(total, ups, ACTIVATION, CLAMP, ALPHA)
    target = out + row[:, None] * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=held[:, None] & stored[None, :])


@triton.jit
@no_type_check
def _piece(
    matrix: tl.tensor,
    inputs: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Load weights of some inputs and columns; zeros beyond the matrix, masked only if pieces reach beyond it."""
    source = matrix + inputs[:, None] * C + column[None, :]
    if K % DEPTH > 0 or N % COLUMNS > 0:
        piece = tl.load(source, mask=(inputs[:, None] < K) & (column[None, :] < N), other=0.0)
    else:
        piece = tl.load(source)
    return piece


@triton.jit
@no_type_check
def _glu(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, ALPHA: tl.constexpr
) -> tl.tensor:
    """Return `glu.glu` of gates and ups."""
    if ALPHA == 0.0:
        gate = _activate(gate, ACTIVATION)
    if CLAMP > 0.0:
        gate = tl.where(gate > CLAMP, CLAMP, gate)  # keeps NaN, which tl.minimum would not
        up = tl.where(up > CLAMP, CLAMP, tl.where(up < -CLAMP, -CLAMP, up))
    return (up + 1) * gate * _sigmoid(gate * ALPHA) if ALPHA > 0.0 else gate * up


@triton.jit
@no_type_check
def _activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == 0:
        out = x * _sigmoid(x)
    elif ACTIVATION == 1:
        out = 0.5 * x * (1 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == 2:
        # x · (1 + tanh y) / 2 = x · σ(2y)
        out = x * _sigmoid((x + 0.044715 * x * x * x) * _GELU_TANH)
    else:
        out = tl.where(x < 0, 0.0, x)
    return out


@triton.jit
@no_type_check
def _sigmoid(x: tl.tensor) -> tl.tensor:
    """Return σ(x), whose exponential overflows to ∞ at most, so that the result is 0."""
    return 1 / (1 + tl.exp(-x))

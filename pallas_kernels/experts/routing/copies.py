"""The part of routing that copies tokens to the rows of their experts, in Triton."""

from typing import no_type_check

import triton
import triton.language as tl

# no_type_check: see `kernel`.


@triton.jit
@no_type_check
def copy_tokens(
    x: tl.tensor,
    inputs: tl.tensor,
    tokens: tl.tensor,
    row: tl.tensor,  # [TOKENS, CHOICES]
    weight: tl.tensor,  # [TOKENS, CHOICES]
    block: tl.tensor,
    T: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy this block's share of the tokens to the rows of their experts."""
    dtype = x.dtype.element_ty
    held = (tl.arange(0, CHOICES) < K)[:, None]
    for token in range(block, T, BLOCKS):
        here = (tokens == token)[:, None]
        own = inputs + tl.sum(tl.where(here, row, 0), axis=0).to(tl.int64)[:, None] * M
        factor = tl.sum(tl.where(here, weight, 0.0), axis=0).to(dtype)[:, None]
        for first in range(0, M, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None]
            value = tl.load(x + token * M + column, mask=column < M, other=0.0)
            if SCALED:
                value = (value.to(tl.float32) * factor.to(tl.float32)).to(dtype)
            tl.store(own + column, tl.broadcast_to(value, [CHOICES, COLUMNS]), mask=held & (column < M))

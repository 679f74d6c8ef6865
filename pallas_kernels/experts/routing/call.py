"""The calls of the Triton kernels of routing, through jax-triton, an optional package."""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.experts.groups import Groups, Tiling, row_count
from pallas_kernels.experts.routing.arguments import Routed, Router, RouterWeights, Score

ONE_BLOCK = 8_192  # scores that one thread block holds in registers: tokens times experts, as powers of two
_ENTRIES = 1_024  # comparisons of a list of tiles with experts that it makes at once
_COPYING = 64  # thread blocks that copy tokens to their rows, at most
_COLUMNS = 1_024  # of a row that are copied at once
_WARPS = 16


class Sizes(NamedTuple):
    """Static sizes of a call.

    Attributes:
        tokens: of a thread block.
        blocks: thread blocks; one alone routes everything in one kernel.
        experts: of the model, rounded up to a power of two.
    """

    tokens: int
    blocks: int
    experts: int

    @classmethod
    def of(cls, tokens: int, experts: int) -> "Sizes":
        """Return as few blocks as there can be."""
        width = _power_of_two(experts)
        block = min(_power_of_two(tokens), max(1, ONE_BLOCK // width))
        return cls(block, -(-tokens // block), width)


def route(
    parts: Float[Array, "S T E"],
    router: Router,
    weights: RouterWeights,
    tilings: tuple[Tiling, ...],
    x: Float[Array, "T M"] | None,
    stand_ins: Int[Array, " T"] | None,
    *,
    scaled: bool,
) -> Routed:
    """See `api.route`. Raises ImportError if jax-triton is missing."""
    triton.load()
    from pallas_kernels.experts.routing import kernel  # imports Triton

    count, tokens, experts = parts.shape
    sizes, rows = Sizes.of(tokens, experts), row_count(tokens * router.top_k, experts)
    shape = {"T": tokens, "E": experts, "K": router.top_k}
    held = {"TOKENS": sizes.tokens, "EXPERTS": sizes.experts, "CHOICES": _power_of_two(router.top_k)}
    given = {"parts": parts, **weights._asdict(), "stand_ins": stand_ins}
    own = {"PARTS": count, **_numbers(router)}
    grouped = {**_tiles(tilings), "R": rows, "TAIL": _power_of_two(rows - tokens * router.top_k + 1)}
    grouped["AT_ONCE"] = max(1, _ENTRIES // sizes.experts)
    pairs = (tokens, router.top_k)
    picked = [_out(pairs), _out(pairs, jnp.float32)]
    placed = [_out((experts,)), _out((experts,)), _out(pairs), _out((rows,))]
    placed += [_out((1 + tiling.most, 4)) for tiling in tilings]
    inputs = None
    if sizes.blocks == 1:
        blocks = 1 if x is None else min(tokens, _COPYING)
        copied = {"M": 1 if x is None else x.shape[1], "SCALED": scaled, "COLUMNS": _COLUMNS, "BLOCKS": blocks}
        constants = {**shape, **held, **own, **grouped, **copied, **({"inputs": None} if x is None else {})}
        outputs = [*picked, *placed, *([] if x is None else [_out((rows, x.shape[1]), x.dtype)])]
        chosen, mass, *found = triton.call(kernel.route, {**given, "x": x}, outputs, (blocks,), constants, warps=_WARPS)
        inputs = None if x is None else found.pop()
    else:
        counts = _out((sizes.blocks, experts))
        chosen, mass, by_block = triton.call(
            kernel.choose, given, [*picked, counts], (sizes.blocks,), {**shape, **held, **own}, warps=_WARPS
        )
        constants = {**shape, **held, **grouped, "BLOCKS": sizes.blocks}
        given = {"chosen": chosen, "counts": by_block}
        found = triton.call(kernel.place, given, placed, (sizes.blocks,), constants, warps=_WARPS)
    starts, group_sizes, at, pair, *tiles = found
    return Routed(chosen, mass, Groups(starts, group_sizes), at, pair, tuple(tiles), inputs)


def _numbers(router: Router) -> dict[str, Any]:
    return {
        "SCORE": get_args(Score).index(router.score),
        "FACTOR": float(router.factor),
        "SOFTCAP": float(router.softcap),
        "NORMALIZE": router.normalize,
        "EPS": float(router.eps),
        "SCALE": float(router.scale),
    }


def _tiles(tilings: tuple[Tiling, ...]) -> dict[str, Any]:
    """Return the constants of the lists of tiles, and None for each that there is not."""
    out: dict[str, Any] = {}
    for index, (name, prefix) in enumerate((("tiles", ""), ("more_tiles", "MORE_"))):
        there = index < len(tilings)
        out |= {} if there else {name: None}
        out[f"{prefix}TILE"], out[f"{prefix}MOST"] = tilings[index] if there else (0, 0)
    return out


def _out(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""Rotary frequencies and temperatures in float64, from the published formulas; imports nothing of the engine.

Beside each frequency stands how far that of the engine may be off, in roundings to float32: relative errors of UNIT.
base^(-2i / D) is rounded once; scaling rules, which are computed in float32, add theirs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

UNIT = 2.0**-24  # the largest relative error of one rounding to float32
COSINE = 4  # roundings of scale · cos(angle) for a given angle: two of cos and sin, that of the scale, and the product


class Frequencies(NamedTuple):
    """Angle of a pair: position · inverse; cos and sin are multiplied by `scale`.

    `roundings`: what the relative error of each frequency may be in float32, in units of UNIT.
    """

    inverse: Float[np.ndarray, " n"]
    roundings: Float[np.ndarray, " n"]
    scale: float = 1.0

    def tables(
        self, positions: Int[np.ndarray, " T"]
    ) -> tuple[Float[np.ndarray, "T n"], Float[np.ndarray, "T n"], Float[np.ndarray, "T n"]]:
        """Return cos, sin, and how far each may be off in float32.

        An angle is off by its frequency's roundings and that of the product; cos and sin change no more than it does.
        """
        angle = positions[:, None] * self.inverse
        off = np.minimum(angle * (self.roundings + 1) * UNIT, 2.0) + COSINE * UNIT
        return self.scale * np.cos(angle), self.scale * np.sin(angle), abs(self.scale) * off


def default(base: float, dim: int) -> Frequencies:
    """Su et al. 2021 (arXiv 2104.09864)."""
    return Frequencies(base ** -(np.arange(0, dim, 2) / dim), np.full(dim // 2, 1.01))  # a little for float64 itself


def linear(base: float, dim: int, factor: float) -> Frequencies:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): positions are divided by the factor."""
    plain = default(base, dim)
    return Frequencies(plain.inverse / factor, plain.roundings + 1)


def proportional(base: float, dim: int, share: float, *, all_pairs: bool = True) -> Frequencies:
    """Gemma 4's full layers: the first `share` of the pairs has the frequencies of the whole head, the others have 0.

    `all_pairs`: False where only pairs that rotate are listed, as in layers with folded keys.
    """
    plain, rotated = default(base, dim), int(share * dim / 2)
    rest = np.zeros(dim // 2 - rotated if all_pairs else 0)
    inverse, roundings = (np.concatenate([part[:rotated], rest]) for part in (plain.inverse, plain.roundings))
    return Frequencies(inverse, roundings)


def llama3(base: float, dim: int, factor: float, low: float, high: float, original: int) -> Frequencies:
    """Llama 3.1: a pair that turns fewer than `low` times within the original length is slowed down by the factor.

    One that turns more than `high` times is not, those between are blended by their number of turns.
    """
    plain = default(base, dim)
    turns = original * plain.inverse / (2 * math.pi)
    with np.errstate(divide="ignore"):
        kept = np.where(turns > high, 1.0, np.where(turns < low, 0.0, (turns - low) / np.float64(high - low)))
    blend = kept + (1 - kept) / factor
    # The error of the frequency enters the share again; then come three products and sums.
    between = (kept > 0) & (kept < 1)
    again = np.where(between, turns * (1 - 1 / factor) / max(high - low, 1e-9) / blend, 0.0)
    return Frequencies(plain.inverse * blend, plain.roundings * (1 + again) + 3)


def yarn(
    base: float,
    dim: int,
    factor: float,
    original: int,
    *,
    fast: float = 32.0,
    slow: float = 1.0,
    whole: bool = True,
    scale: float | None = None,
) -> Frequencies:
    """YaRN (Peng et al. 2023, arXiv 2309.00071) with its authors' ramp, which is linear in the number of the pair.

    The ramp begins at the pair that turns `fast` times within the original length and ends at the one that turns
    `slow` times; `whole`: at the whole numbers around these. `scale`: the default is 0.1 ln(factor) + 1.
    """
    plain, pair = default(base, dim), np.arange(dim // 2)

    def turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = turning(fast), turning(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    slowed = np.clip((pair - first) / (last - first), 0, 1)
    blend = slowed / factor + 1 - slowed
    # The ramp's error: begin and difference are rounded to the spacing of the pair's number, then the division.
    off = np.where((slowed > 0) & (slowed < 1), pair / (last - first) + 3, 0.0) * (1 - 1 / factor) / blend
    scale = 0.1 * math.log(factor) + 1 if scale is None else scale
    return Frequencies(plain.inverse * blend, plain.roundings + off + 4, scale)


def longrope(base: float, dim: int, factors: Sequence[float], original: int, longest: int) -> Frequencies:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each pair has its own factor."""
    plain = default(base, dim)
    scale = math.sqrt(1 + math.log(longest / original) / math.log(original))
    return Frequencies(plain.inverse / np.array(factors), plain.roundings + 2, scale)


def temperature(
    positions: Int[np.ndarray, " T"], period: float, rate: float, *, offset: int = 1
) -> Float[np.ndarray, " T"]:
    """Return Llama 4's factor of the queries of layers without rotation (Ministral 3: `offset` 0, all layers)."""
    return 1 + rate * np.log1p(np.floor((positions + offset) / period))

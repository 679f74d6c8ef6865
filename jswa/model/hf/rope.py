"""Parsing of rotary embeddings: the three forms of config.json to inverse frequencies.

(a) old hub: rope_theta and rope_scaling {type | rope_type, …}; (b) version 5, flat: rope_parameters {…};
(c) version 5, by layer type: rope_parameters {full_attention: {…} | null, sliding_attention: {…}}.
Scaling is computed in float32 wherever transformers does so, because distant positions would differ otherwise.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float

from jswa.architecture import Rope
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.common import Usual
from jswa.model.hf.fields import Fields
from jswa.storage.json_object import shown

_KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


def parse_rope(
    u: Usual,
    *,
    layer_type: str | None = None,
    head_dim: int | None = None,
    theta_key: str = "rope_theta",
    theta: float = 10_000.0,
    scaled: bool = True,
    default: dict[str, Any] | None = None,
    partial: float | None = None,
    interleaved: bool = False,
    aliases: dict[str, str] | None = None,
    base: float | None = None,
) -> Rope:
    """Return the rotary embedding of a layer type.

    Args:
        layer_type: its name in nested rope_parameters.
        theta_key, theta: key of this layer type's base in the old form, and the family's default.
        scaled: whether rope_scaling of the old form applies to this layer type.
        default: parameters of the family, for configs that have none.
        partial: the family's default share of rotated dimensions. None if the family rotates all dimensions, because
            transformers then ignores the key.
        interleaved: whether the family pairs dimensions (2i, 2i + 1).
        aliases: the family's other names of rope types.
        base: overrides the config's base, for families that list a base per layer.

    Raises:
        UnsupportedModel: an odd number of dimensions would be rotated, or more than a head has, or a share of them by a
            type that has none.
        CheckpointError: a value is wrong, or no frequencies can be computed from it.
    """
    fields, head_dim = u.fields, head_dim or u.head_dim
    where, table, nested = _parameters(fields, layer_type, scaled=scaled)
    if not table and default is not None:
        table = default
    rope = Fields(table, where)
    theta = rope.number("rope_theta", fields.number(theta_key, theta))
    theta = theta if base is None else Fields({"base": base}, where).number("base", None)
    kind = rope.string("rope_type", rope.string("type", "default"))
    kind = (aliases or {}).get(kind, kind)
    given = rope.share("partial_rotary_factor", fields.share("partial_rotary_factor", partial))
    dim = head_dim if partial is None or kind == "proportional" else int(head_dim * (given or 1.0))
    if dim % 2 or dim < 2 or dim > head_dim:
        raise UnsupportedModel(f"{where}: a head size of {dim} cannot be rotated: must be even")
    if partial is None and kind not in ("default", "dynamic", "proportional") and (given or 1.0) != 1.0:
        raise UnsupportedModel(f"{where}: partial_rotary_factor with rope_type = {shown(kind)} is not implemented")
    original = fields.optional_integer("original_max_position_embeddings", None) or rope.integer(
        "original_max_position_embeddings", u.max_position
    )
    try:
        with np.errstate(all="ignore"):
            if kind == "longrope":
                return _longrope(rope, theta, dim, u.max_position, original, interleaved=interleaved)
            truncate = nested or rope.boolean("truncate", True)  # transformers reads it only in flat parameters
            share = 1.0 if given is None else given
            inv_freq, scale = _frequencies(
                rope, kind, theta, dim, u.max_position, original, share=share, truncate=truncate
            )
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(f"{where} = {shown(table)}: frequencies cannot be computed: {error}") from error
    return _rope(rope, inv_freq, scale, interleaved)


def _rope(rope: Fields, inv_freq: Float[np.ndarray, " n"], scale: float, interleaved: bool) -> Rope:
    with np.errstate(over="ignore"):
        finite = np.isfinite(np.array([*inv_freq, scale]).astype(np.float32)).all()
    if not finite:
        raise CheckpointError(f"{rope.where} = {shown(rope.raw)}: frequencies must be finite in float32")
    return Rope(tuple(inv_freq.astype(np.float32).tolist()), scale, interleaved)


def _inverse(theta: float, dim: int) -> Float[np.ndarray, " n"]:
    """Return theta^(-2i / dim), rounded once: powers in float32 are off by up to 0.12 radians at 1M tokens."""
    return (theta ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)


def _frequencies(
    rope: Fields,
    kind: str,
    theta: float,
    dim: int,
    max_position: int,
    original: int,
    *,
    share: float,
    truncate: bool,
) -> tuple[Float[np.ndarray, " n"], float]:
    """Return inverse frequencies, and the factor of cos and sin."""
    inv_freq = _inverse(theta, dim)
    # "dynamic" differs from "default" only beyond max_position_embeddings, which max_model_len never exceeds.
    if kind in ("default", "dynamic"):
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / np.float32(rope.number("factor", None)), 1.0
    if (
        kind == "proportional"
    ):  # gemma4: pairs are (i, i + D / 2), and only the first ones rotate, at the frequencies of the whole head
        rotated = min(int(share * dim // 2), dim // 2)
        rest = np.zeros(dim // 2 - rotated, np.float32)
        return np.concatenate([inv_freq[:rotated], rest]) / np.float32(rope.number("factor", 1.0)), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope, original), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, theta, max_position, original, truncate=truncate)
    raise UnsupportedModel(f"{rope.where}: rope_type = {shown(kind)}: must be one of {', '.join(_KINDS)}")


def _longrope(rope: Fields, theta: float, dim: int, max_position: int, original: int, *, interleaved: bool) -> Rope:
    """Return LongRoPE's factors up to the original length and beyond it (Ding et al. 2024, arXiv 2402.13753)."""
    factor = rope.optional_number("factor", None) or max_position / original
    scale = rope.optional_number("attention_factor", None)
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    sets = []
    for name in ("short", "long"):
        factors = rope.numbers(f"{name}_factor", dim // 2)
        mscale = rope.optional_number(f"{name}_mscale", None)  # phimoe
        inv_freq = _inverse(theta, dim) / np.array(factors, np.float32)
        sets.append(_rope(rope, inv_freq, scale if mscale is None else mscale, interleaved))
    return dataclasses.replace(sets[0], original=original, beyond=sets[1])


def _parameters(fields: Fields, layer_type: str | None, *, scaled: bool) -> tuple[str, dict[str, Any], bool]:
    """Return the name of the parameters in errors, the parameters, and whether they are nested by layer type."""
    parameters = fields.table("rope_parameters")
    scaling = fields.table("rope_scaling") if scaled else {}
    if layer_type is None:
        if scaling or not parameters:
            return f"{fields.where}: rope_scaling", scaling, False
        return f"{fields.where}: rope_parameters", parameters, False
    nested = Fields(parameters, f"{fields.where}: rope_parameters")
    return f"{nested.where}.{layer_type}", nested.table(layer_type) | scaling, True


def _llama3(inv_freq: Float[np.ndarray, " n"], rope: Fields, original: int) -> Float[np.ndarray, " n"]:
    """Return Llama 3.1's frequencies: long wavelengths are stretched by `factor`, medium ones are blended."""
    factor = rope.number("factor", None)
    low, high = rope.number("low_freq_factor", None), rope.number("high_freq_factor", None)
    wavelength = 2 * math.pi / inv_freq.astype(np.float64)
    # If high = low, no wavelength is blended, and the result of the division is not used.
    smooth = (original / wavelength - low) / np.float64(high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    out = np.where(wavelength > original / low, inv_freq / factor, blended)
    return np.where(wavelength < original / high, inv_freq, out).astype(np.float32)


def _yarn(
    inv_freq: Float[np.ndarray, " n"],
    rope: Fields,
    theta: float,
    max_position: int,
    original: int,
    *,
    truncate: bool,
) -> tuple[Float[np.ndarray, " n"], float]:
    """Return inverse frequencies and scale of YaRN (Peng et al. 2023, arXiv 2309.00071)."""
    dim = 2 * len(inv_freq)
    factor = rope.optional_number("factor", None) or max_position / original
    mscale, mscale_all = rope.optional_number("mscale", None), rope.optional_number("mscale_all_dim", None)
    scale = rope.optional_number("attention_factor", None)
    if scale is None:
        scale = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(rope.number("beta_fast", 32.0))
    high = correction(rope.number("beta_slow", 1.0))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), scale


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

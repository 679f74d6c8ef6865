"""Rotary embeddings: from llama.cpp's metadata and factors to the keys of config.json."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float32

from jswa.errors import UnsupportedModel
from jswa.gguf.families.keys import Model
from jswa.gguf.file.rows import vector
from jswa.storage.json_object import shown

FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3 = (
    (1.0, 4.0, 8192),
    (1.0, 1.0, 8192),
)  # low, high, original length of released models
_NEAR = 2e-6  # of factors: they are float32


def rope(m: Model, head_dim: int, *, local_base: bool = False) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` of a model that rotates whole heads.

    Args:
        local_base: sliding layers have a base of their own, which the caller reads.

    Raises UnsupportedModel if the file rotates a part of a head, or scales in a way that jswa does not compute, or has
    a second base.
    """
    m.requires("rope.dimension_count", head_dim)
    found = rope_of(m, head_dim)
    if not local_base:
        m.requires("rope.freq_base_swa", found["rope_theta"])
    return found


def rope_by_type(m: Model, head_dim: int, full: int, local: int, *, factors: int | None = None) -> dict[str, Any]:
    """Return `rope_parameters` of a model whose sliding layers have their own base, and no scaling.

    Args:
        full, local: how many numbers of a head full and sliding layers rotate.
        factors: for how many numbers the file has factors, if not for those that full layers rotate.

    Raises UnsupportedModel as `rope` does.
    """
    found = rope_of(m, factors or full)
    theta = found["rope_theta"]
    parameters = {
        "full_attention": {"rope_type": "default", **(found["rope_scaling"] or {}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", theta)},
    }
    for kind, rotated in (("full_attention", full), ("sliding_attention", local)):
        if rotated != head_dim:
            parameters[kind]["partial_rotary_factor"] = share(rotated, head_dim)
    return {"rope_parameters": parameters}


def share(rotated: int, head_dim: int) -> float:
    """Return the share of a head that is rotated, so that the share of `head_dim`, rounded down, is `rotated`."""
    found = rotated / head_dim
    return found if int(found * head_dim) == rotated else math.nextafter(found, 1.0)


def rope_of(m: Model, rotated: int) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`. Raises UnsupportedModel.

    `rotated`: for how many numbers of a head the file has factors.
    """
    theta = m.number("rope.freq_base", 10_000.0)
    scaling = _scaling(m)
    if FACTORS in m.tensors:
        if scaling is not None:
            raise UnsupportedModel(
                f"{m.where}: {FACTORS} with {m.arch}.rope.scaling.type: must have only one of the two"
            )
        scaling = _of_factors(vector(m.tensors[FACTORS], rotated // 2), theta, rotated)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _scaling(m: Model) -> dict[str, Any] | None:
    """Return `rope_scaling`, or None if the metadata has none."""
    kind = m.text("rope.scaling.type", "linear")
    factor = m.optional("rope.scaling.factor")
    old = m.optional("rope.scale_linear")  # the earlier name
    factor = old if factor is None else factor
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or factor is None:
        raise UnsupportedModel(f"{m.where}: {m.arch}.rope.scaling.type = {shown(kind)}: must be none, linear or yarn")
    m.requires("rope.scaling.yarn_ext_factor", 1.0)
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": m.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": m.number("rope.scaling.yarn_beta_slow", 1.0),
        "original_max_position_embeddings": m.integer("rope.scaling.original_context_length"),
    }
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        attention = m.optional(key)
        # What transformers computes itself is left to it: the file has it in float32 only.
        if attention is not None and not math.isclose(attention, 0.1 * math.log(factor) + 1, rel_tol=_NEAR):
            found["attention_factor"] = attention
    return found


def _of_factors(factors: Float32[np.ndarray, " n"], theta: float, dim: int) -> dict[str, Any]:
    """Return the scaling that divides the frequencies by these factors: llama3's if it gives them, else the factors.

    Llama 3's parameters are not in the file. Two blended factors give them up to one number, which has no effect.
    """
    wavelengths = (2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
    factor = float(str(factors.max()))
    for low, high, original in (*_LLAMA3, *_fitted(factors, wavelengths, factor)):
        if np.allclose(factors, _llama3(wavelengths, factor, low, high, original), rtol=_NEAR, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    each = [float(one) for one in factors]
    return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0, "factor": 1.0}


def _fitted(
    factors: Float32[np.ndarray, " n"], wavelengths: Float32[np.ndarray, " n"], factor: float
) -> list[tuple[float, float, int]]:
    """Return low, high and original length that give the blended factors, for low = 1 (a list of none or one).

    One blended factor tells the original length only if high is the usual 4.
    """
    blended = (factors > 1.0) & (factors < factor)
    if not blended.any():
        return []
    # A blended frequency is 1 / f = (1 - s) / factor + s, where s = (original / wavelength - low) / (high - low).
    smooth = (1 / factors[blended].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    inverse = 1 / wavelengths[blended].astype(np.float64)
    high = 4.0
    if len(smooth) > 1:
        _, intercept = np.polyfit(inverse, smooth, 1)
        high = round(1 - 1 / intercept, 3) if intercept < 0 else 0.0
    if not 1 < high < 1e6:
        return []
    original = float(np.median((smooth * (high - 1) + 1) / inverse))
    return [(1.0, high, round(original))] if 1 <= original < 2**31 else []


def _llama3(
    wavelengths: Float32[np.ndarray, " n"], factor: float, low: float, high: float, original: int
) -> Float32[np.ndarray, " n"]:
    """Return the factors of Llama 3.1's scaling."""
    with np.errstate(all="ignore"):
        smooth = (original / wavelengths - low) / np.float32(high - low)
        blended = 1 / ((1 - smooth) / factor + smooth)
    out = np.where(wavelengths > original / low, np.float32(factor), blended)
    return np.where(wavelengths < original / high, np.float32(1), out).astype(np.float32)

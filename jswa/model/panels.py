"""Lays the matrices of a model out in the panels that the CPU's products read."""

import math
import re
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jswa.model.transformer import Linear
from pallas_kernels.cpu.products import PANEL, QUAD, fits_quads, panel_count, to_panels, to_quads

# The last names are those of drafters.
_MATRIX = re.compile(r"(\.(attention\.(qkv|out|gate)|gate_up|down|eh_proj)|^(lm_head|fc|pre|post))(\.values|\.codes)?$")
_EXPERTS = re.compile(r"\.(gate_up|down)(\.values|\.codes)?$")
_ALIGNMENT = 64  # bytes; XLA uses such an array without a copy


def lay_out(params: dict[str, Array], *, linear: bool, experts: bool) -> None:
    """Replace matrices by their panels, one after the other: numbers, values of 8 bits or codes of 4 bits.

    A matrix [*E, K, C] becomes [*E, P, K, 32]; `transformer.bind` sees it from the number of axes. Where the processor
    multiplies bytes, codes become quads [*E, P, K / 8, 128], and what groups have [*E, P, G, 32].

    Args:
        params: of one device.
        linear: the matrices of linear layers and the head, if it is not the embedding.
        experts: the stacked matrices of experts. Those in MXFP4 stay, since their outputs are rows.
    """
    for name in [name for name in params if _MATRIX.search(name)]:
        stacked = _EXPERTS.search(name) is not None and params[name].ndim == 3
        if not (experts if stacked else linear):
            continue
        base = name.removesuffix(".codes")
        quads = base != name and _fits_quads(params, base)
        params[name] = _panels(params.pop(name), quads)
        for field in (f"{base}.group_scales", f"{base}.group_zeros") if quads else ():
            params[field] = _panels(params.pop(field), False)


def has_other_products(params: Mapping[str, Array], linear: Linear) -> bool:
    """Return whether XLA runs products with some of the matrices: of routers, adapters and the like, or with all."""
    plain = {name for name, value in params.items() if value.ndim == 2 and value.dtype.itemsize == 2}
    return bool(plain - {"embed"}) or linear == "xla"


def _fits_quads(params: Mapping[str, Array], name: str) -> bool:
    inputs, groups = 2 * params[f"{name}.codes"].shape[-2], params[f"{name}.group_scales"].shape[-2]
    return fits_quads(inputs, groups, table=f"{name}.group_of" in params)


def _panels(matrix: Array, quads: bool) -> Array:
    *lead, rows, outputs = matrix.shape
    shape = (rows // QUAD, QUAD * PANEL) if quads else (rows, PANEL)
    out = _empty((*lead, panel_count(outputs), *shape), np.dtype(matrix.dtype))
    (to_quads if quads else to_panels)(np.asarray(matrix), out)
    panels: Array = jax.device_put(out, matrix.sharding, may_alias=True)
    return panels


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)

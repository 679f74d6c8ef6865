"""Names of parameters: which of them are matrices, in which form, and whose products read them.

A matrix N in 8 bits is N.values and N.scales, or N.rows in place of N.values with outputs first; with a scale for each
block N.values and N.block_scales, and with one for each group of inputs N.values and N.group_scales. In integers of 4
bits it is N.codes, N.group_scales, N.group_zeros and maybe N.group_of. In tiles for Hopper N.tiles takes the place of
N.values, and N.int4_tiles that of all of the integers'.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from pallas_kernels import Linear
from pallas_kernels.experts.dense import fits
from pallas_kernels.experts.eight_bits import TILE

LINEAR = re.compile(r"\.(attention\.(qkv|out|gate)|gate_up|down)$")
ENDS = ("embed", "lm_head")
CODES, SCALES, ZEROS, GROUP_OF = "codes", "group_scales", "group_zeros", "group_of"
BLOCK_SCALES = "block_scales"
INT4_TILES, TILES = "int4_tiles", "tiles"
OUTPUTS_FIRST = ".rows"  # ends the name of a matrix in float8 with outputs first
_ROUTER = re.compile(r"\.(mlp|moe)\.router$")
# They have two axes, and no product on XLA.
_NO_FACTOR = re.compile(r"((^|^per_layer\.)embed(\.values)?|_bias|scales|\.group_zeros)$")
_OF_LORA = re.compile(r"\.lora_[ab]$")  # of experts, with three axes, too


def fp8_names(params: Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers' matrices that are held in float8, inputs first; experts are none."""
    values = {name.removesuffix(".values"): value for name, value in params.items() if name.endswith(".values")}
    return [
        name for name, value in values.items() if LINEAR.search(name) and (value.ndim, value.dtype) == (2, np.uint8)
    ]


def runs_on_mosaic(name: str, shape: tuple[int, ...], *, alone: bool) -> bool:
    """Return whether Hopper's kernel multiplies by a matrix in 16 bits, if it is the backend of linear layers.

    `alone`: in an engine whose rows are computed alone. There it has routers, whose outputs are padded, and a head that
    fits too; elsewhere XLA has them.
    """
    if LINEAR.search(name):
        return True
    return alone and ((bool(_ROUTER.search(name)) and shape[0] % TILE == 0) or (name == "lm_head" and fits(*shape)))


def linear_in_16_bits(params: Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers' matrices in the type of the activations; experts are none."""
    return [name for name, value in params.items() if LINEAR.search(name) and value.ndim == 2]


def has_other_products(params: Mapping[str, Array], linear: Linear) -> bool:
    """Return whether XLA runs products with some matrices of 16 bits: of adapters and the like, or with all."""
    return linear != "cpu" or any(params[name].dtype.itemsize == 2 for name in matrices_on_xla(params))


def matrices_on_xla(params: Mapping[str, Any], linear: Linear = "cpu") -> list[str]:
    """Return the names of the matrices with which XLA runs products, in an engine whose rows are computed alone.

    `linear`: the backend for which the parameters are laid out: "cpu" or "mosaic".
    """
    found = [n for n, value in params.items() if (value.ndim == 2 and not _NO_FACTOR.search(n)) or _OF_LORA.search(n)]
    if linear == "cpu":
        return found
    found = [name for name in found if not runs_on_mosaic(name, params[name].shape, alone=True)]
    if any(name.split(".")[0] == "lm_head" for name in params):
        return found
    return found if "embed" in params and fits(*params["embed"].shape) else [*found, "embed"]

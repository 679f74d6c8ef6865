"""Matrices of experts in MXFP4: N.blocks and N.scales, outputs first; or for Hopper's kernels in tiles.

Those that read tiles have N.words and N.scales, and the one that unpacks meanwhile N.joined.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jswa.forms.base.form import Form
from pallas_kernels.experts.mxfp4 import BLOCK, TILE, WORD_LINES, Mxfp4, Mxfp4Joined, Mxfp4Tiles

Storage = Literal["plain", "mxfp4", "mxfp4_tiles", "mxfp4_joined"]
MXFP4 = Form(("blocks", "scales"), lambda _, arrays: Mxfp4(arrays["blocks"], arrays["scales"]))
MXFP4_TILES = Form(("words", "scales"), lambda _, arrays: Mxfp4Tiles(arrays["words"], arrays["scales"]))
MXFP4_JOINED = Form(("joined",), lambda _, arrays: Mxfp4Joined(arrays["joined"]))


def stored_shapes(storage: Storage, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and types of the arrays that hold a stack [E, K, C], by their ends."""
    experts, inputs, columns = shape
    tiles = experts, columns // TILE, inputs // TILE
    kinds: dict[Storage, dict[str, tuple[tuple[int, ...], str]]] = {
        "mxfp4": {
            "blocks": ((experts, columns, inputs // 2), "uint8"),
            "scales": ((experts, columns, inputs // BLOCK), "uint8"),
        },
        "mxfp4_joined": {"joined": ((*tiles, WORD_LINES + 1, TILE), "int16")},
        "mxfp4_tiles": {"scales": ((*tiles, TILE), "int16"), "words": ((*tiles, 4, 128), "int32")},
    }
    arrays = kinds[storage].items()
    return {end: jax.ShapeDtypeStruct(size, jnp.dtype(kind)) for end, (size, kind) in arrays}  # type: ignore[no-untyped-call]

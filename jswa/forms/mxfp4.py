"""Matrices of experts in MXFP4: N.blocks and N.scales, outputs first; or for Hopper's kernels in tiles.

Those that read tiles have N.words and N.scales, and the one that unpacks meanwhile N.joined.
"""

from jswa.forms.base.form import Counts, Form, Spec
from pallas_kernels.experts.mxfp4 import BLOCK, TILE, WORD_LINES, Mxfp4, Mxfp4Joined, Mxfp4Tiles


def _specs(_: str, shape: tuple[int, ...], __: Counts) -> dict[str, Spec]:
    *lead, inputs, outputs = shape
    blocks, scales = (*lead, outputs, inputs // 2), (*lead, outputs, inputs // BLOCK)
    return {"blocks": Spec(blocks, ("uint8",)), "scales": Spec(scales, ("uint8",))}


def _specs_of_tiles(_: str, shape: tuple[int, ...], __: Counts) -> dict[str, Spec]:
    tiles = _tiles(shape)
    return {"scales": Spec((*tiles, TILE), ("int16",)), "words": Spec((*tiles, 4, 128), ("int32",))}


def _specs_of_joined(_: str, shape: tuple[int, ...], __: Counts) -> dict[str, Spec]:
    return {"joined": Spec((*_tiles(shape), WORD_LINES + 1, TILE), ("int16",))}


def _tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, inputs, outputs = shape
    return *lead, outputs // TILE, inputs // TILE


MXFP4 = Form(
    ("blocks", "scales"),
    lambda _, arrays: Mxfp4(arrays["blocks"], arrays["scales"]),
    specs=_specs,
    scheme="mxfp4",
    experts=("xla", "cpu", "mosaic", "mosaic_overlap"),
)
MXFP4_TILES = Form(
    ("words", "scales"),
    lambda _, arrays: Mxfp4Tiles(arrays["words"], arrays["scales"]),
    specs=_specs_of_tiles,
)
MXFP4_JOINED = Form(("joined",), lambda _, arrays: Mxfp4Joined(arrays["joined"]), specs=_specs_of_joined)

"""Resize images and cut them into patches, with the numbers of transformers' `Gemma4ImageProcessorPil`."""

import math
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from jswa.images.picture import Geometry, Picture, picture_of

if TYPE_CHECKING:
    from PIL import Image


def prepare(image: "Image.Image", geometry: Geometry) -> Picture:
    """Return the picture of an RGB image: resized, and cut into patches."""
    return picture_of(*cut(image, geometry), geometry)


def cut(image: "Image.Image", geometry: Geometry) -> tuple[UInt8[np.ndarray, "N P"], int]:
    """Return the patches of an RGB image, which is resized, and the number of them in a row."""
    from PIL.Image import Resampling

    patch = geometry.patch
    columns, rows = fitted(*image.size, geometry)
    if image.size != (columns * patch, rows * patch):
        image = image.resize((columns * patch, rows * patch), Resampling.BICUBIC)
    pixels = np.asarray(image).reshape(rows, patch, columns, patch, 3)
    return pixels.swapaxes(1, 2).reshape(rows * columns, -1), columns


def fitted(width: int, height: int, geometry: Geometry) -> tuple[int, int]:
    """Return the columns and rows of patches of an image of that many pixels.

    A token has `geometry.pooling` patches each way. The image has as many tokens as its shape allows, each way rounded
    down. A side that is too short for one token has one; the other side then has as many as the one fits into it.
    """
    side = geometry.patch * geometry.pooling  # pixels of a token
    scale = math.sqrt(geometry.most_tokens * side**2 / (width * height))
    wide, high = int(scale * width / side), int(scale * height / side)
    if high == 0:
        wide, high = min(width // height, geometry.most_tokens), 1
    elif wide == 0:
        wide, high = 1, min(height // width, geometry.most_tokens)
    assert 0 < wide * high <= geometry.most_tokens
    return wide * geometry.pooling, high * geometry.pooling

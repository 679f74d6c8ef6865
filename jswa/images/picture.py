"""An image as the tower of a model reads it."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8


class Picture(NamedTuple):
    """An image that has been decoded, resized and cut into patches.

    Attributes:
        patches: the pixels of each patch, row by row, each pixel as red, green and blue.
        positions: column and row of each patch.
        tokens: the number of tokens that stand for the image in a prompt.
        digest: 32 bytes, of the pixels and the shape of the resized image.
    """

    patches: UInt8[np.ndarray, "N P"]
    positions: Int[np.ndarray, "N 2"]
    tokens: int
    digest: bytes


class Geometry(NamedTuple):
    """How a model cuts an image.

    Attributes:
        patch: pixels of a patch, each way.
        pooling: patches that become one token, each way.
        most_tokens: tokens of an image at most.
    """

    patch: int = 16
    pooling: int = 3
    most_tokens: int = 280

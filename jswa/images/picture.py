"""An image as the tower of a model reads it, and how a checkpoint says that images are cut."""

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from jswa.errors import CheckpointError

_BUDGETS = (70, 140, 280, 560, 1_120)  # tokens of an image for which Gemma 4 is trained
_MOST_PATCH, _MOST_POOLING = 128, 16
_CUBIC = 3  # Pillow's number of the filter
# What `decode` and `prepare` do, in the words of a checkpoint's image processor.
_DONE = {"do_convert_rgb": True, "do_resize": True, "resample": _CUBIC, "do_rescale": True, "do_normalize": False}


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


def picture_of(patches: UInt8[np.ndarray, "N P"], columns: int, geometry: Geometry) -> Picture:
    """Return the picture of an image's patches, which are in rows of `columns`. Keeps the array."""
    rows = len(patches) // columns
    positions = np.stack([np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns)], axis=1)
    digest = hashlib.blake2b(digest_size=32, person=b"jswa picture")
    digest.update(struct.pack("<4I", columns, rows, geometry.patch, geometry.pooling))
    digest.update(np.ascontiguousarray(patches))
    return Picture(patches, positions.astype(np.int32), len(patches) // geometry.pooling**2, digest.digest())


def geometry_of(processor_config: Mapping[str, Any] | None, vision: Mapping[str, Any]) -> Geometry:
    """Return how a checkpoint cuts images.

    Raises CheckpointError, which names the field, if the checkpoint prepares images in another way than
    `jswa.images.prepare`, or contradicts itself.

    Args:
        processor_config: of processor_config.json, or of preprocessor_config.json; None if there is neither.
        vision: the vision_config of config.json.
    """
    said = {} if processor_config is None else processor_config.get("image_processor", processor_config)
    if not isinstance(said, Mapping):
        raise CheckpointError(f"image_processor must be an object, not {said!r:.80}")
    kind = said.get("image_processor_type", "Gemma4ImageProcessor")
    if not str(kind).startswith("Gemma4ImageProcessor"):
        raise CheckpointError(f"image_processor_type = {kind!r:.80}: must be Gemma4ImageProcessor")
    for field, done in _DONE.items():
        if said.get(field, done) not in (done, None):
            raise CheckpointError(f"{field} = {said[field]!r:.80}: must be {done!r}")
    factor = said.get("rescale_factor", 1 / 255)
    if not isinstance(factor, int | float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise CheckpointError(f"rescale_factor = {factor!r:.80}: must be 1 / 255")
    tokens = said.get("max_soft_tokens", Geometry().most_tokens)
    if tokens not in _BUDGETS:
        raise CheckpointError(f"max_soft_tokens = {tokens!r:.80}: must be one of {', '.join(map(str, _BUDGETS))}")
    patch = _agreed("patch_size", said, vision, Geometry().patch, _MOST_PATCH)
    pooling = _agreed("pooling_kernel_size", said, vision, Geometry().pooling, _MOST_POOLING)
    return Geometry(patch, pooling, int(tokens))


def _agreed(field: str, said: Mapping[str, Any], vision: Mapping[str, Any], default: int, most: int) -> int:
    """Return a number that the processor and the tower must agree on. Raises CheckpointError."""
    in_tower = vision.get(field, default)
    value = said.get(field, in_tower)
    if type(value) is not int or not 1 <= value <= most:
        raise CheckpointError(f"{field} = {value!r:.80}: must be a whole number from 1 to {most}")
    if value != in_tower:
        raise CheckpointError(f"{field} = {value} of the image processor: vision_config has {in_tower!r:.80}")
    return value

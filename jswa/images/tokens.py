"""The tokens of images in a prompt.

    <|image|>          one in a text, as chat templates write it
    begin i₀ … iₙ end  in the prompt of a request: n + 1 soft tokens, whose ids say which image they are

The id of a soft token is negative, and is made of the digest of the image. The prefix cache, saved caches and the disk
compare ids of tokens, so that they share the KV of an image with that image only.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int

from jswa.errors import InvalidPrompt
from jswa.images.picture import Geometry
from jswa.plan import ImageRows, PlacedImage

_LAST = -2  # -1 is another token's mark in steps (`FROM_DEVICE`)


class ImageTokens(NamedTuple):
    """Token ids of a model: the one that stands for an image, and those before and after it in a prompt."""

    image: int
    begin: int
    end: int


class ImageInput(NamedTuple):
    """What makes prompts of images for a model."""

    geometry: Geometry
    tokens: ImageTokens


class Counted(Protocol):
    """An image whose tokens can be placed; `Picture` is one."""

    @property
    def tokens(self) -> int:
        """The number of its soft tokens."""
        ...

    @property
    def digest(self) -> bytes:
        """The digest of its pixels."""
        ...


def image_ids(digest: bytes, count: int) -> Int[np.ndarray, " n"]:
    """Return the ids of an image's soft tokens, each in [-2**31, -2].

    Images of different digests differ in each id but for one in 2**31, so that some thirty bits tell them apart at the
    first token, and as many more at each further one.
    """
    words = np.frombuffer(hashlib.shake_128(b"jswa image" + digest).digest(4 * count), np.uint32)
    ids = -(words % (2**31 - 1)).astype(np.int64) + _LAST
    return ids.astype(np.int32)


def placed(
    ids: Int[np.ndarray, " T"], images: Sequence[Counted], tokens: ImageTokens, field: str = "prompt"
) -> Int[np.ndarray, " P"]:
    """Return a prompt in which each token of an image has become that image's soft tokens, between begin and end.

    Raises InvalidPrompt, which names `field`, unless the prompt has a token for each image.
    """
    at = np.flatnonzero(ids == tokens.image)
    if len(at) != len(images):
        raise InvalidPrompt(field, len(at), f"must have one token of an image for each of its {len(images)} images")
    parts, done = [], 0
    for place, image in zip(at.tolist(), images, strict=True):
        soft = image_ids(image.digest, image.tokens)
        parts += [ids[done:place], np.array([tokens.begin], np.int32), soft, np.array([tokens.end], np.int32)]
        done = place + 1
    return np.concatenate([*parts, ids[done:]]).astype(np.int32)


def placed_images(prompt: Int[np.ndarray, " P"], images: Sequence[ImageRows]) -> tuple[PlacedImage, ...]:
    """Return the images of a prompt at their places. Raises InvalidPrompt unless the prompt has their tokens, in order.

    Tokens of no image are left to the caller.
    """
    found, start = [], 0
    for index, image in enumerate(images):
        ids = image_ids(image.digest, len(image.rows))
        starts = start + np.flatnonzero(prompt[start:] == ids[0])
        at = next((at for at in starts.tolist() if np.array_equal(prompt[at : at + len(ids)], ids)), None)
        if at is None:
            raise InvalidPrompt("prompt", f"image {index}", "must have the tokens of its images, in their order")
        found.append(PlacedImage(at, image.rows))
        start = at + len(ids)
    return tuple(found)


def shown(ids: Int[np.ndarray, " P"], tokens: ImageTokens | None) -> Int[np.ndarray, " P"]:
    """Return a prompt as callers see it: each soft token is the model's token of an image."""
    return ids if tokens is None else np.where(ids < 0, tokens.image, ids).astype(np.int32)

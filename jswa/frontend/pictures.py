"""The images that callers of `LLM` give: objects of Pillow, files, paths, or data: URLs. Nothing is fetched."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.errors import InvalidImage, InvalidPrompt
from jswa.frontend.engine_protocol import EngineLike
from jswa.images.decode import decode, in_rgb
from jswa.images.picture import Geometry, Picture
from jswa.images.prepare import prepare
from jswa.images.tokens import placed
from jswa.plan import ImageRows
from jswa.text.chat_template import Message
from jswa.text.inputs import Prompt

_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII | re.IGNORECASE)
_SOURCES = ("image", "image_url", "image_pil", "url", "path")  # keys of a part that has an image, in several libraries
_TEXT_ONLY = "must be text: this model runs on text only (docs/models.md says which read images)"


def with_images(
    engine: EngineLike, prompt: Prompt, ids: Int[np.ndarray, " T"], salt: str
) -> tuple[Int[np.ndarray, " P"], tuple[ImageRows, ...]]:
    """Return a prompt's tokens with the soft tokens of its images in place, and the rows of these images.

    A prompt has images as vLLM's: {"prompt": …, "multi_modal_data": {"image": one or several}}. Raises RequestError.
    """
    images = images_of(prompt)
    if not images:
        return ids, ()
    if engine.images is None:
        raise InvalidPrompt("multi_modal_data", f"{len(images)} images", _TEXT_ONLY)
    geometry, tokens = engine.images
    pictures = [picture_of(one, f"image {number}", geometry) for number, one in enumerate(images)]
    return placed(ids, pictures, tokens), engine.see(pictures, salt)


def images_of(prompt: Prompt) -> list[Any]:
    """Return the images that a prompt has in `multi_modal_data`. Raises InvalidPrompt."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if data is None:
        return []
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise InvalidPrompt("multi_modal_data", sorted(data) if isinstance(data, Mapping) else data, "has images only")
    given = data.get("image", [])
    return list(given) if isinstance(given, list | tuple) else [given]


def picture_of(image: Any, field: str, geometry: Geometry) -> Picture:
    """Return the picture of an image: an object of Pillow, the bytes or the path of a file, or a data: URL.

    Raises InvalidImage, which names `field`; ConfigError if Pillow is not installed.
    """
    if isinstance(image, Picture):
        return image
    if hasattr(image, "convert") and hasattr(image, "size"):
        return prepare(in_rgb(image), geometry)
    return prepare(decode(_bytes_of(image, field), field), geometry)


def without_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Return messages in which {"type": "image"} stands for each image, as templates take it, and the images.

    Raises InvalidPrompt if a part of such a type has no image.
    """
    images: list[Any] = []
    shown: list[Message] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            shown.append(message)
            continue
        parts: list[Any] = []
        for place, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") in _SOURCES:
                images.append(_image_of(part, f"messages[{index}].content[{place}]"))
                parts.append({"type": "image"})
            else:
                parts.append(part)
        shown.append({**message, "content": parts})
    return shown, images


def _image_of(part: Mapping[str, Any], field: str) -> Any:
    """Return the image of a part. Raises InvalidPrompt."""
    for key in _SOURCES:
        found = part.get(key)
        if isinstance(found, Mapping):
            found = found.get("url")
        if found is not None:
            return found
    raise InvalidPrompt(field, sorted(part), "must have an image")


def _bytes_of(image: Any, field: str) -> bytes:
    """Return the bytes of a file. Raises InvalidImage."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str) and (head := _DATA.match(image)):
        try:
            return base64.b64decode(image[head.end() :], validate=True)
        except binascii.Error as error:
            raise InvalidImage(field, "a data: URL", f"its base64 is wrong: {error}") from error
    if isinstance(image, str) and re.match(r"[a-z][a-z0-9+.-]+:", image, re.IGNORECASE):
        raise InvalidImage(field, image[:80], "must be a data: URL, a path, or an image: nothing is fetched")
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidImage(field, str(image)[:80], f"cannot be read: {error}") from error
    raise InvalidImage(field, type(image).__name__, "must be an image of Pillow, bytes, a path, or a data: URL")

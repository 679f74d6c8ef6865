"""The content of messages that OpenAI's protocols send: a string, or a list of parts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from ..http import limits
from ..http.errors import invalid, unsupported


@dataclass(frozen=True)
class ImagePart:
    """An image of a content. As JSON it is a part that a chat may send.

    Attributes:
        image_url: the URL of its file.
        part, field: where in the request the part and its URL are.
    """

    image_url: str
    part: str
    field: str
    type: Literal["image_url"] = "image_url"


Content = str | list[dict[str, str] | ImagePart]


def text_of(content: Any, param: str, kinds: Sequence[str]) -> str:
    """Return the text of a content. Its parts are joined by line ends, as in vLLM. Raises ApiError.

    Args:
        param: where the content stands in the request.
        kinds: types of parts that are text. A refusal, which an earlier answer may be, is text too.
    """
    found = content_of(content, param, kinds)
    assert isinstance(found, str)
    return found


def content_of(content: Any, param: str, kinds: Sequence[str], images: Sequence[str] = ()) -> Content:
    """Return the text of a content, as `text_of`, or its parts if it has an image. Raises ApiError.

    Args:
        images: types of parts that are images.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, "must be a string or a list of parts")
    if len(content) > limits.MAX_PARTS:
        raise invalid(param, f"has {len(content)} parts, at most {limits.MAX_PARTS} are allowed")
    return joined(_part(part, f"{param}[{index}]", kinds, images) for index, part in enumerate(content))


def joined(parts: Iterable[str | ImagePart]) -> Content:
    """Return parts as a content, in which texts that follow each other are joined by line ends."""
    found: list[dict[str, str] | ImagePart] = []
    text = ""
    for is_text, some in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            text = "\n".join(map(str, some))
            found.append({"type": "text", "text": text})
        else:
            found += [part for part in some if isinstance(part, ImagePart)]
    return found if any(isinstance(part, ImagePart) for part in found) else text


def images_in(messages: Iterable[dict[str, Any]]) -> list[ImagePart]:
    """Return the images of a conversation in their order."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list) for part in content if type(part) is ImagePart]


def _part(part: Any, param: str, kinds: Sequence[str], images: Sequence[str]) -> str | ImagePart:
    if isinstance(part, ImagePart) and images:
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in images:
        return _image(part, param)
    if kind != "refusal" and kind not in kinds:
        raise unsupported(f"{param}.type", f"only parts of type {', '.join((*kinds, *images))} are supported")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise invalid(f"{param}.{key}", "must be a string")
    return text


def _image(part: dict[str, Any], param: str) -> ImagePart:
    """Return an image whose URL is a string, or in an object."""
    if part.get("file_id") is not None:
        raise unsupported(f"{param}.file_id", "is not supported: send the image as image_url")
    url, field = part.get("image_url"), f"{param}.image_url"
    if isinstance(url, dict):
        url, field = url.get("url"), f"{field}.url"
    if not isinstance(url, str):
        raise invalid(field, "must be a string")
    return ImagePart(url, param, field)

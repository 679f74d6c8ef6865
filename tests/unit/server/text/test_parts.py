"""Content of messages: a string, or parts with text, which are joined, and images."""

from typing import Any

import msgspec
import pytest

from server.http import limits
from server.http.errors import ApiError
from server.text.parts import ImagePart, content_of, images_in, text_of


def test_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"type": "text", "text": ""}]
    assert text_of(parts, "content", ("text",)) == "a\nb\n"
    assert text_of("a", "content", ()) == "a"
    assert text_of([], "content", ()) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "content: must be a string or a list of parts"),
        ({"type": "text", "text": "a"}, "content: must be a string or a list of parts"),
        ([{}] * (limits.MAX_PARTS + 1), f"content: has {limits.MAX_PARTS + 1} parts, at most {limits.MAX_PARTS} are"),
        (["a"], r"content\[0\].type: only parts of type text, input_text are supported"),
        ([{"type": "image_url"}], r"content\[0\].type: only parts of type text, input_text are supported"),
        ([{"type": ["text"], "text": "a"}], r"content\[0\].type: only parts"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], r"content\[1\].text: must be a string"),
        ([{"type": "input_text", "text": 1}], r"content\[0\].text: must be a string"),
        ([{"type": "refusal", "text": "a"}], r"content\[0\].refusal: must be a string"),
    ],
)
def test_other_content_is_refused(content: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        text_of(content, "content", ("text", "input_text"))


def test_images_stand_between_texts_that_are_joined() -> None:
    one = ImagePart("data:a", "content[2]", "content[2].image_url")
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]
    parts: list[dict[str, Any]] = [*texts, {"type": "image_url", "image_url": "data:a"}]
    other = ImagePart("b", "content[4]", "content[4].image_url.url")
    parts += [{"type": "text", "text": "c"}, {"type": "image_url", "image_url": {"url": "b", "detail": "low"}}]
    expected = [{"type": "text", "text": "a\n"}, one, {"type": "text", "text": "c"}, other]
    assert content_of(parts, "content", ("text",), ("image_url",)) == expected
    assert content_of(expected, "elsewhere", ("text",), ("image_url",)) == expected
    assert images_in([{"content": "a"}, {"content": expected}, {}]) == [one, other]
    with pytest.raises(ApiError, match=r"content\[2\].type: only parts of type text are supported"):
        content_of(parts, "content", ("text",))


def test_an_image_is_a_part_of_a_chat_as_json() -> None:
    """So a stored conversation can be read again."""
    found = msgspec.json.decode(msgspec.json.encode([ImagePart("data:a", "x", "y")]))
    assert content_of(found, "content", ("text",), ("image_url",)) == [
        ImagePart("data:a", "content[0]", "content[0].image_url")
    ]

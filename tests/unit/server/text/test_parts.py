"""Content of messages: a string, or parts with text, which are joined."""

from typing import Any

import pytest

from server.http import limits
from server.http.errors import ApiError
from server.text.parts import text_of


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

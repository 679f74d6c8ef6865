"""Arguments of earlier calls: whatever a model or a client has written, templates get an object."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.text.history.arguments import RAW, call_arguments, text_arguments

_TEXTS = st.text(max_size=20) | st.text(alphabet='{}[]":,\\ud8019a0 ', max_size=30)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}), ("", {}), (" \n", {}), ("null", {}), ("{}", {}), ({}, {}), ('{"a": 1}', {"a": 1}),
        ({"a": [1]}, {"a": [1]}), ('{"a": 1, "a": 2}', {"a": 2}), ('{"a": ', {RAW: '{"a": '}), ("[1]", {RAW: "[1]"}),
        ("3", {RAW: "3"}), ('"x"', {RAW: '"x"'}), ("NaN", {RAW: "NaN"}), ('{"a": 1e999}', {RAW: '{"a": 1e999}'}),
        ('{"a": "\\ud800"}', {RAW: '{"a": "\\ud800"}'}), ([1], {RAW: "[1]"}), (3, {RAW: "3"}), (False, {RAW: "false"}),
        ({RAW: "[1]"}, {RAW: "[1]"}), ("[" * 9_999, {RAW: "[" * 9_999}),
        ('{"a":' * 101 + "{}" + "}" * 101, {RAW: '{"a":' * 101 + "{}" + "}" * 101}),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_arguments_are_an_object(given: Any, expected: dict[str, Any]) -> None:
    """What is no JSON object is kept as it came."""
    assert call_arguments(given) == expected


@given(_TEXTS)
def test_no_text_is_lost(text: str) -> None:
    """An object, or the text itself; and the text comes back."""
    found = call_arguments(text)
    if RAW in found:
        assert found == {RAW: text}
        assert text_arguments(found) == text
    else:
        assert (json.loads(text) or {}) == found if text.strip() else not found
    assert call_arguments(text_arguments(found)) == found


def test_an_object_of_the_clients_own_stays_as_it_is() -> None:
    """Only the text of an answer that was no object is taken out of `_raw`."""
    assert text_arguments('{"a": ') == '{"a": '
    for value in ({RAW: "{}"}, {RAW: 1}, {RAW: "[", "a": 1}, {"a": "é"}):
        assert json.loads(text_arguments(value)) == value

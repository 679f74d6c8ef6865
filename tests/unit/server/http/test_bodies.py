"""Parsing of large bodies (server/http/bodies.py): the same values as Python's own parser."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http import bodies, limits
from server.http.errors import ApiError

CHARACTERS = st.sampled_from(['"', "\\", "/", "\n", "a", "é", "語", "😀", "{", "]", ","])
TEXTS = st.text(CHARACTERS, max_size=12) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
IDS = st.lists(st.integers(0, 2**40), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | IDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
PROMPTS = TEXTS | IDS | st.lists(IDS | TEXTS, max_size=4) | st.none() | st.dictionaries(TEXTS, IDS, max_size=2)
FIELDS = st.fixed_dictionaries(
    {}, optional={"prompt": PROMPTS, "tokens": PROMPTS, "x": VALUES, "messages": VALUES, 'a"prompt': PROMPTS}
)


def plain(value: Any) -> Any:
    """Return a value with lists in place of arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(FIELDS, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([16, 17, 23, 2**16]))
def test_a_body_has_the_value_that_python_finds(
    fields: dict[str, Any], ascii_only: bool, indent: int | None, piece: int
) -> None:
    """The value does not depend on the lists and strings that are cut out, nor on the size of the pieces."""
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=indent).encode()
    assert plain(bodies.parse(body, piece)) == fields


@given(FIELDS, st.data())
def test_what_is_not_json_is_refused_as_by_msgspec(fields: dict[str, Any], data: st.DataObject) -> None:
    """The bodies have bytes removed, replaced or added at any position."""
    body = bytearray(json.dumps(fields).encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 2))] = data.draw(
        st.sampled_from([b"", b",", b"[", b"]", b'"', b"\\", b"1"])
    )
    try:
        wanted = msgspec.json.decode(bytes(body))
    except msgspec.DecodeError:
        with pytest.raises(ApiError):
            bodies.parse(bytes(body), 16)
        return
    try:
        found = plain(bodies.parse(bytes(body), 16))
    except ApiError as error:
        assert error.message == f"{error.param}: must be token ids"  # noqa: PT017 - a refusal is one of two right outcomes
    else:
        assert found == wanted


@pytest.mark.parametrize(
    "body", [b'{"prompt": [%b]}' % ids for ids in (b"1,,2", b"1,2,", b",1,2", b"1 2,3", b"01,2,3", b"1,2,-", b"1,2,")]
)
def test_lists_of_ids_are_parsed_strictly(body: bytes) -> None:
    for piece in (16, 2**16):
        with pytest.raises(ApiError, match="not valid JSON"):
            bodies.parse(body + b" " * 100, piece)


@pytest.mark.parametrize("item", [b"1.5", b"true", b"null", b"99999999999999999999"])
def test_a_list_of_ids_with_something_else_is_refused_by_name(item: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        bodies.parse(b'{"allowed_token_ids": [1, 2, 3, %b]}' % item, 16)
    assert refused.value.param == "allowed_token_ids"


def test_only_so_many_values_may_be_in_a_body_besides_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of every type count; commas in strings do not count."""
    monkeypatch.setattr(limits, "MAX_VALUES", 1_000)
    for item in ("{}", "[]", "1", '""', "[[]]", '{"a":1}'):
        with pytest.raises(ApiError, match="at most 1000 are allowed"):
            bodies.parse(f'{{"x": [{",".join([item] * 1_200)}]}}'.encode())
    assert len(bodies.parse(json.dumps({"prompt": [[7] * 2_000] * 100}).encode())["prompt"]) == 100
    assert bodies.parse(json.dumps({"prompt": ",[{" * 2_000}).encode()) == {"prompt": ",[{" * 2_000}


@pytest.mark.parametrize("field", ["prompt", "messages", "allowed_token_ids", "logit_bias", "tools"])
@pytest.mark.parametrize(
    "item",
    [
        "123456,",
        "{},",
        '"",',
        "[1,2],",
        '{"a":[]},',
        '{"b":1.5},',
        '"%s",' % ("x" * 2**20),
        '"%s",' % ("\\u0142" * 2**18),
    ],
    ids=lambda item: item[:12],
)
def test_no_call_that_holds_the_lock_makes_much(monkeypatch: pytest.MonkeyPatch, field: str, item: str) -> None:
    """For any body of 4 MB, one call parses at most 2^16 bytes of token ids or of a string, or few values."""
    parsed: list[bytes] = []

    def watched(call: Callable[[bytes], Any], data: bytes) -> Any:
        parsed.append(data)
        return call(data)

    for name in ("decode", "decode_ids", "decode_text"):
        monkeypatch.setattr(bodies, name, partial(watched, getattr(bodies, name)))
    body = f'{{"{field}":[{item * (2**22 // len(item))}{item[:-1]}]}}'.encode()
    with contextlib.suppress(ApiError):
        bodies.parse(body)
        assert parsed
    assert all(len(data) <= 2**16 + 2**10 or data.count(b",") <= limits.MAX_VALUES for data in parsed)
    assert sum(map(len, parsed)) < 2 * len(body)


def nested(depth: int, opening: str, pad: int = 0) -> bytes:
    """A body of this depth, the outermost object included; `pad`: more bytes."""
    closing = {"[": "]", '{"a":': "}"}[opening]
    inner = opening * (depth - 1) + ("1" if opening != "[" else "") + closing * (depth - 1)
    return f'{{"pad": "{"[" * pad}", "x": {inner}}}'.encode()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("pad", [0, 2**17], ids=["small", "large"])
def test_a_body_is_as_deep_as_the_limit_at_most(opening: str, pad: int) -> None:
    """Brackets in strings do not count, and a parser that recurses never sees a body that is deeper."""
    read = bodies.parse if pad else bodies.parse_whole
    assert read(nested(limits.MAX_DEPTH, opening, pad))["x"]
    for depth in (limits.MAX_DEPTH + 1, 1_000, 20_000):
        with pytest.raises(ApiError, match=f"at most {limits.MAX_DEPTH}|not valid JSON"):
            read(nested(depth, opening, pad))
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b"]" * 300 + b"[" * 300):
        with pytest.raises(ApiError):
            read(text)


@pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "\\udc00\\ud800", "\\ud83d\\ud83d", "\\uD800\\n"])
@pytest.mark.parametrize("body", ['{"a": 1, "x": "y%sz"}', '{"a": 1, "x": {"y": ["%s"]}}', '{"x": {"%s": 1}}'])
def test_half_of_a_surrogate_pair_is_refused_by_its_field(body: str, escape: str) -> None:
    with pytest.raises(ApiError, match="surrogate") as refused:
        bodies.parse_whole((body % escape).encode())
    assert refused.value.param == "x"
    with pytest.raises(ApiError):
        bodies.parse((body % escape).encode().ljust(2**17))


def test_text_in_the_names_of_fields_is_strict_too() -> None:
    with pytest.raises(ApiError) as refused:
        bodies.parse_whole(b'{"\\ud800": 1}')
    assert refused.value.param == "?"
    for text in (
        b"NaN",
        b'{"a": Infinity}',
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1} x',
    ):
        with pytest.raises(ApiError, match="not valid JSON"):
            bodies.parse_whole(text)

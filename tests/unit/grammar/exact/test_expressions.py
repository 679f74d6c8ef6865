"""Regular expressions of schemas, rewritten for llguidance: what they become."""

import re

import pytest

from jswa.grammar.exact.expressions import in_rust
from jswa.grammar.exact.lookahead import joined, lookaheads
from jswa.grammar.schema import SchemaError


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ('^[^"]+$', r'^[[^"]--\x{0}]+$'),
        ("^[^a]{2,3}?$", "^[^a]{2,3}?$"),
        (r"[\s\S]*", r"[\x{0}-\x{10ffff}]*"),
        (r"\d\w[\d-]", r"[0-9][0-9A-Za-z_][0-9\-]"),
        (r"[^\d]", r"[^\p{Nd}]"),
        (r"\p{L}", r"[[\p{L}]--\x{0}]"),
        ("[[a&&b]", r"[\[a\&\&b]"),
        ("[]a]|[^]b]", r"[\]a]|[^\]b]"),
        ("^{}$", r"^\{\}$"),
        (r"(?P<stop>a)(?<x>b)(?:c)(?i:d)", "(a)(b)(?:c)(?i:d)"),
        (r"\x41\u00e9\cA\/\<[\b]", r"A\x{e9}\x{1}/<[\x{8}]"),
        (r"[\ud83d\ude00\u{1F600}]", r"[\x{1f600}\x{1f600}]"),
    ],
)
def test_an_expression_becomes_one_of_rust(pattern: str, written: str) -> None:
    assert in_rust(pattern) == written


@pytest.mark.parametrize("pattern", ["a++", "a**", "[b-a]", "[a", r"[\q]", r"\ud800", r"\u{110000}", "(?x)a", r"a\x00"])
def test_what_cannot_be_said_is_refused(pattern: str) -> None:
    with pytest.raises(SchemaError, match=r"^at /here: (has|names) "):
        in_rust(pattern, "/here")


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"^(?=.*\d)(?=[^)]{2}\))\w+$", ["^[0-9A-Za-z_]+$", "^(?:.*[0-9])", r"^(?:[^\)]{2}\))"]),
        (r"^(?!\.)a", ["^a", r"^(?:[^\.][\x{0}-\x{10ffff}]*)?$"]),
        (r"^(?!.*[<>])a", ["^a", "^[^<>]*$"]),
        (r"^(?!.*\.\.)a", ["^a", r"^(?:\.?[^\.])*\.?$"]),
        ("^a(?=b)", ["^a(?=b)"]),
        ("^(?!abc)d", ["^(?!abc)d"]),
    ],
)
def test_a_lookahead_becomes_another_expression(pattern: str, written: list[str]) -> None:
    assert joined(pattern) == written
    assert lookaheads(pattern) == len(re.findall(r"\(\?[=!]", pattern))


@pytest.mark.parametrize("pattern", ["^(?=a)a|b", "^" + "(?=a)" * 8 + "a"])
def test_a_lookahead_that_cannot_be_joined_is_refused(pattern: str) -> None:
    with pytest.raises(SchemaError, match="lookahead"):
        joined(pattern)

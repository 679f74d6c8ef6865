"""Random regular expressions and strings: what a mask admits is what jsonschema, with Python's `re`, takes."""

import json
import re

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import admits
from tests.support.text.transcripts import tokenizer_of

BYTES = tokenizer_of(("<|end|>",))
# Why an expression is refused: no string is left, it costs too much to see whether one is, or a range is none.
REASONS = ("Regex is empty", "Unable to determine if regex is empty", "in brackets")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(BYTES, BYTES.vocab_size, (BYTES.vocab_size - 1,))


SIGNS = ['"', r"\\", r"\n", r"\t", r"\x00", r"\x1f", r"\u0022", r"\x5c", r"\cA", r"\/", r"\[", r"\]", r"\-", r"\.",
         *"abZ09 é日😀&~<_/"]  # fmt: skip
RANGES = ["a-z", "0-9", " -~", r"\x00-\x1f", "!-/", "+--", r"\x00-\x7f", r"\n-\"", r"\x00-\t", r"#-\[", r"\]-é"]
NAMED = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"]
CLASSES = st.tuples(
    st.sampled_from(["", "^"]), st.lists(st.sampled_from([*SIGNS, *RANGES, *NAMED, "["]), min_size=1, max_size=3)
).map(lambda parts: f"[{parts[0]}{''.join(parts[1])}]")
ATOMS = st.one_of(CLASSES, CLASSES, st.sampled_from([*SIGNS[:4], *SIGNS[6:], ".", *NAMED]))


def sequences(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.tuples(inner, st.sampled_from(["", "", "*", "+", "?", "{2}", "{0,2}", "+?"])).map("".join)
    return st.lists(st.lists(repeated, min_size=1, max_size=3).map("".join), min_size=1, max_size=2).map("|".join)


GROUPS = st.tuples(st.sampled_from(["(", "(?:", "(?P<stop>", "(?i:"]), sequences(ATOMS)).map(lambda p: f"{p[0]}{p[1]})")
AHEAD = st.sampled_from(["", "", "", r"(?!\.)", "(?=.*[^a])", '(?!.*["])', "(?!.*aa)"])
PATTERNS = st.tuples(AHEAD, sequences(st.one_of(ATOMS, ATOMS, GROUPS)), st.sampled_from(["$", ""])).map(
    lambda parts: f"^{parts[0]}(?:{parts[1]}){parts[2]}" if parts[0] or parts[2] else parts[1]
)
TEXTS = st.text(st.sampled_from(list('"\\\n\t\0\x1f\x1c\x7f\x85\xa0/[]-.abZ09 é日😀&~<_٣²')), max_size=4)
LENGTHS = st.sampled_from(
    [{}, {}, {"minLength": 1}, {"maxLength": 2}, {"format": "password"}, {"minLength": 1, "maxLength": 3}]
)


@pytest.mark.filterwarnings("ignore:Possible")
@settings(max_examples=80, deadline=None)
@given(PATTERNS, LENGTHS, st.lists(TEXTS, min_size=8, max_size=16), st.booleans())
@example('^[^"]+$', {}, ['a"b'], False)
@example(r"^[^\\]+$", {}, ["a\\b"], False)
@example(r"^([\0-\x0f]|[\x10-\x1f])$", {}, ['"', "\\"], False)
def test_a_string_that_is_admitted_matches(
    grammars: Grammars, pattern: str, more: dict[str, object], texts: list[str], codes: bool
) -> None:
    """And one that matches is admitted, if it has only characters of which all programs think the same."""
    schema = {"type": "string", "pattern": pattern, **more}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    refused = ""
    try:
        re.compile(pattern)
        grammar = grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except re.error:
        return
    except InvalidSampling as error:
        refused = error.limit
    if refused:
        assert any(reason in refused for reason in REASONS), refused
        return
    for text in texts:
        written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        if codes:
            written = written.replace("\\n", "\\u000a").replace("\\t", "\\u0009")
        if admits(grammar, BYTES, written):
            assert valid(text), (pattern, written)
        elif set(text).isdisjoint("\0\x1f\x1c\x7f\x85\xa0é日٣²😀\n"):
            assert not valid(text), (pattern, written)

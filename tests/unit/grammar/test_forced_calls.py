"""What a grammar forces is read back: one call of the tool, with arguments that its schema allows, in every family."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jswa.grammar.compiler import Grammars
from jswa.grammar.forms import AnswerFamily, ToolError, forced_calls
from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import shipped
from tests.support.text.grammar import allowed_by, follow
from tests.support.text.transcripts import TRANSCRIPTS, calls_of, pieces_of, read, template_of, text_of, tokenizer_of

NAMES = st.one_of(
    st.sampled_from(["from", "user-id", "Basic LLM", "$ref", "a.b", "@type", "größe", "1st", "a:b", "x=y", "it's",
                     'say "x"', "a[0]", "{a}", "a,b", "a/b", "class", ""]),
    st.text(max_size=6),
)  # fmt: skip
STRINGS = st.one_of(
    st.sampled_from(
        ["  x ", "\n", "a\n\nb\n", "'", '"', "\\", "{}", "</tool_call>", "<|im_end|>", "1", "true", "null", ""]
    ),
    st.text(max_size=8),
)
SIMPLE = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]),
    st.lists(STRINGS, min_size=1, max_size=3, unique=True).map(lambda values: {"type": "string", "enum": values}),
    st.integers(0, 3).map(lambda least: {"type": "string", "minLength": least, "maxLength": least + 2}),
    st.lists(st.integers(-5, 2**53), min_size=1, max_size=3).map(lambda values: {"type": "integer", "enum": values}),
)
SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(
            lambda members: {"type": "object", "properties": members, "additionalProperties": False}
        ),
    ),
    max_leaves=4,
)
TOOL_NAMES = st.sampled_from(["get", "mcp__fs__read", "a.b", "get-x", "g2"])


@pytest.mark.parametrize("family", sorted(shipped()))
def test_what_is_forced_is_read(family: str) -> None:
    special = {mark: None for one in TRANSCRIPTS if one.family == family for mark in one.special}
    tokenizer = tokenizer_of((*special, "<|end|>"))
    template = template_of(family, tokenizer)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1], template.delimiters)
    vocabulary = grammars.vocabulary
    whole = AnswerFamily(template.writes, vocabulary.special, frozenset(vocabulary.end_ids))

    @settings(suppress_health_check=list(HealthCheck), max_examples=settings().max_examples // 4)
    @given(TOOL_NAMES, st.dictionaries(NAMES, SCHEMAS, max_size=3), st.randoms(use_true_random=False))
    def holds(name: str, members: dict[str, Any], rng: random.Random) -> None:
        required = [one for one in members if rng.random() < 0.7]
        schema = {"type": "object", "properties": members, "required": required, "additionalProperties": False}
        try:
            text = forced_calls(whole, [{"name": name, "parameters": schema}], "done", parallel=False)
        except ToolError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert "cannot be" in refused
            return
        grammar = grammars.add(text)
        ids = follow(grammar.matcher(), tokenizer, rng, closers=("</parameter>\n", '"}'), most=400)
        matcher = grammar.matcher()
        assume(matcher.accept(ids) and (matcher.finished or set(allowed_by(matcher)) & set(vocabulary.end_ids)))
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        pieces = list(pieces_of(tokenizer, template, ids))
        events = read(AnswerParser(template, "", tools), pieces)
        assert [one for one, _ in calls_of(events)] == [name], "".join(pieces)
        assert text_of(events, "content").strip() == ""
        jsonschema.Draft202012Validator(schema).validate(json.loads(calls_of(events)[0][1]))

    holds()

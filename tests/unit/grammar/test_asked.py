"""What a request asks for becomes the text of a grammar, or a refusal with its place."""

from typing import Any

import pytest

from jswa.grammar.asked import Asked, ChatAnswer, Refusal, limits_of, refusal, schema_fault, text_of
from jswa.grammar.bounds import SchemaError
from jswa.grammar.matching.llg import GrammarError, ParserLimits
from jswa.text.answers.template import compile_template, shipped
from jswa.types import StructuredOutputsParams
from tests.support.text.transcripts import tokenizer_of

LIMITS = ParserLimits()
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}
WRONG = {"anyOf": [{"const": 1}, {"not": {"minLength": 1}}]}
WRITES = compile_template(shipped()["hermes"], tokenizer_of(())).writes


def tool(name: str, schema: Any = GOOD) -> dict[str, Any]:
    """A function in OpenAI's form."""
    return {"name": name, "parameters": schema}


def spec(schema: Any) -> StructuredOutputsParams:
    """A schema as a form."""
    return StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (GOOD, None),
        ({"properties": {"a": {"$ref": "#/b"}}}, "/properties/a/$ref"),
        (WRONG, "/anyOf/1"),
    ],
)
def test_a_fault_has_its_place(schema: Any, place: str | None) -> None:
    found = schema_fault(schema, LIMITS)
    assert (None if found is None else found.pointer) == place


def test_a_text_says_what_may_follow_what() -> None:
    """A whole text; content behind reasoning; calls, which are forced, beside content, or watched."""
    assert text_of(Asked(spec(GOOD)), {}, ()).startswith("{")
    assert "thought" in text_of(Asked(spec(GOOD), ChatAnswer(WRITES, reasoning="open")), {}, ())
    forced = text_of(Asked(None, ChatAnswer(WRITES, [tool("f")], forced=True)), {}, ())
    assert forced.startswith("start:  calls")
    both = text_of(Asked(spec(GOOD), ChatAnswer(WRITES, [{"name": "f"}])), {}, ())
    assert "(calls | " in both
    with pytest.raises(SchemaError, match="but not watched"):
        text_of(Asked(None, ChatAnswer(WRITES, [tool("f")])), {}, ())
    assert "but not" not in text_of(Asked(None, ChatAnswer(WRITES, [tool("f")])), {"<tool_call>": 1}, ())


def test_only_what_a_client_writes_has_narrow_limits() -> None:
    for form, narrow in (({"grammar": 'start: "a"'}, True), ({"json": GOOD}, False), ({"regex": "a"}, False)):
        asked = Asked(StructuredOutputsParams(**form))
        for text in (text_of(asked, {}, ()), text_of(Asked(asked.spec, ChatAnswer(WRITES)), {}, ())):
            assert (limits_of(text, LIMITS).max_items_in_row < LIMITS.max_items_in_row) == narrow


def test_a_refusal_names_what_is_at_fault() -> None:
    """One of the tools, a place in the schema of the content, or neither."""
    failed = GrammarError("no")
    tools = [tool("f"), tool("g", WRONG)]
    found = refusal(Asked(None, ChatAnswer(WRITES, tools, forced=True)), failed, {}, LIMITS)
    assert found.tool == 1
    assert found.reason.startswith("at /anyOf/1: ")
    content = refusal(Asked(spec(WRONG), ChatAnswer(WRITES, tools[:1])), failed, {}, LIMITS)
    assert content.tool is None
    assert content.reason.startswith("at /anyOf/1: ")
    assert refusal(Asked(None, ChatAnswer(WRITES, tools[:1], forced=True)), failed, {}, LIMITS) == Refusal("no")
    with pytest.raises(SchemaError) as caught:
        text_of(Asked(None, ChatAnswer(WRITES, [tool("f"), tool("g", [1])], forced=True)), {}, ())
    assert refusal(Asked(), caught.value, {}, LIMITS) == Refusal("must be an object", 1)

"""Headers of harmony's messages, as openai-harmony reads them (tests/families/harmony.py compares thousands)."""

import pytest

from jswa.text.answers.parser import AnswerParser
from tests.support.text.transcripts import TOOLS, calls_of, pieces_of, read, template_of, text_of, tokenizer_of

TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
NEXT = "<|end|><|start|>assistant"
CASES = {
    # A header, and the kind or the name of the call that its message is.
    "<|channel|>final": "content",
    "<|channel|>final json": "content",
    "<|channel|>final code<|constrain|>JSON": "content",
    "<|channel|>commentary <|constrain|>json": "content",
    "": "content",
    " <|constrain|>json": "content",
    "<|channel|>analysis": "reasoning",
    "<|channel|>analysis code": "reasoning",
    "<|channel|>analysis<|constrain|>JSON ": "reasoning",
    " to=functions.f": "f",
    " to=functions.f code": "f",
    " to=functions.f<|channel|>final": "f",
    " to=f<|channel|>commentary<|constrain|>json": "f",
    " to=functions.f<|channel|>analysis to=functions.f code": "f",
    "<|channel|>commentary to=functions.f": "f",
    "<|channel|>analysis to=browser.search code": "browser.search",
    "<|channel|>comment to=functions.f<|constrain|>json": "f",
}


def answer(text: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return reasoning, content and calls of a text behind `<|start|>assistant`."""
    tokenizer = tokenizer_of(TOKENS)
    template = template_of("harmony", tokenizer)
    parser = AnswerParser(template, template.prefix("<|start|>assistant"), TOOLS)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    events = read(parser, list(pieces_of(tokenizer, template, ids)))
    return text_of(events, "reasoning"), text_of(events, "content"), calls_of(events)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(("header", "kind"), CASES.items(), ids=[repr(one) for one in CASES])
def test_a_header_is_no_text(header: str, kind: str, first: bool) -> None:
    """The message is what its channel and its recipient say, and nothing of the header is shown."""
    before = "" if first else f"<|channel|>analysis<|message|>So.{NEXT}"
    reasoning, content, calls = answer(f'{before}{header}<|message|>{{"a": 1}}<|end|>')
    thought = [] if first else ["So."]
    if kind == "reasoning":
        thought.append('{"a": 1}')
    assert reasoning == "\n".join(thought)
    assert content == ('{"a": 1}' if kind == "content" else "")
    assert calls == (() if kind in ("reasoning", "content") else ((kind, '{"a": 1}'),))


@pytest.mark.parametrize("role", ["user", "tool", "functions.f to=assistant"])
def test_a_message_of_another_role_is_content(role: str) -> None:
    """A model that goes on as a tool or a user makes no call, and its header is no text."""
    first = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    said = answer(f"{first}<|start|>{role}<|channel|>commentary<|message|>12<|end|>")
    assert said == ("", "12", (("f", "{}"),))


@pytest.mark.parametrize("header", ["<|channel|>final", " to=functions.f<|channel|>commentary", ""])
def test_a_message_without_an_end_ends_at_the_next_header(header: str) -> None:
    *_, content, calls = answer(f"<|channel|>analysis<|message|>So.<|start|>assistant{header}<|message|>{{}}<|end|>")
    assert (content, calls) == (("", (("f", "{}"),)) if "to=" in header else ("{}", ()))


def test_the_name_of_an_unknown_channel_is_not_lost() -> None:
    """What is none of harmony's own words may be the answer's."""
    assert answer("<|channel|>comment<|message|>Hi<|end|>") == ("", "commentHi", ())
    assert answer("<|channel|>comment to=functions.f<|message|>{}<|call|>") == ("", "", (("f", "{}"),))

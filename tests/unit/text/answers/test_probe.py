"""Calls are read only if the chat template writes them as the reader reads them, when the reader was guessed."""

import pytest

from jswa.errors import InvalidPrompt
from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.probe import TOOLS, settled, settled_by
from jswa.text.answers.template import compile_template, guessed_template, shipped, shipped_for
from tests.support.text.chat_templates import FAMILIES, FOREIGN
from tests.support.text.transcripts import read, text_of

GUESSED = [name for name, family in FAMILIES.items() if family.reader != "gemma3"]  # it is chosen by name only


@pytest.mark.parametrize("name", GUESSED)
def test_a_family_is_told_by_its_chat_template(name: str) -> None:
    family = FAMILIES[name]
    chosen = shipped_for(family.source)
    assert chosen == family.reader
    template = guessed_template(chosen, family.tokenizer)
    assert settled_by(template, family.template.render) is template
    assert template.reads_calls


@pytest.mark.parametrize("name", FOREIGN)
def test_calls_of_an_unknown_form_are_not_guessed(name: str) -> None:
    """Reasoning is still read, and the text of a call is content, delimiters included."""
    family = FOREIGN[name]
    chosen = shipped_for(family.source)
    assert chosen == family.reader
    template = settled_by(guessed_template(chosen, family.tokenizer), family.template.render)
    assert not template.reads_calls
    assert template.writes.calls is None
    assert template.writes.reasoning is not None
    text = template.marked('<think>\nHm.\n</think>\n\n<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>')
    events = read(AnswerParser(template, "", TOOLS), [text])
    assert text_of(events, "reasoning") == "Hm."
    assert text_of(events, "content") == '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    assert {event.kind for event in events} == {"reasoning", "content"}


def test_a_template_that_was_named_is_not_tried() -> None:
    family = FOREIGN["a name before JSON"]
    named = compile_template(shipped()["hermes"], family.tokenizer)
    assert settled(named, ()) is named
    assert settled_by(named, family.template.render) is named


def test_a_refused_probe_is_no_proof() -> None:
    template = guessed_template("hermes", FAMILIES["hermes"].tokenizer)

    def refuse(*_: object, **__: object) -> str:
        raise InvalidPrompt("messages", 1, "are refused")

    assert settled_by(template, refuse) is template.without_guess
    assert settled(template, ()) is template.without_guess


@pytest.mark.parametrize(
    ("prompt", "prefix"),
    [
        ("<Bot>\n<think>", "<think>"),
        ("<Bot>\n<think>\n", "<think>\n"),
        ("<Bot><think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("Say <think>.<Bot>", ""),
        ("<think>a</think>b<Bot>", ""),
        ("<Bot>", ""),
        ("<think>x<|im_start|>assistant\n<think>", "<think>"),
    ],
)
def test_reasoning_that_the_prompt_begins_is_the_answers(prompt: str, prefix: str) -> None:
    """Also behind a header that the response template does not know: families share the delimiters of reasoning."""
    template = compile_template(shipped()["hermes"], FAMILIES["hermes"].tokenizer)
    assert template.prefix(prompt) == template.marked(prefix)

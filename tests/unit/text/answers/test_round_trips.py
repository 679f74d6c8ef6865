"""What a family's chat template writes is read back: calls with arguments of all kinds."""

import pytest

from jswa.text.answers.template import compile_template, shipped
from tests.support.text.chat_templates import FAMILIES
from tests.support.text.kinds import KINDS
from tests.support.text.round_trip import read_back, write

_NO_NAMES = {
    f"key: {key}"
    for key in (
        "a dash", "a space", "a dollar", "a colon", "an @", "a slash", "an emoji", "a digit first", "nothing",
        "an equals sign", "a comma", "a quote", "an apostrophe", "a bracket", "a brace",
    )
}  # fmt: skip
_PYTHON = _NO_NAMES | {"name: a-b", "several arguments", "five calls"}  # the last two have a key with a dash
_BARE = {f"key: {key}" for key in ("a colon", "nothing", "a comma", "a quote", "a bracket", "a brace")}
_XML = {"key: nothing", "value: a mark inside an object", "mark: </parameter>", "call as text: Qwen's XML"}
_MARK = {"mark: </tool_call>", "call as text: hermes", "call as text: Qwen's XML"}
LOST = {
    "gemma4": _BARE | {"value: odd keys inside"},
    "function_gemma": _BARE | {"value: odd keys inside"},
    "gemma3": _PYTHON | {"value: Markdown", "mark: ```", "mark: ```tool_code", "call as text: Python"},
    "hermes": _MARK,
    "hermes, marks as texts": _MARK | {"value: a mark inside an object"},
    "qwen_xml": _XML,
    "qwen_xml, marks as texts": _XML,
    "olmo3": _PYTHON | {"mark: </function_calls>", "call as text: Python"},
    "llama4, Python": _PYTHON,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_a_template_writes_is_read_back(name: str) -> None:
    """All kinds are, but those that the template cannot write, which docs/answers.md names."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    answers = compile_template(shipped()[family.reader], tokenizer)
    lost = {}
    for kind, turn in KINDS.items():
        written = write(family.template, turn)
        for tokens in {False, kind.startswith(("mark", "call"))}:
            if wrong := read_back(answers, tokenizer, turn, written, tokens=tokens):
                lost[kind] = f"{written.text!r} is read as {wrong}"
    assert {kind: why for kind, why in lost.items() if kind not in LOST.get(name, ())} == {}

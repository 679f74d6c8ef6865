"""Chat templates in the style of released families: the same prompts and ids as in transformers."""

from pathlib import Path
from typing import Any

import pytest

from jswa.errors import InvalidPrompt
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from tests.support.checkpoints.text_folders import FAMILIES, reference_tokenizer

SYSTEM = {"role": "system", "content": "Be brief; mind <b>tags</b> & 'quotes'."}
USER = {"role": "user", "content": "  the cat? naïve 漢字 "}
ANSWER = {"role": "assistant", "content": "sat on the mat"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
THOUGHT = {**ANSWER, "thinking": "cats like mats", "reasoning_content": "cats like mats"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "naïve <b>", "parameters": {"type": "object"}}}]
# Conversations and variables that each family's template accepts.
CASES: dict[str, list[tuple[list[dict[str, Any]], dict[str, Any]]]] = {
    "gemma3": [
        ([USER], {}), ([USER, ANSWER, USER], {}),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " a cat "}]}], {}),
    ],
    "gpt_oss": [([SYSTEM, USER], {"effort": "high"}), ([USER, THOUGHT, USER], {}), ([USER], {"tools": TOOLS})],
    "llama3": [([SYSTEM, USER], {}), ([USER, CALL, {"role": "comment", "content": "x"}, USER], {"tools": TOOLS})],
    "mistral": [([USER, ANSWER, USER], {}), ([USER, ANSWER] * 8, {})],
    "command_r": [
        ([SYSTEM, USER], {}), ([USER], {"tools": TOOLS}),
        ([USER], {"chat_template": "rag", "documents": [{"text": "cats"}, {"text": "mats"}]}),
        ([USER], {"chat_template": "{{ messages[0].content }}{{ eos_token }}"}),
    ],
    "mimo": [([SYSTEM, USER, THOUGHT], {}), ([USER, ANSWER, USER], {"enable_thinking": False})],
}  # fmt: skip


def load(folder: Path) -> tuple[ChatTemplate, Tokenizer]:
    """Load the template and the tokenizer of a folder that has both."""
    template, tokenizer = ChatTemplate.load(folder), Tokenizer.load(folder)
    assert template is not None
    assert tokenizer is not None
    return template, tokenizer


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_ids_are_those_of_transformers(family: str, answer: bool, tmp_path: Path) -> None:
    """No prompt has two BOS tokens, whether the template or the tokenizer adds BOS."""
    folder = FAMILIES[family](tmp_path)
    (template, tokenizer), reference = load(folder), reference_tokenizer(folder)
    bos = tokenizer.token_id("bos_token")
    for messages, variables in CASES[family]:
        keywords = {"add_generation_prompt": answer, **variables}
        text = template.render(messages, **keywords)
        assert text == reference.apply_chat_template(messages, tokenize=False, **keywords)
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        assert ids == reference.apply_chat_template(messages, **keywords)["input_ids"]
        assert bos is None or ids.count(bos) <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_message_is_continued_as_in_transformers(family: str, tmp_path: Path) -> None:
    """The prompt ends with the message itself."""
    folder = FAMILIES[family](tmp_path)
    text = load(folder)[0].render([USER, ANSWER], continue_final_message=True)
    reference = reference_tokenizer(folder)
    assert text == reference.apply_chat_template([USER, ANSWER], tokenize=False, continue_final_message=True)
    assert text.endswith("sat on the mat")


@pytest.mark.parametrize(
    ("family", "messages"),
    [("gemma3", [USER, USER]), ("mistral", [SYSTEM, USER]), ("gemma3", [{"role": "user", "content": 3}])],
)
def test_a_refusal_has_the_templates_own_reason(family: str, messages: list[Any], tmp_path: Path) -> None:
    """Or jinja2's, if the template has none."""
    with pytest.raises(InvalidPrompt, match=r"roles must take turns|only user and assistant|not iterable"):
        load(FAMILIES[family](tmp_path))[0].render(messages)

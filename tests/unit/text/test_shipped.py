"""The chat templates that ship with jswa: what they write is read back, and they are offered where they help."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jswa.errors import InvalidPrompt
from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import find_template, shipped_for
from jswa.text.chat_template import ChatTemplate
from jswa.text.history.probes import PROBES, writes_all
from jswa.text.shipped import FOLDER, REPLACES, shipped_template
from tests.support.checkpoints.text_folders import FAMILIES
from tests.support.text.transcripts import calls_of, pieces_of, read, template_of, text_of, tokenizer_of

# Of each template: the response template that reads its answers, the marks of its tokenizer, and how answers begin.
READERS = {
    "gemma3_tools": ("gemma3", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<start_of_turn>model\n"),
    "chatml_tools": ("hermes", ("<|im_start|>", "<|im_end|>"), "<|im_start|>assistant\n"),
}
USER = {"role": "user", "content": "Weather?"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"See `{name}`", "parameters": {"type": "object"}}}
    for name in ("get_weather", "weather.at")
]
_TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "```", "\n```\n", "<end_of_turn>", "<start_of_turn>model\n", "<tool_call>", "\n</tool_call>", "<|im_end|>",
        "<think>", "'\"\\", '"""', "None", "1", "[f()]", '{"name": "f"}', "\\n", "é漢😀", " a ",
    ]
)  # fmt: skip
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(["city", "from", "class", "_x", "Ort", "größe", "a1", "None_", "_raw"])
_KEYS = {"gemma3_tools": _NAMES, "chatml_tools": _NAMES | _TEXTS}  # Python has no other names of parameters


def template(name: str) -> ChatTemplate:
    """A template that ships, with the first token of Gemma."""
    return ChatTemplate({"default": shipped_template(name)}, {"bos_token": "<bos>"})


def gemma() -> ChatTemplate:
    """The template for Gemma."""
    return template("gemma3_tools")


def calls_with(keys: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    """Some calls, as names and arguments."""
    arguments = st.dictionaries(keys, _VALUES, max_size=4)
    return st.lists(st.tuples(st.sampled_from(["get_weather", "weather.at"]), arguments), min_size=1, max_size=3)


def answer(calls: list[tuple[str, dict[str, Any]]], content: str = "") -> dict[str, Any]:
    """Return a message with calls, as the server has answered it."""
    made = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": made}


def read_back(name: str, prompt: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return content and calls of the last answer in a prompt, as the response template reads it up to its end."""
    family, marks, begin = READERS[name]
    tokenizer = tokenizer_of(marks)
    reader = template_of(family, tokenizer)
    text = prompt.rpartition(begin)[2].removesuffix("\n").removesuffix(marks[-1])
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    events = read(AnswerParser(reader, "", TOOLS), list(pieces_of(tokenizer, reader, ids)))
    return text_of(events, "content"), [(name, json.loads(arguments)) for name, arguments in calls_of(events)]


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_calls_are_read_back(name: str, data: st.DataObject) -> None:
    """Whatever their arguments are."""
    calls = data.draw(calls_with(_KEYS[name]))
    prompt = template(name).prompt([USER, answer(calls)], tools=TOOLS, add_generation_prompt=False)
    assert read_back(name, prompt) == ("", calls)


def test_gemma_has_only_turns_of_user_and_model() -> None:
    """The operator's text and the tools begin the user's first turn; results are the user's."""
    said = answer([("get_weather", {"city": "Oslo"}), ("f", {"a=b": [None, True], "user-id": 1})], "I look.")
    results = [{"role": "tool", "tool_call_id": f"abcdefgh{index}", "content": f"r{index}"} for index in range(2)]
    messages = [{"role": "system", "content": "Be brief."}, USER, said, *results, {"role": "user", "content": "And?"}]
    first, model, last, new = gemma().prompt(messages, tools=TOOLS).split("<start_of_turn>")[1:]
    assert first.startswith("user\nBe brief.\n\nYou can call functions.")
    assert all(json.dumps(tool["function"]) in first for tool in TOOLS)
    assert first.endswith("\n\nWeather?<end_of_turn>\n")
    assert model == (
        'model\nI look.\n```tool_code\n[get_weather(city="Oslo"), f(**{"a=b": [None, True]}, user-id=1)]\n```'
        "<end_of_turn>\n"
    )
    assert last == "user\n```tool_output\nr0\n```\n\n```tool_output\nr1\n```\n\nAnd?<end_of_turn>\n"
    assert new == "model\n"
    content, calls = read_back(
        "gemma3_tools", gemma().prompt([USER, answer([("get_weather", {})], "I look.")], add_generation_prompt=False)
    )
    assert (content.strip(), calls) == ("I look.", [("get_weather", {})])


def test_chatml_has_tools_in_the_systems_turn_and_results_in_one() -> None:
    """The tools are in the system's turn, behind its text; results that follow each other are in one turn."""
    chatml = template("chatml_tools")
    said = answer([("f", {"a": "</tool_call>"}), ("g", {})], "I look.")
    results = [{"role": "tool", "tool_call_id": f"abcdefgh{index}", "content": f"r{index}"} for index in range(2)]
    messages = [{"role": "system", "content": "Be brief."}, USER, said, *results]
    system, user, model, last, new = chatml.prompt(messages, tools=TOOLS).split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nYou can call functions.")
    assert all(json.dumps(tool["function"]) in system for tool in TOOLS)
    assert user == "user\nWeather?<|im_end|>\n"
    assert model == (
        'assistant\nI look.\n<tool_call>\n{"name": "f", "arguments": {"a": "\\u003c/tool_call>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
    )
    assert last == ("user\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|im_end|>\n")
    assert new == "assistant\n"
    alone = chatml.prompt([USER], tools=TOOLS)
    assert alone.startswith("<|im_start|>system\nYou can call functions.")
    assert alone.endswith("<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n")
    assert chatml.prompt([USER]) == "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"


def test_without_tools_the_prompt_is_gemmas_own(tmp_path: Path) -> None:
    """As the template of the family in the fixtures writes it."""
    own = ChatTemplate.load(FAMILIES["gemma3"](tmp_path))
    assert own is not None
    for messages in ([USER], [USER, {"role": "assistant", "content": "Sun."}, USER]):
        assert gemma().prompt(messages) == own.prompt(messages)
    ends = [USER, {"role": "assistant", "content": "It is"}]
    assert gemma().prompt(ends, continue_final_message=True) == own.prompt(ends, continue_final_message=True)


def test_parts_of_a_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b "}]
    assert gemma().prompt([{"role": "user", "content": parts}]) == (
        "<bos><start_of_turn>user\na\nb<end_of_turn>\n<start_of_turn>model\n"
    )
    assert "user\na\n b <" in template("chatml_tools").prompt([{"role": "user", "content": parts}])
    for name in REPLACES:
        with pytest.raises(InvalidPrompt, match="only text"):
            template(name).prompt([{"role": "user", "content": [{"type": "image"}]}])


def test_the_refusal_of_tools_offers_it(tmp_path: Path) -> None:
    """Where it can stand in for the checkpoint's own; by its name it is used."""
    own = ChatTemplate.load(FAMILIES["gemma3"](tmp_path))
    assert own is not None
    with pytest.raises(InvalidPrompt, match="no place for tools; --chat-template gemma3_tools has one"):
        own.prompt([USER], tools=TOOLS)
    plain = ChatTemplate({"default": "<|im_start|>{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidPrompt, match="--chat-template chatml_tools has one"):
        plain.prompt([USER], tools=TOOLS)
    assert "get_weather" in own.prompt([USER], tools=TOOLS, chat_template="gemma3_tools")
    with pytest.raises(InvalidPrompt, match=r"no place for tools$"):
        ChatTemplate({"default": "{{ messages[0].content }}"}, {}).prompt([USER], tools=TOOLS)
    mine = ChatTemplate({"gemma3_tools": "mine", "default": "x"}, {})
    assert mine.prompt([USER], chat_template="gemma3_tools") == "mine"


@pytest.mark.parametrize("name", REPLACES)
def test_they_have_a_place_for_everything(name: str, tmp_path: Path) -> None:
    """No message of a conversation has to move, and the response template that reads the answers is found."""
    for probe, messages in PROBES.items():
        assert writes_all(template(name).render(messages, tools=TOOLS), messages), probe
    family, marks, _ = READERS[name]
    assert shipped_for(shipped_template(name)) == family
    assert find_template(tmp_path, tokenizer_of(marks), shipped_template(name)) is not None


def test_each_file_has_a_name() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(REPLACES)
    with pytest.raises(KeyError):
        shipped_template("other")

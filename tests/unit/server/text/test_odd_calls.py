"""Whatever a model writes as a call, or in its place, each route answers in JSON, whole and as a stream."""

import json
import random
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest

from jswa.text.answers.template import shipped
from tests.support.nights import sample
from tests.support.server.harness import Client, serving
from tests.support.server.scripted import TEMPLATE, writing_engine
from tests.support.text.transcripts import TRANSCRIPTS, template_of, tokenizer_of

PARAMETERS = {"type": "object"}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
    "/v1/responses": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    "/v1/messages": [{"name": "f", "input_schema": PARAMETERS}],
}
LARGE = ['{"a": ' + "9" * 4400 + "}", '{"a": ' + "[" * 1100 + "]" * 1100 + "}"]
ODD = [
    '{"a": NaN, "b": -Infinity, "c": 1e999}',
    '{"a": "\\ud800", "\\udfff": 1}', '{"a": ', "null", "[1]", '"x"', '{"a": 1}} tail', "\x00", '{"a": "\x01"}',
    "{user-id: 'x', b: True c=1,}", "{", "", '{"a": "' + "\n" * 20,
]  # fmt: skip
CALLS = {
    "command": '<|START_ACTION|>[{{"tool_name": "f", "parameters": {}}}]<|END_ACTION|>',
    "function_gemma": "<start_function_call>call:f{}<end_function_call>",
    "gemma3": "```tool_code\nf(a={})\n```",
    "gemma4": "<|tool_call>call:f{}<tool_call|>",
    "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
    "harmony": "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
    "hermes": '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
    "llama4": '{{"name": "f", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "olmo3": "<function_calls>f(a={})</function_calls>",
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
}
WORDS = ["{", "}", '"', "'", ":", "\n", "[", "(", "=", "w", "é", "\\", ",", '"name": "f"', "call:f{", "<parameter=a>"]


def special_of(family: str) -> tuple[str, ...]:
    """Return the tokens of a family's transcripts."""
    return tuple({mark: None for one in TRANSCRIPTS if one.family == family for mark in one.special})


def not_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check(client: Client, path: str) -> None:
    """Ask on a route, whole and as a stream."""
    message = {"role": "user", "content": "x"}
    asked = {"input": "x"} if path == "/v1/responses" else {"messages": [message], "max_tokens": 9_000}
    body = {**asked, "tools": TOOLS[path]}
    whole = client.post(path, body)
    assert whole.status_code == 200, whole.text
    json.loads(whole.text, parse_constant=not_json)
    streamed = client.post(path, {**body, "stream": True})
    assert streamed.status_code == 200
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: {")]
    assert events
    for one in events:
        assert not json.loads(one, parse_constant=not_json).get("error")


def answers(family: str, texts: Iterable[str]) -> None:
    """Have a model write texts, each on one route."""
    tokenizer, said = tokenizer_of(special_of(family)), [""]
    engine = writing_engine(tokenizer, lambda _: said[-1], ())
    with serving(engine, tokenizer=tokenizer, template=TEMPLATE, answers=template_of(family, tokenizer)) as client:
        for text, path in zip(texts, cycle(TOOLS), strict=False):
            said.append(text)
            check(client, path)


@pytest.mark.parametrize("family", sorted(shipped()))
@pytest.mark.parametrize("turn", sample("012", 3))
def test_odd_arguments_are_answered_in_json(family: str, turn: str) -> None:
    answers(family, [CALLS[family].format(arguments) for arguments in ODD[int(turn) :: 3]])


def test_numbers_of_too_many_digits_and_too_many_brackets_are_answered_in_json() -> None:
    """The syntax of the family is JSON, which is passed on as it is."""
    answers("hermes", [CALLS["hermes"].format(arguments) for arguments in LARGE])


@pytest.mark.parametrize("family", sorted(shipped()))
def test_marks_quotes_and_brackets_in_any_order_are_answered_in_json(family: str) -> None:
    rng = random.Random(family)
    words = [*special_of(family), *WORDS]
    answers(family, ["".join(rng.choices(words, k=rng.randrange(1, 25))) for _ in range(6)])

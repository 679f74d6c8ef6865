"""A server whose chat template writes calls that its reader does not know refuses tools, on all routes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from jswa.text.answers.template import guessed_template
from tests.support.server.harness import Client, serving
from tests.support.server.scripted import writing_engine
from tests.support.text.chat_templates import FAMILIES, FOREIGN, Family

CALL = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASK = {"messages": [{"role": "user", "content": "Go."}]}
REASON = "the form of the model's tool calls is unknown; --response-template names it"


@contextmanager
def served(family: Family, **options: Any) -> Iterator[Client]:
    """Run a server with a reader that was guessed by the delimiters of the chat template."""
    tokenizer = family.tokenizer
    engine = writing_engine(tokenizer, lambda _: CALL)
    answers = guessed_template(family.reader, tokenizer)
    with serving(engine, tokenizer=tokenizer, template=family.source, answers=answers, **options) as client:
        yield client


@pytest.mark.parametrize("name", ["a name before JSON", "calls are refused"])
def test_tools_are_refused(name: str) -> None:
    """The error names the option that helps. Without tools the reasoning is read, and a call is content."""
    with served(FOREIGN[name]) as client:
        error = client.refusal("/v1/chat/completions", {**ASK, "tools": TOOLS})
        assert (error["param"], REASON in error["message"]) == ("tools", True)
        body = {"input": "Go.", "tools": [{"type": "function", **FUNCTION}]}
        assert REASON in client.refusal("/v1/responses", body)["message"]
        tool = {"name": "f", "input_schema": FUNCTION["parameters"]}
        said = client.post("/v1/messages", {**ASK, "max_tokens": 99, "tools": [tool]})
        assert (said.status_code, REASON in said.json()["error"]["message"]) == (400, True)
        answer = client.post("/v1/chat/completions", ASK).json()["choices"][0]["message"]
        assert (answer["reasoning_content"], answer["content"]) == ("Hm.", CALL.partition("\n\n")[2])


def test_tools_are_accepted_where_the_call_is_read_back() -> None:
    with served(FAMILIES["hermes"]) as client:
        choice = client.post("/v1/chat/completions", {**ASK, "tools": TOOLS}).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"a": 1}')


def test_a_template_that_takes_too_long_to_write_a_call_is_no_proof() -> None:
    """The server starts, kills the process that renders, and goes on without tools."""
    hermes = FAMILIES["hermes"]
    loop = "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}"
    loop = "{%- if m.tool_calls -%}" + loop + "{%- endif -%}"
    slow = replace(
        hermes, source=hermes.source.replace("{%- for m in messages -%}", "{%- for m in messages -%}" + loop)
    )
    with served(slow, render_timeout=2.0) as client:
        assert REASON in client.refusal("/v1/chat/completions", {**ASK, "tools": TOOLS})["message"]
        assert client.post("/v1/chat/completions", ASK).status_code == 200

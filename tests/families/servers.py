"""Servers with real tokenizers and chat templates, whose model writes what the template writes: `make families`."""

import json
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from jswa.text.answers.template import compile_template, guessed_template, shipped, shipped_for
from jswa.text.chat_template import ChatTemplate
from server.core.service import Served
from tests.families.material import named_tokens, templates, tokenizer
from tests.support.server.harness import Client, serve
from tests.support.server.scripted import writing_engine
from tests.support.text.kinds import KINDS, Turn
from tests.support.text.round_trip import USER, same, write

KIND = (
    "value: Chinese", "value: an emoji", "value: both quotes", "value: backslashes", "value: Python", "value: a float",
    "value: a mixed list", "value: deep lists", "value: text like a number", "key: letters with accents", "two calls",
    "text before", "reasoning before",
)  # fmt: skip
# Tokenizer, chat template, and the reader where the operator must name it.
MODELS = {
    "gpt-oss": ("gptoss", "openai-gpt-oss-120b", None),
    "Qwen 3": ("qwen3", "npm-qwen3", None),
    "Gemma 3": ("gemma3", "vllm-tool_chat_template_gemma3_pythonic", "gemma3"),
    "Llama 3.1": ("llama3_1", "meta-llama-Llama-3.1-8B-Instruct", None),
}
# Gemma 3's reader takes a bare list of calls only where an answer begins, and Llama's template writes one call only.
NOT = {("Gemma 3", "text before"), ("Llama 3.1", "two calls")}


@dataclass
class Model:
    """A server, and the text that its model writes next."""

    client: Client
    template: ChatTemplate
    text: str = ""

    def ask(self, turn: Turn, kind: str) -> dict[str, Any]:
        """Have the model write a turn; return the body of the request, whose prompt no other kind has."""
        self.text = write(self.template, turn).text
        tools = [{**tool, "function": {**tool["function"], "description": f"{kind}."}} for tool in turn.declared()]
        return {"messages": [USER], "tools": tools}


@contextmanager
def serving(name: str) -> Iterator[Model]:
    """Run a server of a model of MODELS."""
    files, chat, reader = MODELS[name]
    real = tokenizer(files)
    source = next(one.source for one in templates() if one.name == chat)
    answers = compile_template(shipped()[reader], real) if reader else guessed_template(shipped_for(source) or "", real)
    engine = writing_engine(real, lambda _: found.text)
    template = ChatTemplate({"default": source}, named_tokens(files))
    with serve(Served(lambda: engine, real, template, answers)) as client:
        found = Model(client, template)
        yield found


@pytest.mark.parametrize("name", MODELS)
def test_streamed_and_whole_answers_are_what_the_template_wrote(name: str) -> None:
    """And the server takes each answer back, with the result of the call."""
    with serving(name) as model:
        for kind in KIND:
            if (name, kind) not in NOT:
                _check(model, kind)


def _check(model: Model, kind: str) -> None:
    turn = KINDS[kind]
    body = model.ask(turn, kind)
    response = model.client.post("/v1/chat/completions", body)
    assert response.status_code == 200, (kind, response.text)
    message = response.json()["choices"][0]["message"]
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    meant = [(called, _composed(arguments)) for called, arguments in turn.calls][: len(calls)]
    assert [called for called, _ in calls] == [called for called, _ in meant], kind
    assert same([_composed(arguments) for _, arguments in calls], [arguments for _, arguments in meant]), (kind, calls)
    assert _joined(model.client.events("/v1/chat/completions", body)) == {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]],
    }, kind
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "12"} for one in message["tool_calls"][:1]]
    model.text = ""
    again = {**body, "messages": [USER, {**message, "tool_calls": message["tool_calls"][:1]}, *results]}
    response = model.client.post("/v1/chat/completions", again)
    assert response.status_code == 200, (kind, response.text)


def _composed(value: Any) -> Any:
    """Return a value with accents as Qwen's tokenizer makes them of a letter and an accent."""
    return json.loads(unicodedata.normalize("NFC", json.dumps(value, ensure_ascii=False)))


def _joined(events: list[Any]) -> dict[str, Any]:
    """Return what the pieces of a streamed answer are together."""
    deltas = [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]
    calls: dict[int, list[str]] = {}
    for one in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        name, arguments = calls.setdefault(one["index"], ["", ""])
        function = one["function"]
        calls[one["index"]] = [name + (function.get("name") or ""), arguments + (function.get("arguments") or "")]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "calls": [tuple(one) for one in calls.values()],
    }

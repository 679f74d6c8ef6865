"""Chats whose answers have reasoning and tool calls, over HTTP, streamed and whole."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from jswa.text.answers.template import shipped
from tests.support.nights import sample
from tests.support.server.harness import Client, serving
from tests.support.server.scripted import ask, scripted
from tests.support.text.transcripts import TRANSCRIPTS

PATH = "/v1/chat/completions"
HARMONY = TRANSCRIPTS[1]  # reasoning, content and a call
FIRSTS = {one.family: one for one in reversed(TRANSCRIPTS)}


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    """A server that answers everything with reasoning, content and a call."""
    with scripted(HARMONY) as found:
        yield found


def whole(client: Client, **body: Any) -> Any:
    """Return the response to a chat that must succeed."""
    response = client.post(PATH, body)
    assert response.status_code == 200, response.text
    return response.json()


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Return the message that a stream's chunks add up to, for choice 0, with its finish reason."""
    found: dict[str, Any] = defaultdict(str)
    calls: list[Any] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                found[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    assert len(call["id"]) == 9
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            found["finish_reason"] = choice["finish_reason"]
    return {**found, "calls": tuple(map(tuple, calls))}


@pytest.mark.parametrize("family", sample(sorted(FIRSTS), 5))
def test_an_answer_in_openais_form(family: str) -> None:
    """Reasoning, content and calls are fields of the message; a stream adds up to the same."""
    one = FIRSTS[family]
    with scripted(one) as client:
        found = whole(client, **ask(one))
        chunks = client.events(PATH, ask(one))
    (choice,) = found["choices"]
    message = choice["message"]
    calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ()))
    assert (message["content"] or "", message.get("reasoning_content", ""), calls) == (
        one.content, one.reasoning, one.calls,
    )  # fmt: skip
    assert message.get("reasoning") == message.get("reasoning_content")
    assert choice["finish_reason"] == ("tool_calls" if one.calls else "stop")
    reasoned = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (reasoned > 0) == bool(one.reasoning)
    assert reasoned <= found["usage"]["completion_tokens"]
    assert joined(chunks[:-1]) == {
        "content": one.content, "reasoning_content": one.reasoning, "reasoning": one.reasoning, "calls": one.calls,
        "finish_reason": choice["finish_reason"],
    }  # fmt: skip


def test_every_cut_by_max_tokens_is_an_answer(client: Client) -> None:
    """An answer that is cut anywhere ends with "length", streamed and whole alike."""
    total = whole(client, **ask(HARMONY))["usage"]["completion_tokens"]
    for most in range(1, total, 7):
        found = whole(client, **ask(HARMONY, max_tokens=most))["choices"][0]
        assert found["finish_reason"] == "length"
        parts = joined(client.events(PATH, ask(HARMONY, max_tokens=most))[:-1])
        assert parts["content"] == (found["message"]["content"] or "")
        assert parts["reasoning"] == found["message"].get("reasoning", "")
        assert HARMONY.reasoning.startswith(parts["reasoning"])


def test_log_probabilities_have_an_entry_for_each_token(client: Client) -> None:
    """Tokens of reasoning, calls and delimiters too."""
    body = ask(HARMONY, logprobs=True, top_logprobs=1)
    found = whole(client, **body)
    chunks = client.events(PATH, body)[:-1]
    entries = found["choices"][0]["logprobs"]["content"]
    assert len(entries) == found["usage"]["completion_tokens"]
    streamed = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == entries


def test_parts_that_a_request_does_not_want() -> None:
    """`include_reasoning`, `tool_choice` and `parallel_tool_calls`."""
    two = next(one for one in TRANSCRIPTS if len(one.calls) == 2 and one.family == "gemma4")
    with scripted(two) as client:
        message = whole(client, **ask(two, include_reasoning=False))["choices"][0]["message"]
        assert "reasoning" not in message
        assert len(message["tool_calls"]) == 2
        parts = joined(client.events(PATH, ask(two, include_reasoning=False))[:-1])
        assert (parts["reasoning"], parts["content"]) == ("", two.content)
        found = whole(client, **ask(two, parallel_tool_calls=False))
        assert len(found["choices"][0]["message"]["tool_calls"]) == 1
        assert found["choices"][0]["finish_reason"] == "tool_calls"
        assert found["usage"]["completion_tokens"] < len(two.text)
        choice = whole(client, **ask(two, tool_choice="none"))["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert (
            "Oslo" in whole(client, **ask(two, tool_choice="none"))["choices"][0]["message"]["content"]
            or "Os{" in (choice["message"]["content"])
        )


def test_a_stop_string_is_not_searched_across_a_delimiter(client: Client) -> None:
    """A stop string in the reasoning stops; one that only a delimiter's text would complete does not."""
    found = whole(client, **ask(HARMONY, stop="eath"))["choices"][0]
    assert (found["message"]["reasoning"], found["finish_reason"], found["stop_reason"]) == ("W", "stop", "eath")
    assert whole(client, **ask(HARMONY, stop=".<|end|>"))["choices"][0]["finish_reason"] == "tool_calls"


def test_several_choices_are_read_apart(client: Client) -> None:
    choices = whole(client, **ask(HARMONY, n=3))["choices"]
    assert [choice["message"]["content"] for choice in choices] == [HARMONY.content] * 3
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 3


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], "tools[0].function.parameters"),
    ],
)
def test_a_tool_that_is_none_is_refused(client: Client, tools: list[Any], param: str) -> None:
    assert client.refusal(PATH, {**ask(HARMONY), "tools": tools})["param"] == param


def test_tools_that_the_model_cannot_have_are_refused() -> None:
    """The template must have a place for tools, and the form of calls must be known."""
    with scripted(HARMONY, template="{{ messages[0].content }}") as client:
        assert "no place for tools" in client.refusal(PATH, ask(HARMONY))["message"]
    with scripted(HARMONY, answers=False) as client:
        assert "--response-template" in client.refusal(PATH, ask(HARMONY))["message"]
        assert "tool_calls" not in whole(client, **ask(HARMONY, tool_choice="none"))["choices"][0]["message"]


def test_a_forced_call_is_refused(client: Client) -> None:
    """Where the engine has no grammars."""
    assert client.refusal(PATH, ask(HARMONY, tool_choice="required"))["param"] == "tool_choice"


def test_a_special_token_in_a_users_text_is_text() -> None:
    """It becomes ordinary tokens, in messages of users and tools; the operator's may contain tokens."""
    with serving(template="{% for m in messages %}{{ m.content }}{% endfor %}") as client:
        text = "a<eos>b<bo"
        for role, ids in (("user", [ord(c) + 3 for c in text]), ("system", None)):
            whole(client, messages=[{"role": role, "content": text}], max_tokens=1)
            seen = client.engine.seen[-1].prompt.tolist()
            assert (seen == ids) == (role == "user")
            assert (2 in seen) == (role == "system")


def test_reasoning_and_calls_of_the_history_reach_the_template() -> None:
    """Under the names that templates read, and with arguments as objects."""
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|"
        "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"city": "Oslo"})}}]
    with serving(template=template) as client:
        for name in ("reasoning_content", "reasoning", "thinking"):
            messages = [{"role": "assistant", name: "so", "tool_calls": calls}]
            whole(client, messages=messages, max_tokens=1)
            assert client.service.tokenizer is not None
            assert client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist()) == "so|so|Oslo"


def test_thinking_is_turned_off_by_the_effort() -> None:
    """`reasoning_effort` reaches the template; "none" turns thinking off."""
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    with serving(template=template) as client:
        for effort, expected in (("high", "high "), ("none", " False")):
            whole(client, messages=[{"role": "user", "content": "x"}], reasoning_effort=effort, max_tokens=1)
            assert client.service.tokenizer is not None
            assert client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist()) == expected


@pytest.mark.parametrize("family", sample(sorted(FIRSTS), 3))
def test_the_engine_gets_the_grammar_of_the_whole_answer(family: str) -> None:
    """Of calls that are forced, content of a form, and tools that are strict; with the reasoning of the family."""
    one = next(found for found in TRANSCRIPTS if found.family == family and found.calls)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with scripted(one, forms=True) as client:
        assert client.engine.grammars is not None
        for fields, rule in (
            ({"tools": tools, "tool_choice": "required"}, "calls: "),
            ({"tools": tools, "response_format": form}, "calls | "),
            ({"response_format": form}, "%json"),
        ):
            body = ask(one)
            body.pop("tools", None)
            whole(client, **{**body, **fields})
            spec = client.engine.seen[-1].params.structured_outputs
            assert spec is not None
            assert spec.grammar is not None
            assert rule in spec.grammar
            reasons = client.engine.grammars.compile(spec).text.startswith("start: ") and "thought" in spec.grammar
            assert reasons == (shipped()[family]["writes"].get("reasoning") is not None)

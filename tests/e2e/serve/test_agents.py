"""Agents: requests with all fields that Codex and Claude Code send, and histories that render to what was generated."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.server.harness import Client
from tests.support.server.scripted import agent, agent_answer

ASKED = "weather: Oslo, Rome"
SAID = "rain in Oslo, rain in Rome (2 calls, 2 thoughts)"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
CODEX: dict[str, Any] = {
    "model": "fake", "instructions": "You are a coding agent.", "tool_choice": "auto", "parallel_tool_calls": True,
    "tools": [
        {"type": "function", "strict": False, **FUNCTION}, {"type": "web_search", "external_web_access": False},
    ],
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-cafe", "text": {"verbosity": "medium"},
    "service_tier": "auto", "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip
CLAUDE: dict[str, Any] = {
    "model": "fake", "max_tokens": 2000, "temperature": 1.0, "metadata": {"user_id": "user_1_session_2"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {
            "name": "get_weather", "description": "The weather.", "input_schema": SCHEMA,
            "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True,
        },
    ],
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
BETAS = {
    "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true", "x-app": "cli", "x-stainless-lang": "js",
}  # fmt: skip
RESULT = {"cache_control": {"type": "ephemeral"}, "is_error": False}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with agent() as found:
        yield found


def unknown(client: Client) -> int:
    """Return how many unknown fields the server has counted so far."""
    return client.service.recorder.counts.numbers["unknown_request_fields"]


def prompts(client: Client, since: int) -> list[str]:
    """Return the prompts that the engine has received since a request."""
    assert client.service.tokenizer is not None
    ids = [request.prompt.tolist() for request in client.engine.seen[since:]]
    return [client.service.tokenizer.decode(one, skip_special_tokens=False) for one in ids]


def codex(client: Client) -> str:
    """Run a conversation as Codex does; return the last text."""
    context = "<environment_context><cwd>/tmp</cwd></environment_context>"
    items: list[dict[str, Any]] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "Ask before you write."), ("user", context), ("user", ASKED))
    ]
    while True:
        events = client.events_named("/v1/responses", {**CODEX, "input": items})
        assert events[-1]["type"] == "response.completed"
        assert [tool["type"] for tool in events[-1]["response"]["tools"]] == ["function"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        if done[-1]["type"] == "message":
            return str(done[-1]["content"][0]["text"])
        reasoning, call = done
        # Codex sends items back without ids, and with fields that it knows.
        items += [
            {"type": "reasoning", "summary": [], "content": reasoning["content"], "encrypted_content": None},
            {key: call[key] for key in ("type", "name", "arguments", "call_id")},
            {"type": "function_call_output", "call_id": call["call_id"], "output": weather(call["arguments"])},
        ]


def claude_code(client: Client) -> str:
    """Run a conversation as Claude Code does; return the last text."""
    reminder = {"type": "text", "text": "<system-reminder>be brief.</system-reminder>"}
    asked = {"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [reminder, asked]}]
    while True:
        counted = {key: CLAUDE[key] for key in ("model", "tools", "system")}
        path = "/v1/messages/count_tokens?beta=true"
        assert client.post(path, {**counted, "messages": messages}, headers=BETAS).status_code == 200
        response = client.post("/v1/messages?beta=true", {**CLAUDE, "messages": messages}, headers=BETAS)
        assert response.status_code == 200, response.text
        message = response.json()
        if message["stop_reason"] == "end_turn":
            return str(message["content"][-1]["text"])
        call = message["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": weather(json.dumps(call["input"]))}
        # Thinking without a signature would not be sent back.
        kept = [block for block in message["content"] if block["type"] != "thinking" or block["signature"]]
        messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": [{**result, **RESULT}]}]


def chat(client: Client) -> str:
    """Run a conversation by chat completions; return the last text."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    while True:
        tools = [{"type": "function", "function": FUNCTION}]
        response = client.post("/v1/chat/completions", {"messages": messages, "tools": tools})
        (choice,) = response.json()["choices"]
        message = choice["message"]
        if choice["finish_reason"] == "stop":
            return str(message["content"])
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": weather(call["function"]["arguments"])}
        messages += [message, result]


def weather(arguments: str) -> str:
    return f"rain in {json.loads(arguments)['city']}"


@pytest.mark.parametrize(("run", "left_out"), [(codex, 1), (claude_code, 0), (chat, 0)])
def test_each_prompt_of_an_agents_loop_begins_with_the_last_one_and_its_answer(
    client: Client, run: Callable[[Client], str], left_out: int
) -> None:
    """Every field is known, calls and reasoning return; each prompt begins with the last one and its answer."""
    since, before = len(client.engine.seen), unknown(client)
    assert run(client) == SAID
    seen = prompts(client, since)
    assert unknown(client) == before + left_out * len(seen)
    assert len(seen) == 3
    for prompt, after in itertools.pairwise(seen):
        assert after.startswith(prompt + agent_answer(prompt))


def test_a_conversation_that_the_server_keeps(client: Client) -> None:
    """By `previous_response_id` the history is that which was generated, too."""
    since, body = len(client.engine.seen), {**CODEX, "stream": False, "store": True}
    found = client.post("/v1/responses", {**body, "input": ASKED}).json()
    while (item := found["output"][-1])["type"] == "function_call":
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": weather(item["arguments"])}
        found = client.post("/v1/responses", {**body, "input": [output], "previous_response_id": found["id"]}).json()
    assert found["output"][-1]["content"][0]["text"] == SAID
    seen = prompts(client, since)
    for prompt, after in itertools.pairwise(seen):
        assert after.startswith(prompt + agent_answer(prompt))


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/responses", {"type": "web_search"}),
        ("/v1/messages", {"type": "web_search_20250305", "name": "web_search"}),
    ],
)
def test_a_request_for_tools_of_the_server_alone_is_refused(client: Client, path: str, tool: dict[str, Any]) -> None:
    body = {**CODEX, "input": ASKED} if path == "/v1/responses" else {**CLAUDE, "messages": [asked()]}
    assert client.post(path, {**body, "stream": False, "tools": [*body["tools"], tool]}).status_code == 200
    response = client.post(path, {**body, "tools": [tool]})
    assert response.status_code == 400
    assert "tools[0].type" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"mcp_servers": [{"type": "url", "url": "https://localhost", "name": "a"}]},
        {"compaction": {"type": "summarize"}},
        {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
    ],
)
def test_what_messages_lack_is_refused(client: Client, more: dict[str, Any]) -> None:
    """The SDK reads why a thread is refused, and then sends the whole conversation."""
    (name,) = more
    response = client.post("/v1/messages", {**CLAUDE, "messages": [asked()], **more})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith(name)
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error.get("details") == (details if name == "thread" else None)


def test_the_last_message_of_the_assistant_goes_on(client: Client) -> None:
    since = len(client.engine.seen)
    body = {**CLAUDE, "messages": [asked(), {"role": "assistant", "content": "The rain"}]}
    assert client.post("/v1/messages", body).status_code == 200
    (prompt,) = prompts(client, since)
    assert prompt.endswith("<|start|>assistant<|message|>The rain")


def asked() -> dict[str, Any]:
    return {"role": "user", "content": ASKED}

"""POST /v1/messages: blocks of an answer, streamed and whole, in Anthropic's form."""

from collections.abc import Iterator
from typing import Any

import pytest

from server.api.anthropic import SIGNATURE
from server.text.blocks import messages_of
from tests.support.server.harness import Client
from tests.support.server.scripted import scripted
from tests.support.text.transcripts import TRANSCRIPTS

PATH = "/v1/messages"
HARMONY = TRANSCRIPTS[1]  # reasoning, content and a call
FUNCTION = HARMONY.tools[0]["function"]
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
TEMPLATE = (
    "{%- for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    "{%- if tools %}{{ tools[0].function.name }}{% endif %}{% if enable_thinking is defined %}{{ enable_thinking }}"
    "{% endif %}<|start|>assistant"
)
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "tools": [TOOL]}


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    """A server that answers everything with reasoning, content and a call; it has a key."""
    with scripted(HARMONY, template=TEMPLATE, api_key=("k",), headers={"x-api-key": "k"}) as found:
        yield found


def whole(client: Client, **body: Any) -> Any:
    """Return the message for a request that must succeed."""
    response = client.post(PATH, {**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(client: Client) -> str:
    """Return the last prompt that the engine received."""
    assert client.service.tokenizer is not None
    return client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist(), skip_special_tokens=False)


def test_the_blocks_of_an_answer(client: Client) -> None:
    """Thinking, text and a call; tokens of the cache are counted apart."""
    found = whole(client, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    thinking, text, call = found["content"]
    assert (thinking["thinking"], text["text"]) == (HARMONY.reasoning, HARMONY.content)
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "tool_use")
    usage, prompt = found["usage"], len(client.engine.seen[-1].prompt)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["cache_read_input_tokens"] == prompt // 2
    assert prompt_of(client).startswith("[system|Be brief.][user|hi]get_weather")


def test_a_stream_adds_up_to_the_whole(client: Client) -> None:
    """Blocks begin and end in order; their deltas are the texts."""
    events = client.events_named(PATH, BODY)
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    texts: dict[int, str] = {}
    opened = closed = -1
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == opened + 1 == closed + 1
            opened += 1
        elif event["type"] == "content_block_delta":
            assert event["index"] == opened == closed + 1
            _, new = sorted(event["delta"].items(), key=lambda pair: pair[0] == "type", reverse=True)
            texts[opened] = texts.get(opened, "") + new[1]
        elif event["type"] == "content_block_stop":
            closed += 1
    assert texts == {0: HARMONY.reasoning + SIGNATURE, 1: HARMONY.content, 2: HARMONY.calls[0][1]}
    assert opened == closed == 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole(client)["usage"]


def test_reasons_for_the_end(client: Client) -> None:
    assert whole(client, max_tokens=3)["stop_reason"] == "max_tokens"
    found = whole(client, stop_sequences=["eat"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "eat")
    assert whole(client, tools=[], tool_choice={"type": "none"})["stop_reason"] == "end_turn"


def test_tokens_are_counted_as_they_are_generated_from(client: Client) -> None:
    found = client.post(f"{PATH}/count_tokens", {key: BODY[key] for key in ("messages", "tools")}).json()
    whole(client)
    assert found == {"input_tokens": len(client.engine.seen[-1].prompt)}


def test_thinking_is_a_variable_of_the_template(client: Client) -> None:
    for kind, seen in (("enabled", "True"), ("disabled", "False")):
        whole(client, thinking={"type": kind, "budget_tokens": 1024})
        assert prompt_of(client).endswith(f"{seen}<|start|>assistant")


def test_blocks_become_messages() -> None:
    """Results of tools are messages of their own, before the user's text."""
    found = messages_of(
        "s",
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "c"},
            ]},
        ],
    )  # fmt: skip
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": "é"}'},
    }
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "c"},
    ]


def test_arguments_that_were_no_object_come_back_as_that_text() -> None:
    """As an answer's `_raw`; an input of the client's own with such a key stays as it is."""
    for given, text in (({"_raw": "[1"}, "[1"), ({"_raw": "{}"}, '{"_raw": "{}"}'), ({"_raw": 1}, '{"_raw": 1}')):
        block = {"type": "tool_use", "id": "1", "name": "f", "input": given}
        (message,) = messages_of(None, [{"role": "assistant", "content": [block]}])
        assert message["tool_calls"][0]["function"]["arguments"] == text


def test_a_failed_tool_says_so() -> None:
    """Templates know no mark of a failure."""
    for content, text in (("no disk", "Error: no disk"), ("error 5", "error 5"), ([], "Error"), (None, "Error")):
        block = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": content}
        (message,) = messages_of(None, [{"role": "user", "content": [block]}])
        assert message == {"role": "tool", "tool_call_id": "1", "content": text}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools[0].type"),
        ({"tool_choice": {"type": "each"}}, 400, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, 400, "thinking.type"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"model": "other"}, 404, "does not exist"),
    ],
)
def test_errors_have_anthropics_shape(client: Client, body: dict[str, Any], status: int, message: str) -> None:
    response = client.post(PATH, {**BODY, **body})
    found = response.json()
    assert (response.status_code, found["type"]) == (status, "error")
    assert message in found["error"]["message"]
    assert set(found["error"]) == {"type", "message"}


def test_an_unexpected_error_has_anthropics_shape(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("server.api.anthropic.messages_of", fails)
    for path in (PATH, f"{PATH}/count_tokens"):
        response = client.post(path, BODY)
        assert response.status_code == 500
        assert response.json() == {"type": "error", "error": {"type": "api_error", "message": "internal error"}}


def test_a_wrong_key_is_refused_in_anthropics_shape(client: Client) -> None:
    response = client.post(PATH, BODY, headers={"x-api-key": "wrong"})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"

"""/v1/chat/completions over HTTP: messages, templates in worker processes, chunks of streams."""

import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.http import limits
from tests.support.server.harness import Client, serving

PATH = "/v1/chat/completions"
TEMPLATE = """{%- for m in messages %}
{%- if m.content == "loop" %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}{% endif %}
{%- if m.content == "grow" %}{% set ns = namespace(x="x" * 1000) %}{% for i in range(60) %}
{%- set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}
{%- if m.content == "no" %}{{ raise_exception("said no") }}{% endif -%}
{{ m.role }}:{{ m.content }};{% endfor %}{% if thinking %}T{% endif %}{% if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    with serving(template=TEMPLATE, render_timeout=1.5) as found:
        yield found


def prompt_of(client: Client, messages: object, **more: Any) -> str:
    """Return the prompt that the engine received."""
    response = client.post(PATH, {"messages": messages, "max_tokens": 1, **more})
    assert response.status_code == 200, response.text
    assert client.service.tokenizer is not None
    return client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist(), skip_special_tokens=False)


def user(content: object) -> list[dict[str, object]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": content}]


def test_the_fields_of_an_answer(client: Client) -> None:
    response = client.post(PATH, {"model": "fake", "messages": user("hi"), "max_completion_tokens": 4})
    found = response.json()
    assert found["id"].startswith("chatcmpl-")
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": "jklm", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert found["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4, "missed_tokens": {"cold": 5}},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_begins_with_roles_and_ends_with_finish_reasons(client: Client) -> None:
    body = {"messages": user("hi"), "max_tokens": 3, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, last, done = client.events(PATH, body)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in mine[1:-1]) == "jkl"
        assert mine[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["length"]


@pytest.mark.parametrize("counted", [False, True])
def test_the_last_chunk_has_timings(client: Client, counted: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if counted else {}
    *chunks, last, _ = client.events(PATH, {"messages": user("hi"), "max_tokens": 5, "n": 2, **options})
    assert not any("timings" in chunk for chunk in chunks)
    found = last["timings"]
    assert (found["cache_n"], found["prompt_n"], found["predicted_n"]) == (4, 5, 10)
    assert found["prompt_ms"] >= 0
    assert found["predicted_per_token_ms"] == pytest.approx(found["predicted_ms"] / 8, abs=0.001)
    assert found.keys() == client.post(PATH, {"messages": user("hi"), "max_tokens": 5}).json()["timings"].keys()


def test_one_token_has_no_rate(client: Client) -> None:
    found = client.post(PATH, {"messages": user("hi"), "max_tokens": 1}).json()["timings"]
    assert found["predicted_n"] == 1
    assert found["predicted_per_second"] is None


def test_without_max_tokens_generation_fills_the_context(client: Client) -> None:
    found = client.post(PATH, {"messages": user("hi")}).json()
    assert found["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("streamed", [False, True])
def test_each_token_has_its_log_probabilities(client: Client, streamed: bool) -> None:
    body = {"messages": user("hi"), "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    if streamed:
        parts = [chunk["choices"][0]["logprobs"] for chunk in client.events(PATH, body)[:-1]]
        content = [entry for part in parts if part for entry in part["content"]]
    else:
        content = client.post(PATH, body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["j", "k"]
    assert content[0]["bytes"] == [ord("j")]
    assert content[0]["logprob"] == -0.25
    assert len(content[0]["top_logprobs"]) == 2


def test_messages_reach_the_template(client: Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d", "name": None},
        *user(parts),
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    call = '{"name": "f", "arguments": {"a": 1}}'  # the template has no place for it
    assert prompt_of(client, messages) == f"system:s;developer:d;user:a\nb;assistant:x\n{call};user:y;>"


def test_fields_that_change_the_rendering(client: Client) -> None:
    assert prompt_of(client, user("a"), add_generation_prompt=False) == "user:a;"
    assert prompt_of(client, user("a"), chat_template_kwargs={"thinking": True}) == "user:a;T>"
    ends = [*user("a"), {"role": "assistant", "content": "so far"}]
    assert prompt_of(client, ends, continue_final_message=True) == "user:a;assistant:so far"
    assert prompt_of(client, user("a"), add_special_tokens=True) == "<bos>user:a;>"


def test_a_template_that_never_ends_is_killed(client: Client) -> None:
    begin = time.monotonic()
    error = client.refusal(PATH, {"messages": user("loop")})
    assert "took more than 1.5 s" in error["message"]
    assert time.monotonic() - begin < 10
    assert prompt_of(client, user("a")) == "user:a;>"


def test_a_template_that_takes_all_memory_is_refused(client: Client) -> None:
    assert client.refusal(PATH, {"messages": user("grow")})["param"] == "messages"
    assert prompt_of(client, user("a")) == "user:a;>"


def test_rendering_does_not_block_the_event_loop(client: Client) -> None:
    import threading

    slow = threading.Thread(target=client.refusal, args=(PATH, {"messages": user("loop")}))
    slow.start()
    begin = time.monotonic()
    while slow.is_alive():
        at = time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - at < 1
        time.sleep(0.05)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": user(3)}, "messages[0].content"),
        ({"messages": user([])}, "messages[0].content"),
        ({"messages": user([{"type": "image_url", "image_url": {"url": "http://a"}}])}, "messages[0].content[0].type"),
        ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text"),
        ({"messages": user("no")}, "messages"),
        ({"messages": user("a"), "tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"messages": user("a"), "tool_choice": "required"}, "tool_choice"),
        ({"messages": user("a"), "functions": [{}]}, "functions"),
        ({"messages": user("a"), "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": user("a"), "response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"messages": user("a"), "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"messages": user("a"), "modalities": ["audio"]}, "modalities"),
        ({"messages": user("a"), "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": user("a"), "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"messages": user("a"), "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"messages": user("a"), "top_logprobs": 1}, "top_logprobs"),
        ({"messages": user("a"), "logprobs": 1}, "logprobs"),
        ({"messages": user("a"), "logprobs": True, "top_logprobs": limits.MAX_LOGPROBS + 1}, "top_logprobs"),
        ({"messages": user("a"), "max_tokens": 0}, "max_tokens"),
        ({"messages": user("a"), "max_completion_tokens": 0}, "max_completion_tokens"),
        (
            {"messages": user("a"), "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"messages": user("a" * 256)}, "prompt"),
        ({"messages": user("a") * (limits.MAX_MESSAGES + 1)}, "messages"),
        ({"messages": user([{"type": "text", "text": "a"}] * (limits.MAX_PARTS + 1))}, "messages[0].content"),
        ({"messages": user("a"), "tool_choice": "none", "tools": [{}] * (limits.MAX_TOOLS + 1)}, "tools"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_field(client: Client, body: object, param: str) -> None:
    error = client.refusal(PATH, body)
    assert error["param"] == param
    assert not client.engine.has_work()


def test_requests_at_the_limits_are_accepted() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with serving(template="{{ messages | length }}{# tools #}") as client:
        assert prompt_of(client, user("a") * limits.MAX_MESSAGES) == str(limits.MAX_MESSAGES)
        assert prompt_of(client, user([{"type": "text", "text": "a"}] * limits.MAX_PARTS)) == "1"
        assert prompt_of(client, user("a"), tool_choice="none", tools=[tool] * limits.MAX_TOOLS) == "1"


def test_chat_without_a_template_is_refused() -> None:
    with serving() as client:
        assert "chat template" in client.refusal(PATH, {"messages": user("a")})["message"]


@pytest.mark.one_process
def test_a_renderer_that_was_killed_is_replaced(client: Client) -> None:
    assert client.service.renderer is not None
    for pid in client.service.renderer.pool.pids:
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([ended], [], [])
        os.close(ended)
    assert prompt_of(client, user("a")) == "user:a;>"

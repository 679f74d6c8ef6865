"""Odd values in every field of every route: each gets an answer or a 400, and harms no process of the server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.harness import Client
from tests.support.server.scripted import agent

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1, 2]},
}
# Fields that no schema has: they are read from what is left over, or belong to other servers.
MORE = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern", "thinking",
    "metadata", "user", "cache_salt", "tools", "tool_choice", "chat_template_kwargs", "unknown",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    True, 0, -1, 2**31, 2**64, 1e308, 0.5, "", "x", "\0", "a" * 5_000, [], [[]], [None], [-1], [2**40], [[[[]]]], {},
    {"a": 1}, {"type": "x"}, {"type": ["a"]}, [{"type": "function", "function": {"name": "f" * 5_000}}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": ["user"], "content": "a"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": "[1,2"}}]}],
    [{"role": "tool", "content": "a", "tool_call_id": {"a": 1}}],
)  # fmt: skip
# JSON that Python's own parser accepts and no other process could take, or that is too deep for a stack.
TEXTS = (
    '"x\\ud800y"', '{"\\udfff": 1}', '["\\ud800"]', '[{"role": "user", "content": "\\ud83d"}]', "NaN",
    "[Infinity]", "1e400", "9" * 5_000, "[" * 200 + "]" * 200, '{"a":' * 1_000 + "1" + "}" * 1_000,
    '[{"type": "function", "function": {"name": "f", "parameters": {"q": ' + "[" * 950 + "]" * 950 + "}}}]",
    '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]' % ("[" * 950 + "]" * 950),
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server with chats, tools and forms."""
    with agent(forms=True) as found:
        yield found


def fields(client: Client, path: str) -> list[str]:
    """The fields of a route, and some that it does not have."""
    described = client.get("/openapi.json").json()
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return [*described["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"], *MORE]


@pytest.mark.parametrize("path", BODIES)
def test_no_value_of_a_field_is_an_error_of_the_server(client: Client, path: str) -> None:
    renderer = client.services[0].renderer
    assert renderer is not None
    before = set(renderer.pool.pids)
    known = dict.fromkeys(fields(client, path))
    for name in known:
        for value in (*map(json.dumps, VALUES), *TEXTS):
            if name == "stream" and value == "true":
                continue
            parts = [*(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in BODIES[path].items() if k != name)]
            body = ", ".join([*parts, f"{json.dumps(name)}: {value}"])
            response = client.http.post(path, content=f"{{{body}}}", headers=JSON)
            assert response.status_code in (200, 400, 404, 429), (name, value[:80], response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"]
    assert before <= set(renderer.pool.pids), "a process for chat templates has died"
    assert client.post(path, BODIES[path]).status_code == 200

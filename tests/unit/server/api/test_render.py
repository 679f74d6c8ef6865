"""The tokens of a request without its answer, for routers."""

import pytest

from tests.support.server.harness import Client

TEXTS, CHATS = "/v1/completions/render", "/v1/chat/completions/render"
CHAT = {"messages": [{"role": "user", "content": "ab"}]}


def test_each_prompt_becomes_its_tokens(shared: Client) -> None:
    """They are those that the request itself would have; sampling parameters are those given."""
    body = {"model": "fake", "prompt": ["ab", "a"], "max_tokens": 3, "temperature": 0, "request_id": "mine"}
    first, second = shared.post(TEXTS, body).json()
    sampling = {"max_tokens": 3, "temperature": 0}
    assert first == {
        "request_id": "cmpl-mine-0", "model": "fake", "sampling_params": sampling, "token_ids": [1, 100, 101],
    }  # fmt: skip
    assert (second["request_id"], second["token_ids"]) == ("cmpl-mine-1", [1, 100])
    (ids,) = shared.post(TEXTS, {"prompt": [7, 8, 9]}).json()
    assert (ids["token_ids"], ids["sampling_params"]) == ([7, 8, 9], {})
    answer = shared.post("/v1/completions", {**body, "prompt": "ab"}).json()
    assert answer["usage"]["prompt_tokens"] == len(first["token_ids"])


def test_a_chat_becomes_its_tokens(shared: Client) -> None:
    """With the template, and cut as the request itself would be."""
    found = shared.post(CHATS, {**CHAT, "max_completion_tokens": 5, "stream": True}).json()
    assert found["token_ids"] == shared.post("/tokenize", CHAT).json()["tokens"]
    assert found["sampling_params"] == {"max_tokens": 5}
    assert found["request_id"].startswith("chatcmpl-")
    assert shared.post(CHATS, {**CHAT, "truncate_prompt_tokens": 1}).json()["token_ids"] == [101]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXTS, {"prompt": [-1]}, "prompt[0]"),
        (TEXTS, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXTS, {"prompt": "a" * 300}, "prompt"),
        (CHATS, {"messages": []}, "messages"),
        (CHATS, {"messages": [{"role": "x"}]}, "messages[0].role"),
        (CHATS, {**CHAT, "chat_template": "x"}, "chat_template"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_are_those_of_the_request_itself(shared: Client, path: str, body: object, param: str) -> None:
    assert shared.refusal(path, body)["param"] == param
    assert shared.refusal(path.removesuffix("/render"), body)["param"] == param

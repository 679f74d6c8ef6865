"""Fields of other servers: those that would change the answer are refused by name, unknown ones are counted."""

import re
from typing import Any

import pytest

from tests.support.server.harness import Client, serving

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    PATH: {"prompt": "abc", "max_tokens": 4},
    CHATS: {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4},
}
SCHEMA = {"type": "object"}
REFUSED: dict[str, Any] = {
    "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": "root ::= a",
    "structured_outputs": {"json": SCHEMA}, "grammar": "root ::= a",
    "regex": "a+", "json_schema": SCHEMA, "ebnf": "root ::= a", "format": "json", "enable_thinking": False,
    "thinking": {"type": "disabled"}, "reasoning": {"effort": "high"}, "reasoning_format": "none",
    "thinking_token_budget": 100, "reasoning_budget_tokens": 0, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "return_hidden_states": True, "logprob_token_ids": [5], "max_new_tokens": 10,
    "n_predict": 10, "min_new_tokens": 2, "lora_path": "x", "stop_regex": "a", "stop_sequences": ["a"],
    "logits_processors": ["x"], "custom_logit_processor": "x", "repeat_penalty": 1.1, "typical_p": 0.5, "mirostat": 2,
    "xtc_probability": 0.5, "dry_multiplier": 0.8, "num_beams": 4, "do_sample": False, "random_seed": 0,
    "extra_body": {"top_k": 1}, "options": {"temperature": 0}, "prompt_embeds": "x", "input_ids": [1],
    "spaces_between_special_tokens": False, "truncation_side": "right", "extra_key": "tenant",
    "response_format": {"type": "json_object"}, "use_beam_search": True, "best_of": 5, "vllm_xargs": {"a": 1},
    "mm_processor_kwargs": {"max_soft_tokens": 70},
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "guided_json": None, "guided_choice": [], "grammar": "", "json_schema": "", "return_token_ids": False,
    "repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "adaptive_target": -1, "num_beams": 1, "do_sample": True,
    "enable_thinking": None, "include_reasoning": True, "thinking_token_budget": -1, "n_predict": -1, "options": {},
    "spaces_between_special_tokens": True, "truncation_side": "left", "verbosity": "medium", "stop_sequences": [],
    "response_format": {"type": "text"}, "use_beam_search": False, "structured_outputs": None,
}  # fmt: skip
HARMLESS: dict[str, Any] = {
    "guided_decoding_backend": "xgrammar",
    "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k",
    "parallel_tool_calls": True, "cache_prompt": True, "keep_alive": "5m", "length_penalty": 1.0,
    "timings_per_token": True, "prediction": {"type": "content", "content": "a"},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(shared: Client, name: str) -> None:
    for path, body in BODIES.items():
        before = len(shared.engine.seen)
        error = shared.refusal(path, {**body, name: REFUSED[name]})
        assert (error["param"], error["code"]) == (name, "unsupported_value")
        assert error["message"].startswith(f"{name}: ")
        assert len(shared.engine.seen) == before


@pytest.mark.parametrize("name", ["guided_json", "json_schema", "response_schema", "format"])
def test_an_empty_schema_is_refused_too(shared: Client, name: str) -> None:
    """It asks for JSON, of any kind."""
    for path, body in BODIES.items():
        assert shared.refusal(path, {**body, name: {}})["param"] == name


def test_values_that_change_nothing_are_accepted(shared: Client) -> None:
    for path, body in BODIES.items():
        alone = shared.post(path, body).json()["choices"]
        response = shared.post(path, {**body, **NEUTRAL, **HARMLESS})
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == alone
        for name in REFUSED.keys() - {"best_of"}:
            assert shared.post(path, {**body, name: None}).status_code == 200, name


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (PATH, "messages", [{"role": "user", "content": "a"}]), (PATH, "max_completion_tokens", 50),
        (PATH, "top_logprobs", 5), (PATH, "tools", [{"type": "function"}]), (PATH, "reasoning_effort", "high"),
        (PATH, "chat_template_kwargs", {"a": 1}), (PATH, "chat_template", "x"), (PATH, "tool_choice", "required"),
        (PATH, "include_reasoning", False), (PATH, "verbosity", "low"), (CHATS, "prompt", "abc"),
        (CHATS, "suffix", "abc"),
    ],
)  # fmt: skip
def test_fields_of_the_other_route_are_refused(shared: Client, path: str, field: str, value: object) -> None:
    body = {name: given for name, given in BODIES[path].items() if name != "max_tokens"}
    error = shared.refusal(path, {**body, field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_value")


def test_fields_of_the_other_route_may_say_nothing(shared: Client) -> None:
    nothing: dict[str, Any] = {
        "messages": None,
        "tools": [],
        "tool_choice": "none",
        "top_logprobs": 0,
        "max_completion_tokens": 4,
    }
    assert shared.post(PATH, {**BODIES[PATH], **nothing}).status_code == 200, "load generators send both limits"
    assert shared.post(CHATS, {**BODIES[CHATS], "suffix": "", "prompt": None}).status_code == 200


def test_tokenize_refuses_what_changes_the_tokens(shared: Client) -> None:
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for name, value in (("tools", tools), ("documents", [{"text": "a"}]), ("chat_template", "x")):
        assert shared.refusal("/tokenize", {**chat, name: value})["param"] == name
    assert shared.post("/tokenize", {**chat, "temperature": 0}).json()["tokens"] == [100, 101]


def test_unknown_fields_are_counted_and_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[str]:
        return [one.getMessage() for one in caplog.records if "unknown field" in one.getMessage()]

    def counted(client: Client) -> float:
        found = re.search(r"^jswa:unknown_request_fields_total\{.*\} (.*)$", client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    with serving() as client:
        body = BODIES[PATH]
        for _ in range(2):
            assert client.post(PATH, {**body, "temprature": 0, "a\nb": 1, "user": "x"}).status_code == 200
        assert counted(client) == 4
        assert len(logged()) == 2
        assert "'temprature'" in logged()[0]
        assert not any("\n" in line for line in logged())
        client.post(PATH, {**body, **{f"x{i}": i for i in range(5_000)}, "y" * 1_000: 1})
        client.post(PATH, {**body, **{f"z{i}": i for i in range(5_000)}})
        assert len(logged()) == 256, "what is remembered of the names of fields is bounded"
        assert max(map(len, logged())) < 300
        # A field is refused even if it follows more fields than are checked for unknown names.
        assert client.refusal(PATH, {**body, **{f"x{i}": i for i in range(5_000)}, "regex": "a"})["param"] == "regex"
        assert not re.search(r"temprature|x1", client.get("/metrics").text), "no label that a client makes up"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_may_ask_for_more_than_the_context_has_left(shared: Client, name: str, streamed: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a" * 200}]}
    for asked in (56, 57, 4_096, 2**31 - 1):
        given = {**body, name: asked}
        if streamed:
            *chunks, usage, _ = shared.events(CHATS, {**given, "stream_options": {"include_usage": True}})
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            usage = shared.post(CHATS, given).json()
            reason = usage["choices"][0]["finish_reason"]
        assert (reason, usage["usage"]["completion_tokens"]) == ("length", 56)
    error = shared.refusal(CHATS, {"messages": [{"role": "user", "content": "a" * 256}], name: 4_096})
    assert error["code"] == "context_length_exceeded"


def test_a_completion_may_not(shared: Client) -> None:
    error = shared.refusal(PATH, {"prompt": [5] * 200, "max_tokens": 57})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert shared.post(PATH, {"prompt": [5] * 200, "max_tokens": 56}).json()["usage"]["completion_tokens"] == 56

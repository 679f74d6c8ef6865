"""Answers of `tiny` that are made to have a form, by a server: JSON, calls by force, in all protocols."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from jswa import LLM
from jswa.storage.hub import TINY
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from tests.support.server.harness import Client, serve
from tests.support.tiny import ONE_SHAPE

CHATS, TEXTS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
ASKED = [{"role": "user", "content": "My name is Bruno."}]
RANDOM = {"temperature": 1, "max_tokens": 120, "seed": 3}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("get_weather", PLACE), tool("add_person", PERSON)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with LLM("tiny", **ONE_SHAPE) as llm:
        template = ChatTemplate.load(TINY)
        served = Served(lambda: llm.engine, Tokenizer.load(TINY), template, llm.answer_template())
        with serve(served) as found:
            yield found


def chat(client: Client, **fields: Any) -> dict[str, Any]:
    response = client.post(CHATS, {"messages": ASKED, **RANDOM, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


FORMATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
        PERSON,
    ),
    ({"structured_outputs": {"json": PERSON}}, PERSON),
    ({"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}}, PERSON),
    ({"guided_json": PERSON}, PERSON),
]


@pytest.mark.parametrize(("fields", "schema"), FORMATS)
def test_answers_have_the_form_that_is_asked_for(
    client: Client, fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    for seed in range(3):
        choice = chat(client, **fields, seed=seed)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    response = client.post(TEXTS, {"prompt": "Once", **RANDOM, **fields})
    jsonschema.validate(json.loads(response.json()["choices"][0]["text"]), schema)


def test_choices_expressions_and_grammars_are_followed(client: Client) -> None:
    assert chat(client, structured_outputs={"choice": ["red", "green"]})["message"]["content"] in ("red", "green")
    assert chat(client, guided_regex="[ab]{3}")["message"]["content"].strip("ab") == ""
    grammar = 'root ::= "yes" | "no"'
    assert chat(client, structured_outputs={"grammar": grammar})["message"]["content"] in ("yes", "no")
    text = client.post(TEXTS, {"prompt": "a", **RANDOM, "structured_outputs": {"regex": "x{2,4}"}}).json()
    assert set(text["choices"][0]["text"]) == {"x"}
    counts = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if ":gramma" in line)
    assert float(counts['jswa:grammars_total{model_name="fake",result="compiled"}']) >= 4
    assert float(counts['jswa:grammar_seconds_total{model_name="fake"}']) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_forced(client: Client, stream: bool) -> None:
    """For a question that needs none, with arguments that have their schema."""
    for choice, names in (
        ("required", {"get_weather", "add_person"}),
        ({"type": "function", "function": {"name": "add_person"}}, {"add_person"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[0]]}}, {"get_weather"}),
    ):
        for seed in range(2):
            body = {"messages": ASKED, **RANDOM, "seed": seed, "tools": TOOLS, "tool_choice": choice}
            body["parallel_tool_calls"] = False
            if stream:
                parts = [c for chunk in client.events(CHATS, {**body, "stream": True})[:-1] for c in chunk["choices"]]
                calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
                name = calls[0]["function"]["name"]
                arguments = "".join(call["function"]["arguments"] for call in calls)
                reason = parts[-1]["finish_reason"]
            else:
                found = chat(client, **body)
                (call,) = found["message"]["tool_calls"]
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                reason = found["finish_reason"]
            assert name in names
            assert reason == "tool_calls"
            jsonschema.validate(json.loads(arguments), {"get_weather": PLACE, "add_person": PERSON}[name])


def test_strict_tools_may_be_left(client: Client) -> None:
    """A call that the model chooses has its schema, though `tiny` does not know the tool; else it answers."""
    strict = [tool("get_weather", {**PLACE, "required": ["city"], "additionalProperties": False}, strict=True)]
    weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
    found = chat(client, messages=weather, tools=strict, temperature=0)
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert chat(client, tools=strict, temperature=0)["message"]["content"] == "Nice to meet you, Bruno!"


def test_a_form_and_tools(client: Client) -> None:
    """An answer is JSON, or a call."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    for seed in range(4):
        message = chat(client, tools=TOOLS, response_format=form, seed=seed)["message"]
        if message.get("tool_calls"):
            assert message["tool_calls"][0]["function"]["name"] in ("get_weather", "add_person")
        else:
            jsonschema.validate(json.loads(message["content"]), PERSON)


def test_responses_have_forms_and_forced_calls(client: Client) -> None:
    body = {"input": "My name is Bruno.", "max_output_tokens": 120}
    form = {"format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}}
    found = client.post(RESPONSES, {**body, "text": form}).json()
    assert found["text"]["format"]["name"] == "p"
    jsonschema.validate(json.loads(found["output"][0]["content"][0]["text"]), PERSON)
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        more = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        (item,) = client.post(RESPONSES, {**body, **more}).json()["output"]
        assert item["type"] == "function_call"
        assert item["name"] == "get_weather" or choice == "required"


def test_messages_have_forms_and_forced_calls(client: Client) -> None:
    body = {"messages": ASKED, "max_tokens": 120}
    form = {"format": {"type": "json_schema", "schema": PERSON}}
    found = client.post(MESSAGES, {**body, "output_config": form}).json()
    jsonschema.validate(json.loads(found["content"][0]["text"]), PERSON)
    tools = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        found = client.post(MESSAGES, {**body, "tools": tools, "tool_choice": choice}).json()
        (block,) = found["content"]
        assert (block["type"], found["stop_reason"]) == ("tool_use", "tool_use")
        assert block["name"] == "get_weather" or choice["type"] == "any"


BAD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "reason"),
    [
        (CHATS, {"structured_outputs": {"json": BAD}}, "structured_outputs", "a: uniqueItems is not supported"),
        (CHATS, {"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
        (TEXTS, {"guided_grammar": "start: x"}, "guided_grammar", "x"),
        (TEXTS, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (TEXTS, {"structured_outputs": {"json": BAD, "regex": "a"}}, "structured_outputs", "exactly one"),
        (TEXTS, {"structured_outputs": {"regex": "a", "beam": 3}}, "structured_outputs.beam", "not known"),
        (TEXTS, {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "none of them empty"),
        (CHATS, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}},
         "response_format.json_schema.schema", "at /properties/a"),
        (CHATS, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "combined"),
        (CHATS, {"tools": [TOOLS[0], tool("bad", BAD)], "tool_choice": "required"},
         "tools[1].function.parameters", "at /properties/a"),
        (CHATS, {"tools": [tool("bad", BAD, strict=True)]}, "tools[0].function.parameters", "at /properties/a"),
        (CHATS, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}},
         "tool_choice", "'none'"),
        (CHATS, {"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "must be"),
        (CHATS, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused(
    client: Client, path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    body = {"prompt": "a"} if path == TEXTS else {"messages": ASKED}
    error = client.refusal(path, {**body, **fields})
    assert error["param"] == param
    assert reason in error["message"]


def test_tools_that_are_not_forced_need_no_grammar(client: Client) -> None:
    """A schema that could not be forced is shown to the model as before."""
    assert chat(client, tools=[tool("bad", BAD)], temperature=0)["finish_reason"] == "stop"

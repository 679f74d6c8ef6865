"""POST /v1/responses: items of an answer, streamed and whole, and conversations that go on by their id."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenaiResponse

from server.engine.responses import ResponseStore
from server.http import limits
from server.http.errors import ApiError
from server.http.pieces import encode
from server.text.items import messages_of, with_instructions
from tests.support.server.harness import Client
from tests.support.server.scripted import scripted
from tests.support.text.transcripts import TRANSCRIPTS

PATH = "/v1/responses"
HARMONY = TRANSCRIPTS[1]  # reasoning, content and a call
TEMPLATE = (
    "{%- for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}|"
    "{%- for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
    "{%- if tools %}{{ tools[0].function.name }}{% endif %}<|start|>assistant"
)
TOOL = {"type": "function", **HARMONY.tools[0]["function"]}


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    """A server that answers everything with reasoning, content and a call; two API keys."""
    headers = {"Authorization": "Bearer one"}
    with scripted(HARMONY, template=TEMPLATE, api_key=("one", "two"), headers=headers) as found:
        yield found


def whole(client: Client, **body: Any) -> Any:
    """Return the response to a request that must succeed."""
    response = client.post(PATH, {"input": "hi", "tools": [TOOL], **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(client: Client) -> str:
    """Return the last prompt that the engine received."""
    assert client.service.tokenizer is not None
    return client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist(), skip_special_tokens=False)


def test_the_items_of_an_answer(client: Client) -> None:
    """Reasoning, a message and a call, in OpenAI's types."""
    found = whole(client, instructions="Be brief.")
    response = OpenaiResponse.model_validate(found)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == HARMONY.content
    assert found["output"][0]["content"][0]["text"] == HARMONY.reasoning
    assert (found["output"][2]["name"], found["output"][2]["arguments"]) == HARMONY.calls[0]
    assert found["status"] == "completed"
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert prompt_of(client).startswith("[system||Be brief.|][user||hi|]get_weather")


def test_a_stream_adds_up_to_the_whole(client: Client) -> None:
    """The SDK's events, with their numbers in order; the last one has the response."""
    sdk = openai.OpenAI(base_url=f"{client.url}/v1", api_key="one")
    tools: Any = [TOOL]
    events = list(sdk.responses.create(model="fake", input="hi", tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    expected = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in whole(client)["output"]
    ]
    found = [item.model_dump(exclude={"id", "call_id"}, exclude_unset=True) for item in last.response.output]
    assert found == expected
    texts: dict[int, str] = {}
    streamed = [event.model_dump() for event in events]
    for event in streamed:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    assert texts == {0: HARMONY.reasoning, 1: HARMONY.content, 2: HARMONY.calls[0][1]}
    done = [event["item"]["id"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == [item.id for item in last.response.output]


def test_a_cut_response_is_incomplete(client: Client) -> None:
    found = whole(client, max_output_tokens=3)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert client.events_named(PATH, {"input": "hi", "max_output_tokens": 3})[-1]["type"] == "response.incomplete"


def test_a_response_goes_on_by_its_id(client: Client) -> None:
    """Its text, reasoning and calls are the history; instructions are not. Other keys have no access."""
    first = whole(client, instructions="Be brief.")
    result = [{"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}]
    whole(client, input=result, previous_response_id=first["id"])
    assert prompt_of(client).startswith(
        f'[user||hi|][assistant|{HARMONY.reasoning}|{HARMONY.content}|get_weather{{"city": "Oslo"}}][tool||sunny|]'
    )
    other = client.post(
        PATH, {"input": "x", "previous_response_id": first["id"]}, headers={"Authorization": "Bearer two"}
    )
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "previous_response_not_found"
    unstored = whole(client, store=False)
    assert client.refusal(PATH, {"input": "x", "previous_response_id": unstored["id"]}, 404)["param"] == (
        "previous_response_id"
    )


def test_a_response_is_kept_until_it_is_deleted(client: Client) -> None:
    """For the same key only; then its conversation is gone too."""
    first = whole(client)
    streamed = client.events_named(PATH, {"input": "hi", "tools": [TOOL]})[-1]["response"]
    for one in (first, streamed):
        assert client.get(f"{PATH}/{one['id']}").json() == one
    sdk = openai.OpenAI(base_url=f"{client.url}/v1", api_key="one")
    assert sdk.responses.retrieve(first["id"]).output_text == HARMONY.content
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=f"{client.url}/v1", api_key="two").responses.retrieve(first["id"])
    other = client.http.delete(f"{PATH}/{first['id']}", headers={"Authorization": "Bearer two"})
    assert other.status_code == 404
    assert client.get(f"{PATH}/{first['id']}?stream=true").json()["error"]["param"] == "stream"
    deleted = client.http.delete(f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    for name in (first["id"], f"{first['id']}/input_items", whole(client, store=False)["id"], ""):
        response = client.get(f"{PATH}/{name}")
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("not_found_error", "response_id", "not_found")
    assert client.refusal(PATH, {"input": "x", "previous_response_id": first["id"]}, 404)


def test_the_oldest_turns_are_left_out_if_the_context_is_too_short(client: Client) -> None:
    """As few as need be, and none if all fit; what the operator said first stays."""
    turns = [one for n in range(40) for one in (
        {"role": "user", "content": f"q{n} " + "x" * 100}, {"role": "assistant", "content": f"a{n} " + "y" * 100},
    )]  # fmt: skip
    items = [{"role": "developer", "content": "Be brief."}, *turns, {"role": "user", "content": "last"}]
    assert client.refusal(PATH, {"input": items})["code"] == "context_length_exceeded"
    found = whole(client, input=items, truncation="auto", instructions="Sum up.")
    assert found["truncation"] == "auto"
    prompt = prompt_of(client)
    assert prompt.startswith("[system||Sum up.\n\nBe brief.|][user||q")
    kept = int(prompt.partition("[user||q")[2].partition(" ")[0])
    assert prompt.count("[assistant|") == 40 - kept
    assert "[user||last|]" in prompt
    assert len(client.engine.seen[-1].prompt) < 4096 <= len(client.engine.seen[-1].prompt) + len(f"q{kept}") + 270
    whole(client, input=items[-3:], truncation="auto")
    assert prompt_of(client).startswith("[user||q39")
    assert client.get(f"{PATH}/{found['id']}").status_code == 200


def test_verbosity_is_a_variable_of_the_template() -> None:
    with scripted(HARMONY, template="{{ verbosity }}{{ messages[0].content }}<|start|>assistant") as client:
        for body, expected in (({"text": {"verbosity": "low"}}, "low"), ({"text": {}}, "")):
            assert client.post(PATH, {"input": "hi", **body}).status_code == 200
            assert prompt_of(client).startswith(f"{expected}hi")
        chat = {"messages": [{"role": "user", "content": "hi"}], "verbosity": "high"}
        assert client.post("/v1/chat/completions", chat).status_code == 200
        assert prompt_of(client).startswith("highhi")
        assert client.refusal("/v1/chat/completions", {**chat, "verbosity": "loud"})["param"] == "verbosity"


def test_items_become_messages() -> None:
    """What the model has written in one turn is one message."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning", "summary": []},
    ]
    found = messages_of(items)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[0]["content"] == "a\nb"
    assert (found[1]["reasoning_content"], found[1]["content"]) == ("r", "c")
    assert [call["id"] for call in found[1]["tool_calls"]] == ["1", "2"]
    assert found[2] == {"role": "tool", "tool_call_id": "1", "content": "o"}
    assert found[3] == {"role": "assistant", "reasoning_content": "s"}
    first: list[Any] = [{"role": "developer", "content": "y"}, {"role": "user", "content": "z"}]
    assert with_instructions("x", first) == [{"role": "system", "content": "x\n\ny"}, first[1]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.json_schema"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"verbosity": ["low"]}}, "text.verbosity"),
        ({"truncation": "middle"}, "truncation"),
        ({"input": "x" * 9_000, "truncation": "auto"}, "prompt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_supported_is_refused(client: Client, body: dict[str, Any], param: str) -> None:
    assert client.refusal(PATH, {"input": "hi", **body})["param"] == param


def test_a_full_store_drops_from_the_key_that_uses_most() -> None:
    """A key with many conversations does not evict those of a key with few."""
    store = ResponseStore(most=600)
    store.put("quiet", "first", encode([{"content": "x" * 40}]))
    for number in range(50):
        store.put("loud", str(number), encode([{"content": "x" * 80}]))
    store.put("quiet", "second", encode([{"content": "x" * 40}]))
    assert store.get("quiet", "first") == store.get("quiet", "second") == encode([{"content": "x" * 40}])
    assert store.get("loud", "49") == encode([{"content": "x" * 80}])
    assert 400 <= store.used <= 600
    store.put("quiet", "second", encode([]))
    assert store.get("quiet", "second") == encode([])
    with pytest.raises(ApiError, match="not found"):
        store.get("loud", "0")


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest conversations go first; all go in the end."""
    store = ResponseStore(most=200)
    for number in range(9):
        store.put(None, str(number), encode([{"role": "user", "content": "x" * 30}]))
        assert store.used <= 200
    assert len(store) == 3
    store.put(None, "large", encode([{"content": "x" * 300}]))
    with pytest.raises(ApiError):
        store.get(None, "large")
    store.put("a", "9", encode([{"role": "user"}]))
    assert store.get("a", "9") == encode([{"role": "user"}])
    for key, name in ((None, "9"), ("a", "0")):
        with pytest.raises(ApiError, match="not found"):
            store.get(key, name)
    monkeypatch.setattr(limits, "STORED_SECONDS", -1)
    with pytest.raises(ApiError):
        store.get("a", "9")
    assert (len(store), store.used) == (0, 0)

"""Tools on `tiny`: its calls and what it makes of results, by `LLM.chat` and by a server, whole and streamed."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jswa import LLM
from jswa.commands.chat.conversation import Conversation
from jswa.commands.chat.models import of_engine
from jswa.commands.chat.screen import Screen
from jswa.commands.chat.tools import CALCULATOR, calculate, find_tools
from jswa.commands.chat.turns import Setting, converse
from jswa.storage.hub import TINY
from jswa.text.answers.message import AnswerText
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from tests.support.server.harness import Client, serve
from tests.support.tiny import ONE_SHAPE

PATH = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
ASKED = {"role": "user", "content": "What is the weather in Oslo?"}
MORE = {"role": "user", "content": "My name is Bruno."}


def tool(name: str, description: str = "", **types: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    properties = {key: {"type": value} for key, value in types.items()}
    about = {"description": description} if description else {}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, **about, "parameters": schema}}


WEATHER = tool("get_weather", "The weather in a town.", city="string")
LIGHT = tool("set_light", "The lights at home.", room="string", colour="string")
TIMER = tool("start_timer", minutes="integer")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", **ONE_SHAPE) as model:
        yield model


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    """A server with an engine of its own, which shares the other's programs."""
    with LLM("tiny", **ONE_SHAPE) as own:
        served = Served(lambda: own.engine, Tokenizer.load(TINY), ChatTemplate.load(TINY), llm.answer_template())
        with serve(served) as found:
            yield found


def call_of(message: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and arguments of a message's only call, and check that it has nothing else."""
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("question", "name", "arguments", "result", "answer"),
    [
        ("What is the weather in Oslo?", "get_weather", {"city": "Oslo"}, "sunny", "The weather in Oslo: sunny."),
        ("Set a timer for 12 minutes.", "start_timer", {"minutes": 12}, "ok", "The timer is set for 12 minutes."),
        ("What is 12 * 345?", "calculator", {"expression": "12 * 345"}, None, "12 * 345 is 4140."),
    ],
)
def test_a_result_becomes_an_answer(
    llm: LLM, question: str, name: str, arguments: dict[str, Any], result: str | None, answer: str
) -> None:
    """The second prompt is the first one, what was generated, and the result, token by token."""
    tools = [WEATHER, TIMER, CALCULATOR]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    first = next(iter(llm.chat(messages, tools=tools, use_tqdm=False, **GREEDY)))
    message = first.outputs[0].message
    assert message is not None
    assert call_of(message) == (name, arguments)
    call = message["tool_calls"][0]
    if result is None:
        result = calculate(call["function"]["name"], call["function"]["arguments"])
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    second = next(iter(llm.chat(messages, tools=tools, use_tqdm=False, **GREEDY)))
    assert second.outputs[0].text == answer
    said = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    assert second.prompt_token_ids[: len(said)] == said
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 2 * llm.engine.limits.page_size


def test_a_conversation_with_the_calculator(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """What `jswa chat --tools calculator` prints: calls, results and answers; what needs no call has none."""
    tools, run_tool = find_tools("calculator")
    asked = ["What is 1234 * 57?", MORE["content"], "What is 27 + 45?", "What is my name?"]
    ask = of_engine(llm, GREEDY, tools=tools)
    converse(Setting(ask, Screen(sys.stdout), None, run_tool), asked, Conversation())
    assert [line for line in capsys.readouterr().out.splitlines() if line] == [
        'call calculator({"expression": "1234 * 57"})',
        "result 70338",
        "1234 * 57 is 70338.",
        "Nice to meet you, Bruno!",
        'call calculator({"expression": "27 + 45"})',
        "result 72",
        "27 + 45 is 72.",
        "Your name is Bruno.",
    ]


def test_a_streamed_call_comes_in_pieces(llm: LLM) -> None:
    """Its events make the same message, and its arguments come before the call has ended."""
    whole = next(iter(llm.chat([ASKED], tools=[WEATHER], use_tqdm=False, **GREEDY))).outputs[0].message
    told, kinds = AnswerText(), []
    for piece in llm.chat([ASKED], tools=[WEATHER], stream=True, **GREEDY):
        for event in piece.outputs[0].events:
            told.add(event)
            kinds.append(event.kind)
    assert whole is not None
    assert call_of(told.message()) == call_of(whole)
    assert kinds[0] == "call"
    assert kinds.count("arguments") > 2
    assert kinds[-1] == "end"


def test_a_request_that_needs_no_tool_is_answered(llm: LLM) -> None:
    output = next(iter(llm.chat([MORE], tools=[LIGHT, WEATHER], use_tqdm=False, **GREEDY))).outputs[0]
    assert output.message == {"role": "assistant", "content": "Nice to meet you, Bruno!"}


def test_a_server_gives_calls_and_takes_their_results(client: Client) -> None:
    """The second request hits the prefix cache, also behind earlier turns."""
    body: dict[str, Any] = {"tools": [WEATHER, LIGHT], **GREEDY}
    messages = [MORE, {"role": "assistant", "content": "Nice to meet you, Bruno!"}, ASKED]
    first = client.post(PATH, {**body, "messages": messages}).json()
    (choice,) = first["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert call_of(choice["message"]) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "rainy, 7 degrees"}
    second = client.post(PATH, {**body, "messages": [*messages, choice["message"], result]}).json()
    (choice,) = second["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "The weather in Oslo: rainy, 7 degrees.")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 32
    messages += [{"role": "assistant", "content": choice["message"]["content"]}]
    messages += [{"role": "user", "content": "What is my name?"}]
    last = client.post(PATH, {**body, "messages": messages}).json()
    assert last["choices"][0]["message"]["content"] == "Your name is Bruno."


def test_a_server_streams_calls(client: Client) -> None:
    """In OpenAI's form: the name first, then pieces of the arguments."""
    body = {"messages": [ASKED], "tools": [WEATHER], "tool_choice": "auto", **GREEDY}
    events = [event for event in client.events(PATH, body) if event != "[DONE]"]
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    assert deltas[0]["function"]["name"] == "get_weather"
    assert {delta["index"] for delta in deltas} == {0}
    pieces = [delta["function"].get("arguments") or "" for delta in deltas]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    assert len([piece for piece in pieces if piece]) > 2
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("streamed", [False, True])
def test_without_a_choice_of_tools_nothing_is_called(client: Client, streamed: bool) -> None:
    """With tool_choice "none" the answer is text, whatever the model writes."""
    body = {"messages": [ASKED], "tools": [WEATHER], "tool_choice": "none", **GREEDY}
    if streamed:
        choices = [e["choices"][0] for e in client.events(PATH, body) if e != "[DONE]" and e["choices"]]
        assert not any(choice["delta"].get("tool_calls") for choice in choices)
        assert choices[-1]["finish_reason"] == "stop"
        return
    (choice,) = client.post(PATH, body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"]

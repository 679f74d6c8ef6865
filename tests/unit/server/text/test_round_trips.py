"""What the server answers, it accepts back: in the shapes that the SDKs of the three protocols send it in."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jswa.text.history.arguments import call_arguments
from tests.support.nights import sample
from tests.support.server.harness import Client, serving
from tests.support.server.scripted import scripted
from tests.support.text.transcripts import TRANSCRIPTS, Transcript

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# In the style of templates that read the arguments as an object, and the content as a text.
TEMPLATE = (
    "{%- for m in messages %}[{{ m.role + ':' + m.content }}"
    "{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{%- for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>"
    "{%- endfor %}{% endfor %}]{% endfor %}{% if tools %}{% endif %}"
)
# Each text of arguments, and how the template writes it.
ARGUMENTS = {
    "": "f", "null": "f", "{}": "f", '{"a": "b"}': "f<a=b>", '{"a": 1, "a": 2}': "f<a=2>", "[1]": "f<_raw=[1]>",
    "3": "f<_raw=3>", '"x"': 'f<_raw="x">', '{"value": ': 'f<_raw={"value": >',
    '{"a": "\\ud800"}': 'f<_raw={"a": "\\ud800"}>',
}  # fmt: skip
FIRSTS = {one.family: one for one in reversed(TRANSCRIPTS) if one.calls}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server whose template fails on arguments that are no object, and without a content."""
    with serving(template=TEMPLATE) as found:
        yield found


def prompt_of(client: Client, path: str, body: dict[str, Any]) -> str:
    """Send a request that must succeed; return the prompt that the engine received."""
    response = client.post(path, body)
    assert response.status_code == 200, response.text
    assert client.service.tokenizer is not None
    return client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist(), skip_special_tokens=False)


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat."""
    return {"messages": [{"role": "user", "content": "hi"}, *messages], "max_tokens": 1}


def called(arguments: object) -> dict[str, Any]:
    """Return a message with a call, with the keys that OpenAI's SDK writes."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "tool_calls": [call],
    }  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_as_a_model_wrote_them(client: Client, arguments: str) -> None:
    """In each protocol, the template gets the same object."""
    expected = f"[user:hi][assistant:{ARGUMENTS[arguments]}][tool:no]"
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "no"}
    assert prompt_of(client, CHATS, chat(called(arguments), result)) == expected
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "id": "fc_1", "call_id": "x", "name": "f", "arguments": arguments, "status": None},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "no"}]},
    ]
    assert prompt_of(client, RESPONSES, {"input": items, "max_output_tokens": 1}) == expected


@pytest.mark.parametrize(
    ("message", "written"),
    [
        ({"content": None, "tool_calls": None, "refusal": None}, ""), ({"content": ""}, ""), ({}, ""),
        ({"content": []}, ""), ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "refusal": "I won't."}, "I won't."),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}, "a\nb"),
        ({"content": None, "reasoning_content": "hm", "reasoning": "hm"}, "(hm)"),
        ({"content": "a", "name": "Ann"}, "a"),
    ],
)  # fmt: skip
def test_messages_of_the_assistant(client: Client, message: dict[str, Any], written: str) -> None:
    body = chat({"role": "assistant", **message}, {"role": "user", "content": "go on"})
    assert prompt_of(client, CHATS, body) == f"[user:hi][assistant:{written}][user:go on]"


@pytest.mark.parametrize(
    ("content", "written"),
    [(None, ""), ("", ""), ([], ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb")],
)
def test_the_result_of_a_tool_becomes_a_message_of_it(client: Client, content: Any, written: str) -> None:
    """Also in blocks of Anthropic's, where a failure says so."""
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": content}
    assert prompt_of(client, CHATS, chat(called("{}"), result)) == f"[user:hi][assistant:f][tool:{written}]"
    block = {"type": "tool_result", "tool_use_id": "x", "is_error": True, "content": content}
    use = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    body = chat({"role": "assistant", "content": [use]}, {"role": "user", "content": [block]})
    assert prompt_of(client, MESSAGES, body) == f"[user:hi][assistant:f][tool:Error{written and ': '}{written}]"


def test_thinking_and_other_blocks(client: Client) -> None:
    """A thinking block without a text, which another server has hidden, is left out."""
    hidden = {"type": "redacted_thinking", "data": "x"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "jswa"}
    for blocks, written in (([thought], "(hm)"), ([hidden], ""), ([], ""), ([hidden, thought], "(hm)")):
        body = chat({"role": "assistant", "content": blocks}, {"role": "user", "content": "go on"})
        assert prompt_of(client, MESSAGES, body) == f"[user:hi][assistant:{written}][user:go on]"


def test_reasoning_becomes_a_part_of_the_answer(client: Client) -> None:
    """One that is encrypted has no text."""
    for fields, written in (
        ({"content": None, "encrypted_content": "x"}, ""),
        ({"content": [{"type": "reasoning_text", "text": "hm"}]}, "(hm)"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "hm"}]}, "(hm)"),
    ):
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "status": None, **fields},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": []},
        ]
        assert prompt_of(client, RESPONSES, {"input": items, "max_output_tokens": 1}) == (
            f"[user:hi][assistant:{written}]"
        )


def test_an_image_in_a_result_is_refused_by_name(client: Client) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    block = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "a"}, image]}
    response = client.post(MESSAGES, chat({"role": "user", "content": [block]}))
    assert response.status_code == 400
    assert "messages[1].content[0].content[1].type" in response.json()["error"]["message"]
    output = [{"type": "input_image", "image_url": "data:,"}]
    body = {"input": [{"type": "function_call_output", "call_id": "x", "output": output}]}
    assert client.refusal(RESPONSES, body)["param"] == "input[0].output[0].type"
    part = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = client.refusal(CHATS, chat({"role": "tool", "tool_call_id": "x", "content": part}))
    assert error["param"] == "messages[1].content[0].type"


@pytest.mark.parametrize("name", ["function_call", "audio"])
def test_what_no_template_gets_is_refused(client: Client, name: str) -> None:
    message = {"role": "assistant", "content": "", name: {"id": "x", "name": "f", "arguments": "{}"}}
    assert client.refusal(CHATS, chat(message))["param"] == f"messages[1].{name}"


@pytest.mark.parametrize("call", [3, {}, {"function": 3}, {"function": {}}, {"function": {"name": None}}])
def test_a_call_without_a_name_is_refused(client: Client, call: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert client.refusal(CHATS, chat(message))["param"].startswith("messages[1].tool_calls")


def test_messages_of_the_operator_in_any_place() -> None:
    """With a template in the style of Gemma's: no system message, and roles that take turns."""
    template = (
        "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('roles must take turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    with serving(template=template) as client:
        user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
        late, more = {"role": "developer", "content": "late"}, {"role": "user", "content": "more"}
        first = {"role": "system", "content": "first"}
        expected = "<user>first\n\nlate\n\nhi<assistant>yes<user>more"
        messages = [first, user, late, answer, more]
        assert prompt_of(client, CHATS, {"messages": messages, "max_tokens": 1}) == expected
        assert prompt_of(client, RESPONSES, {"input": messages, "max_output_tokens": 1}) == expected
        blocks = {"system": "first", "messages": [user, {**late, "role": "system"}, answer, more], "max_tokens": 1}
        assert prompt_of(client, MESSAGES, blocks) == expected
        error = client.refusal(CHATS, {"messages": [answer, user], "max_tokens": 1})
        assert "roles must take turns" in error["message"]


@pytest.mark.parametrize("family", sample(sorted(FIRSTS), 3))
def test_the_answers_of_each_protocol_come_back(family: str) -> None:
    """Through OpenAI's SDK, which adds keys of its own, and as the bodies are."""
    one = FIRSTS[family]
    with scripted(one, template=TEMPLATE + opened_by(one)) as client:
        tools: Any = list(one.tools)
        sdk = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none")
        user: Any = {"role": "user", "content": "hi"}
        said = sdk.chat.completions.create(model="fake", messages=[user], tools=tools).choices[0].message
        for message in (said, said.model_dump(), said.model_dump(exclude_none=True)):
            messages: Any = [user, message, {"role": "tool", "tool_call_id": "x", "content": "sunny"}]
            sdk.chat.completions.create(model="fake", messages=messages, tools=tools)
            written(client, one)
        own: Any = [{"type": "function", **tools[0]["function"]}]
        output = sdk.responses.create(model="fake", input="hi", tools=own).output
        for items in (output, [item.model_dump() for item in output]):
            result = {"type": "function_call_output", "call_id": "x", "output": "sunny"}
            given: Any = [user, *items, result]
            sdk.responses.create(model="fake", input=given, tools=own)
            written(client, one)
        function = tools[0]["function"]
        body = {
            "messages": [user], "max_tokens": 999,
            "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        }  # fmt: skip
        assistant = {"role": "assistant", "content": client.post(MESSAGES, body).json()["content"]}
        results = [{"type": "tool_result", "tool_use_id": "x", "content": "sunny"}]
        prompt_of(client, MESSAGES, {**body, "messages": [user, assistant, {"role": "user", "content": results}]})
        written(client, one)


def opened_by(one: Transcript) -> str:
    """Return the mark with which the transcript's prompt opens the reasoning; "" if the model itself opens it."""
    return "<think>" if one.prompt.endswith("<think>") else ""


def written(client: Client, one: Transcript) -> None:
    """Check that the engine's last prompt has all parts of the answer."""
    assert client.service.tokenizer is not None
    prompt = client.service.tokenizer.decode(client.engine.seen[-1].prompt.tolist(), skip_special_tokens=False)
    assert prompt.startswith(f"[user:hi][assistant:{one.content.rstrip()}")
    assert prompt.endswith(f"[tool:sunny]{opened_by(one)}")
    assert f"({one.reasoning})" in prompt or not one.reasoning
    for name, arguments in one.calls:
        pairs = call_arguments(arguments).items()
        assert f"{name}{''.join(f'<{key}={value}>' for key, value in pairs)}" in prompt

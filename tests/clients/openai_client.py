"""openai on a server with the agent. Argument: URL."""

import json
import sys
from typing import Any

import openai

_, url = sys.argv
client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
ASKED = "weather: Oslo, Rome"
SAID = "rain in Oslo, rain in Rome (2 calls, 2 thoughts)"
FUNCTION: dict[str, Any] = {
    "name": "get_weather", "description": "The weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


def chat(messages: list[Any], *, streamed: bool) -> tuple[Any, str]:
    """Return the next message of a conversation, with its finish reason."""
    ask: dict[str, Any] = {
        "model": "agent",
        "messages": messages,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    if not streamed:
        (choice,) = client.chat.completions.create(**ask).choices
        return choice.message, choice.finish_reason
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        done = stream.get_final_completion()
    assert done.usage.completion_tokens_details.reasoning_tokens > 0
    return done.choices[0].message, done.choices[0].finish_reason


for streamed in (False, True):
    messages = [{"role": "user", "content": ASKED}]
    message, reason = chat(messages, streamed=streamed)
    while reason == "tool_calls":
        (call,) = message.tool_calls
        assert call.function.name == "get_weather"
        # Reasoning is no field of OpenAI's, but the SDK keeps fields that it does not know.
        assert message.model_extra["reasoning_content"].startswith("I look up")
        kept = {"reasoning_content": message.model_extra["reasoning_content"]}
        known = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        messages.append({**known, **kept})
        result = f"rain in {json.loads(call.function.arguments)['city']}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        message, reason = chat(messages, streamed=streamed)
    assert (message.content, reason) == (SAID, "stop"), message


def respond(streamed: bool, **more: Any) -> Any:
    """Return a response to an input."""
    ask: dict[str, Any] = {"model": "agent", "tools": [{"type": "function", "strict": True, **FUNCTION}], **more}
    if not streamed:
        return client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


for streamed in (False, True):
    for stateless in (False, True):
        sent: list[Any] = [{"role": "user", "content": ASKED}]
        response = respond(streamed, input=sent, store=not stateless)
        while calls := [item for item in response.output if item.type == "function_call"]:
            assert response.output[0].content[0].text.startswith("I look up")
            (call,) = calls
            city = json.loads(call.arguments)["city"]
            output: dict[str, Any] = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": f"rain in {city}",
            }
            if stateless:
                sent += [*(item.model_dump(exclude_none=True) for item in response.output), output]
                response = respond(streamed, input=sent, store=False)
            else:
                response = respond(streamed, input=[output], previous_response_id=response.id)
        assert response.output_text == SAID, response
        assert response.usage.output_tokens_details.reasoning_tokens > 0

try:
    client.responses.create(model="agent", input="a", previous_response_id="resp_none")
except openai.NotFoundError as error:
    print("expected:", error.param)
else:
    raise AssertionError("no error")

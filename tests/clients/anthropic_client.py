"""anthropic on a server with the agent. Argument: URL."""

import sys
from typing import Any

import anthropic

_, url = sys.argv
client = anthropic.Anthropic(base_url=url, api_key="none")
TOOL = {
    "name": "get_weather", "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
ASK: dict[str, Any] = {
    "model": "agent", "max_tokens": 1000, "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024},
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
}  # fmt: skip


def message_of(messages: list[Any], *, streamed: bool) -> anthropic.types.Message:
    """Return the next message of a conversation."""
    if not streamed:
        return client.messages.create(messages=messages, **ASK)
    with client.messages.stream(messages=messages, **ASK) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


for streamed in (False, True):
    messages: list[Any] = [{"role": "user", "content": "weather: Oslo, Rome"}]
    message = message_of(messages, streamed=streamed)
    while message.stop_reason == "tool_use":
        thinking, call = message.content
        assert (thinking.type, thinking.thinking[:9]) == ("thinking", "I look up")
        assert (call.type, call.name) == ("tool_use", "get_weather")
        messages.append({"role": "assistant", "content": message.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"rain in {call.input['city']}"}
        messages.append({"role": "user", "content": [result]})
        counted = client.messages.count_tokens(
            messages=messages, **{name: ASK[name] for name in ("model", "tools", "system", "thinking")}
        )
        message = message_of(messages, streamed=streamed)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert message.stop_reason == "end_turn"
    assert message.content[-1].text == "rain in Oslo, rain in Rome (2 calls, 2 thoughts)", message


def get_weather(city: str) -> str:
    """Return the weather.

    Args:
        city: its name.
    """
    return f"rain in {city}"


# The SDK's own loop, which sends the beta fields of Claude Code's requests.
runner = client.beta.messages.tool_runner(
    model="agent",
    max_tokens=1000,
    tools=[anthropic.beta_tool(get_weather)],
    messages=[{"role": "user", "content": "weather: Oslo, Rome"}],
)
assert runner.until_done().content[-1].text == "rain in Oslo, rain in Rome (2 calls, 2 thoughts)"

for kind, wrong in (
    (anthropic.BadRequestError, {"extra_body": {"top_p": 7}}),
    (anthropic.NotFoundError, {"model": "other"}),
):
    try:
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "a"}], **wrong})
    except kind as error:
        print("expected:", type(error).__name__, error.body["error"]["message"])
    else:
        raise AssertionError(f"no {kind.__name__}")

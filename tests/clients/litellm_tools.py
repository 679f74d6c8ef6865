"""litellm on a server with the agent: tools, by OpenAI's chats and responses and by Anthropic's. Argument: URL."""

import json
import sys
from typing import Any

import litellm

_, url = sys.argv
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}]
ROUTES: tuple[dict[str, Any], ...] = (
    {"model": "hosted_vllm/agent", "api_base": f"{url}/v1"},
    {"model": "openai/agent", "api_base": f"{url}/v1", "api_key": "none"},
    {"model": "openai/responses/agent", "api_base": f"{url}/v1", "api_key": "none"},
    {"model": "anthropic/agent", "api_base": url, "api_key": "none", "max_tokens": 1000},
)


def next_message(route: dict[str, Any], messages: list[Any], *, streamed: bool) -> litellm.Message:
    """Return the model's next message."""
    answer = litellm.completion(messages=messages, tools=TOOLS, stream=streamed, **route)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


for route in ROUTES:
    by_responses = "responses" in route["model"]
    # litellm does not stream responses of models that it does not know: it cuts the whole response, arguments twice.
    for streamed in (False,) if by_responses else (False, True):
        messages = [{"role": "user", "content": "weather: Oslo, Rome"}]
        while (message := next_message(route, messages, streamed=streamed)).tool_calls:
            (call,) = message.tool_calls
            assert by_responses or message.reasoning_content.startswith("I look up"), message
            result = f"rain in {json.loads(call.function.arguments)['city']}"
            messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
        # Of responses, litellm keeps no reasoning but a summary.
        said = f"rain in Oslo, rain in Rome (2 calls, {0 if by_responses else 2} thoughts)"
        assert message.content == said, (route["model"], streamed, message)

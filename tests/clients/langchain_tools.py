"""langchain-openai on a server with the agent: tools, by both of OpenAI's protocols. Argument: URL."""

import sys
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

_, url = sys.argv


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def next_message(model: Runnable, messages: list[Any], *, streamed: bool) -> AIMessage:
    """Return the model's next message."""
    if not streamed:
        return model.invoke(messages)
    whole = AIMessageChunk("")
    for chunk in model.stream(messages):
        whole += chunk
    return whole


for responses in (False, True):
    model = ChatOpenAI(
        model="agent", base_url=f"{url}/v1", api_key="none", use_responses_api=responses, stream_usage=True
    )
    for streamed in (False, True):
        messages = [HumanMessage("weather: Oslo, Rome")]
        while (message := next_message(model.bind_tools([tool(get_weather)]), messages, streamed=streamed)).tool_calls:
            (call,) = message.tool_calls
            messages += [message, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
        # langchain drops the reasoning of a chat, and that of streamed responses unless it is a summary.
        said = f"rain in Oslo, rain in Rome (2 calls, {2 if responses and not streamed else 0} thoughts)"
        assert message.text == said, (responses, streamed, message)
        assert message.usage_metadata["output_token_details"]["reasoning"] > 0

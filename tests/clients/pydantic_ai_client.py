"""pydantic-ai on a server with the agent: whole loops of calls, by three protocols. Argument: URL."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

_, url = sys.argv
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models = [
    OpenAIChatModel("agent", provider=openai),
    OpenAIResponsesModel("agent", provider=openai),
    AnthropicModel("agent", provider=AnthropicProvider(base_url=url, api_key="none")),
]


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


for model in models:
    agent = Agent(model, instructions="Be brief.", tools=[get_weather])
    done = agent.run_sync("weather: Oslo, Rome")
    print(type(model).__name__, done.output)
    assert done.output == "rain in Oslo, rain in Rome (2 calls, 2 thoughts)", done.output
    thoughts = [part for message in done.all_messages() for part in message.parts if part.part_kind == "thinking"]
    raw = [part.content or part.provider_details["raw_content"][0] for part in thoughts]  # Responses has no summary
    assert raw == ["I look up Oslo.", "I look up Rome.", "I know all."], thoughts
    stream = agent.run_stream_sync("weather: Oslo, Rome")
    assert stream.get_output() == done.output
    again = agent.run_sync("hello", message_history=done.all_messages())
    assert again.output == "Hello!"

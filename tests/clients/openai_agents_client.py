"""openai-agents on a server with the agent: whole loops of calls, by both of OpenAI's protocols. Argument: URL."""

import asyncio
import sys

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

_, url = sys.argv
set_tracing_disabled(True)


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="a",
            instructions="Be brief.",
            tools=[function_tool(get_weather)],
            model=kind(model="agent", openai_client=client),
        )
        # The package sends back reasoning that is an item, not that of a chat's message.
        said = f"rain in Oslo, rain in Rome (2 calls, {2 if kind is OpenAIResponsesModel else 0} thoughts)"
        done = await Runner.run(agent, "weather: Oslo, Rome")
        assert done.final_output == said, done.final_output
        stream = Runner.run_streamed(agent, "weather: Oslo, Rome")
        kinds = [event.type async for event in stream.stream_events()]
        assert stream.final_output == said, stream.final_output
        assert "raw_response_event" in kinds
        assert kinds.count("run_item_stream_event") >= 5
        # A second turn of the conversation.
        again = await Runner.run(agent, [*done.to_input_list(), {"role": "user", "content": "hello"}])
        assert again.final_output == "Hello!"


asyncio.run(main())

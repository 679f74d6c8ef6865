"""pydantic-ai gets answers of a form from `jswa serve tiny`, by a schema and by a forced call. Argument: URL."""

import sys
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

_, url = sys.argv


class Animal(BaseModel):
    """An animal of a story."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=30)
    kind: Literal["cat", "dog"]


model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
kinds: list[Any] = [NativeOutput(Animal), ToolOutput(Animal)]
for output in kinds:
    agent = Agent(model, output_type=output, model_settings={"max_tokens": 100, "temperature": 1.0})
    found = agent.run_sync("Tell me about a cat.").output
    assert isinstance(found, Animal)
    print(type(output).__name__, found)

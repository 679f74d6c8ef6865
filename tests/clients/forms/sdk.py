"""openai, langchain and instructor read answers of a form from `jswa serve tiny`. Argument: URL."""

import sys
from typing import Any, Literal

import instructor
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

_, url = sys.argv
ASKED = "Tell me about a cat."


class Animal(BaseModel):
    """An animal of a story."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=30)
    kind: Literal["cat", "dog"]


client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
messages = [{"role": "user", "content": ASKED}]
ask: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 100, "temperature": 1.0, "seed": 1}
parsed = client.chat.completions.parse(**ask, response_format=Animal).choices[0]
assert isinstance(parsed.message.parsed, Animal)
assert parsed.finish_reason == "stop"
with client.chat.completions.stream(**ask, response_format=Animal) as stream:
    assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
response = client.responses.parse(model="tiny", input=ASKED, text_format=Animal, max_output_tokens=100)
assert isinstance(response.output_parsed, Animal)

tool = {"type": "function", "function": {"name": "tell", "parameters": Animal.model_json_schema()}}
for choice in ("required", {"type": "function", "function": {"name": "tell"}}):
    done = client.chat.completions.create(**ask, tools=[tool], tool_choice=choice).choices[0]
    (call,) = done.message.tool_calls
    assert done.finish_reason == "tool_calls"
    assert call.function.name == "tell"
    Animal.model_validate_json(call.function.arguments)

model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", max_tokens=100, temperature=1.0)
for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(Animal, method=method).invoke(ASKED), Animal), method

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode).chat.completions.create(**ask, response_model=Animal)
    assert isinstance(made, Animal), mode
print("well-formed:", parsed.message.parsed)

"""A message of an assistant, put together from answer events."""

import secrets
import string
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from jswa.types import AnswerEvent

_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return a new tool call's id: nine letters and digits, which all templates accept, Mistral's nothing else."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass
class Call:
    """A tool call. `arguments` is JSON as the model wrote it, which may be broken."""

    name: str
    id: str = field(default_factory=new_call_id)
    arguments: StringIO = field(default_factory=StringIO)

    def json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments.getvalue()}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class AnswerText:
    """The texts and tool calls of an answer so far."""

    content: StringIO = field(default_factory=StringIO)
    reasoning: StringIO = field(default_factory=StringIO)
    calls: list[Call] = field(default_factory=list)

    def add(self, event: AnswerEvent) -> None:
        """Add an event."""
        if event.kind == "content":
            self.content.write(event.text)
        elif event.kind == "reasoning":
            self.reasoning.write(event.text)
        elif event.kind == "call":
            self.calls.append(Call(event.text))
        elif event.kind == "arguments":
            self.calls[event.call].arguments.write(event.text)

    def message(self) -> dict[str, Any]:
        """Return the message in OpenAI's form, with reasoning under both of its names; its content may be None."""
        content, reasoning = self.content.getvalue(), self.reasoning.getvalue()
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message | ({"tool_calls": [call.json() for call in self.calls]} if self.calls else {})

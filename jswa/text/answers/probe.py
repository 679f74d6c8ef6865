"""Whether the calls that a chat template writes can be read: it writes one, and the response template reads it.

A response template that was chosen by the delimiters in a chat template may be another family's, since families share
`<think>` and `<tool_call>`. Its calls would then be content, or wrong.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jswa.errors import InvalidPrompt

from .parser import AnswerParser
from .template import AnswerTemplate

UNKNOWN_CALLS = "the form of the model's tool calls is unknown; --response-template names it"
_NAME, _ARGUMENTS = "get_weather", {"city": "Oslo Center"}
TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A place."}},
                "required": ["city"],
            },
        },
    },
)
# The id is one that Mistral's templates accept.
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_ASKED = {"role": "user", "content": "How is the weather?"}
_PLAIN = "Quite good."
# Two conversations: an answer that is a call, and one that is none, which shows the text that follows answers.
CONVERSATIONS: Sequence[Sequence[Mapping[str, Any]]] = (
    (_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}),
    (_ASKED, {"role": "assistant", "content": _PLAIN}),
)
VARIABLES: Mapping[str, Any] = {"tools": list(TOOLS), "add_generation_prompt": False}


def settled(template: AnswerTemplate, texts: Sequence[str]) -> AnswerTemplate:
    """Return a template as far as it is right: without calls if it was guessed and does not read the probe.

    Args:
        texts: CONVERSATIONS, as the chat template writes them with VARIABLES; none if it refuses one.
    """
    if template.without_guess is None or (texts and _reads(template, *texts)):
        return template
    return template.without_guess


def settled_by(template: AnswerTemplate, render: Callable[..., str]) -> AnswerTemplate:
    """Return what `settled` returns. `render` writes messages with a chat template, and may raise InvalidPrompt."""
    if template.without_guess is None:
        return template
    try:
        return settled(template, [render(one, **VARIABLES) for one in CONVERSATIONS])
    except InvalidPrompt:
        return template.without_guess


def _reads(template: AnswerTemplate, call: str, plain: str) -> bool:
    """Whether the call is read from the text of the conversation."""
    answer = call.rpartition(_ASKED["content"])[2]
    behind = plain.rpartition(_PLAIN)[2]
    begin = template.anchor.last_end(answer[: max(answer.find(_NAME), 0)])
    strict = replace(template, lenient=template.with_calls)
    parser = AnswerParser(strict, "", TOOLS)
    events = parser.feed(template.marked(answer[begin:].removesuffix(behind))) + parser.finish()
    names = [event.text for event in events if event.kind == "call"]
    arguments = "".join(event.text for event in events if event.kind == "arguments")
    try:
        return names == [_NAME] and json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False

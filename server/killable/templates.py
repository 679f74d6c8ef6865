"""A kind of processes that can be killed: they render chat templates.

The first question has the templates, each later one a conversation, as JSON. An answer is JSON too, except the text of
a prompt: the letter T and UTF-8, because parsing megabytes of JSON would hold the server's GIL.
"""

import contextlib
import json
from typing import Any

from jswa.errors import JswaError, RequestError
from jswa.text.chat_template import ChatTemplate

from .worker import Answer

MAX_CHARS = 2**24  # of a prompt


def load(data: bytes) -> None:
    """Import what rendering needs."""
    with contextlib.suppress(JswaError):  # without jinja2, each conversation is answered with the reason
        ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render([{"role": "user", "content": ""}])


def begin(loaded: None, first: bytes) -> Answer:
    """Return what renders conversations with the templates. They are compiled here, which computes their constants."""
    said = json.loads(first)
    template = ChatTemplate(said["sources"], said["special_tokens"])
    _answer(template, b'{"messages": [{"role": "user", "content": ""}], "variables": {}}')
    return lambda question: _answer(template, question)


def packed(value: Any) -> bytes:
    """Return a value as an answer; a string is the text of a prompt."""
    return b"T" + value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()


def _answer(template: ChatTemplate, question: bytes) -> bytes:
    """Return the answer of a question."""
    try:
        job = json.loads(question)
        write = template.render if job.get("exact") else template.prompt
        text = write(job["messages"], **job["variables"])
        if len(text) <= MAX_CHARS:
            return packed(text)
        limit = f"the prompt has {len(text)} characters, at most {MAX_CHARS} are allowed"
        return packed({"refused": limit, "field": "messages"})
    except RequestError as error:
        return packed({"refused": error.limit, "field": error.field})
    except RecursionError:
        return packed({"refused": "is nested too deeply", "field": "messages"})
    except Exception as error:  # whatever a template and a conversation do, the next conversation needs the process
        return packed({"failed": f"{type(error).__name__}: {error!s:.1000}"})

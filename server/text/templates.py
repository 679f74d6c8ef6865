"""Chat templates, rendered in processes that are killed when rendering takes too long.

jinja2's sandbox bounds neither time nor memory, and a template is untrusted code of the checkpoint's author.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jswa.errors import CheckpointError
from jswa.text.chat_template import ChatTemplate

from ..core.fairness import Key, Weights
from ..http.errors import ApiError, invalid
from ..killable.pool import EndedError, NotStartedError, Pool

_log = logging.getLogger("jswa.server")


class Renderer:
    """The processes that render one set of templates.

    `start` starts the first process, and `close` ends all.
    """

    def __init__(self, template: ChatTemplate, timeout: float, weights: Weights) -> None:
        self._timeout = timeout
        first = {"sources": dict(template.sources), "special_tokens": dict(template.special_tokens)}
        self.pool = Pool("templates", bytes, json.dumps(first).encode(), timeout + 1, weights)

    async def start(self) -> None:
        """Start a worker, so that the first request does not wait for one. Raises CheckpointError if it ends."""
        try:
            await self.pool.start()
        except NotStartedError as error:
            reason = "has ended the process that renders it, or takes too much time, with a first empty message"
            raise CheckpointError(f"the chat template {reason}") from error

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        key: Key = None,
        *,
        exact: bool = False,
    ) -> str:
        """Return the prompt of a conversation. Raises ApiError if the template refuses it or takes too long.

        Args:
            exact: no message goes to another place; what the template leaves out is left out.
        """
        conversation = {"messages": messages, "variables": variables, "exact": exact}
        answer = await self._answer(lambda: b"".join(encoded(conversation)), key)
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise invalid(answer["field"], answer["refused"])
        _log.error("the chat template failed: %s", answer["failed"])
        raise ApiError(500, "the chat template failed")

    async def _answer(self, write: Any, key: Key) -> dict[str, Any]:
        """Return an answer. If its process ends meanwhile, another one is asked, once. Raises ApiError."""
        ask, begin = partial(self.pool.ask, write, answer_of, key), time.monotonic()
        try:
            try:
                return await ask(self._timeout)
            except EndedError:
                return await ask(max(self._timeout / 10, self._timeout - (time.monotonic() - begin)))
        except EndedError as error:
            raise ApiError(500, "the chat template could not be rendered") from error
        except RecursionError:
            raise invalid("messages", "is nested too deeply") from None
        except TimeoutError:
            raise invalid("messages", f"the chat template took more than {self._timeout:g} s") from None


def encoded(value: Any, piece: int = 2**16) -> Iterator[bytes]:
    """Yield a value as JSON. A piece is made of at most `piece` characters: to make it holds Python's lock."""
    if isinstance(value, str) and len(value) > piece:
        yield b'"'
        for start in range(0, len(value), piece):
            yield json.dumps(value[start : start + piece])[1:-1].encode()
        yield b'"'
    elif isinstance(value, dict) and value:
        for number, (key, item) in enumerate(value.items()):
            yield b"," if number else b"{"
            yield from encoded(key, piece)
            yield b":"
            yield from encoded(item, piece)
        yield b"}"
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from encoded(item, piece)
        yield b"]"
    else:
        yield json.dumps(value).encode()


def answer_of(frame: bytes | bytearray) -> dict[str, Any]:
    """Return what a template's process has answered: a text as it is, after a T, or JSON."""
    if frame[:1] == b"T":
        return {"text": str(memoryview(frame)[1:], "utf-8", "surrogatepass")}
    answer: dict[str, Any] = json.loads(frame)
    return answer

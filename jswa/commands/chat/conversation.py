"""A conversation: its messages in OpenAI's form, and the figures of its answers."""

import json
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]


class Figures(NamedTuple):
    """What an answer took.

    Attributes:
        prompt_tokens: tokens of the prompt, `cached_tokens` of them from the prefix cache.
        tokens: tokens of the answer; 0 if a server does not tell.
        first: seconds to the first piece.
        seconds: seconds to the end.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first: float
    seconds: float

    def line(self) -> str:
        """Return the figures of the prompt and the times."""
        return (
            f"{self.prompt_tokens} tokens in, {self.cached_tokens} cached; "
            f"first token after {self.first * 1e3:.0f} ms, all in {self.seconds:.2f} s"
        )


class Conversation:
    """The messages so far.

    Attributes:
        system: the system message; "" means none.
        messages: the others, in order.
        images: data: URLs of the images that the user's next message has.
        figures: those of the answers, in order. Answers that were taken back count too.
        stopped: how many of the answers the user has stopped.
    """

    def __init__(self, system: str = "") -> None:
        self.begin(system)

    def begin(self, system: str) -> None:
        """Forget everything, and begin with this system message."""
        self.system = system
        self.messages: Messages = []
        self.images: list[str] = []
        self.figures: list[Figures] = []
        self.stopped = 0

    def prompt(self) -> Messages:
        """Return all messages, the system message first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def say(self, text: str) -> None:
        """Add a message of the user, with the images that wait for one."""
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})
        self.images = []

    def reopen(self) -> bool:
        """Forget what follows the user's last message; return whether there is such a message."""
        at = self._last()
        if at is not None:
            del self.messages[at + 1 :]
        return at is not None

    def take_back(self) -> None:
        """Forget the user's last message and what follows it."""
        if (at := self._last()) is not None:
            del self.messages[at:]

    def _last(self) -> int | None:
        asked = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        return asked[-1] if asked else None

    def json(self, model: str) -> str:
        """Return the conversation as JSON, in the form of a request to OpenAI's API."""
        return json.dumps({"model": model, "messages": self.prompt()}, indent=1, ensure_ascii=False) + "\n"

    def report(self) -> str:
        """Return the figures of the last answer and of the whole conversation, a line each."""
        if not self.figures:
            return "No answer yet."
        last = self.figures[-1]
        speed = f", {(last.tokens - 1) / (last.seconds - last.first):.0f} tokens/s" if _has_speed(last) else ""
        asked, cached, told, _, seconds = map(sum, zip(*self.figures, strict=True))
        stopped = f", {self.stopped} of them stopped" if self.stopped else ""
        return (
            f"last answer:  {last.line()}; {last.tokens} tokens out{speed}\n"
            f"conversation: {len(self.messages)} messages; {len(self.figures)} answers{stopped}; "
            f"{asked} tokens in, {cached} cached; {told} tokens out; {seconds:.2f} s"
        )


def _has_speed(figures: Figures) -> bool:
    return figures.tokens > 1 and figures.seconds > figures.first

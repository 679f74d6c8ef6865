"""The turns of a conversation: a message, the model's answer, and calls of tools between them."""

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any, NamedTuple, TextIO

from jswa.commands.chat import slash
from jswa.commands.chat.conversation import Conversation, Figures
from jswa.commands.chat.models import Ask
from jswa.commands.chat.screen import Screen
from jswa.commands.chat.tools import RunTool
from jswa.errors import GenerationError, InternalError, RemoteError, RequestError
from jswa.text.answers.message import AnswerText

MOST_CALLS = 10  # answers in a row that call tools
_INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended


class Setting(NamedTuple):
    """Who answers, and where it is shown.

    Attributes:
        ask: answers a conversation, piece by piece.
        screen: shows the answers.
        notes: receives the figures of each answer; None shows none.
        run_tool: returns the result of a call, by the function's name and its arguments in JSON; None ends the
            conversation.
    """

    ask: Ask
    screen: Screen
    notes: TextIO | None = None
    run_tool: RunTool = lambda name, arguments: None


def converse(setting: Setting, texts: Iterable[str], conversation: Conversation, *, echo: bool = False) -> None:
    """Answer the user's messages one by one, each with the whole conversation so far as its prompt.

    Args:
        texts: the user's messages, in order.
        echo: also show them.
    """
    for text in texts:
        conversation.say(text)
        if echo:
            setting.screen.say(f"> {text}")
        if not _answer(setting, conversation):
            return


def talk(setting: Setting, lines: Iterable[str], conversation: Conversation, model: str) -> None:
    """Answer lines that are typed on a terminal; those that begin with a slash are commands.

    Ctrl-C stops an answer. An error that concerns one message is shown, and the message is taken back.

    Args:
        model: its name, for the file of /save.
    """
    for line in lines:
        if not slash.is_command(line):
            conversation.say(line)
        else:
            done = slash.obey(line, conversation, model)
            if done.text:
                setting.screen.say(f"{done.text}\n")
            if done.then == "leave":
                return
            if done.then == "ask":
                continue
        try:
            with _stoppable():
                goes_on = _answer(setting, conversation)
        except KeyboardInterrupt:
            _stop(setting, conversation)
        except (RequestError, GenerationError, InternalError, RemoteError) as error:
            conversation.take_back()
            setting.screen.end()
            setting.screen.say(f"{type(error).__name__}: {error}\n")
        else:
            if not goes_on:
                return


def _answer(setting: Setting, conversation: Conversation) -> bool:
    """Have the last message answered, with the results of tools; return whether the conversation goes on."""
    screen = setting.screen
    for _ in range(MOST_CALLS):
        message = _said(setting, conversation)
        calls = message.get("tool_calls", ())
        for call in calls:
            function = call["function"]
            screen.say(f"call {function['name']}({function['arguments']})")
            result = setting.run_tool(function["name"], function["arguments"])
            if result is None:
                return False
            conversation.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            return True
    told = f"{MOST_CALLS} answers in a row called tools; no more for this message\n"
    print(told, file=setting.notes or sys.stderr, flush=True)
    return True


def _said(setting: Setting, conversation: Conversation) -> dict[str, Any]:
    """Show an answer, add it to the conversation and return it; what there is of it if it is stopped."""
    begin, answer, first, tokens, last = time.monotonic(), AnswerText(), 0.0, 0, None
    prompt = conversation.prompt()
    try:
        with closing(setting.ask(prompt)) as pieces:
            for piece in pieces:
                first = first if last else time.monotonic() - begin
                last, tokens = piece, tokens + piece.tokens
                for event in piece.events:
                    answer.add(event)
                    setting.screen.show(event.kind, event.text)
    finally:
        setting.screen.end()
        message = answer.message()
        conversation.messages.append(message)
        if last is not None:
            figures = Figures(last.prompt_tokens, last.cached_tokens, tokens, first, time.monotonic() - begin)
            conversation.figures.append(figures)
    if not message.get("tool_calls"):
        setting.screen.say("\n")
    elif message["content"]:
        setting.screen.say("")
    if setting.notes is not None and last is not None:
        print(f"  [{figures.line()}]", file=setting.notes, flush=True)
    return message


def _stop(setting: Setting, conversation: Conversation) -> None:
    """Mark the answer that was stopped. Where there is nothing of it to keep, its message is taken back."""
    conversation.stopped += 1
    said = conversation.messages[-1]
    said.pop("tool_calls", None)  # they may be incomplete, and have no results
    if said["role"] == "assistant" and (said["content"] or said.get("reasoning")):
        setting.screen.say("\n[stopped]\n")
        return
    conversation.take_back()
    setting.screen.say("\n[stopped, and the message is taken back]\n")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let a first Ctrl-C raise KeyboardInterrupt in the block, and a second one end the program.

    A step of the engine holds the first one back until it has ended, which takes long if it compiles its program; the
    second one comes through, and the engine cannot go on then (`jswa.frontend.driver.uninterrupted`).
    """
    before = signal.getsignal(signal.SIGINT)
    numbers: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        if len(numbers) > 1:
            raise SystemExit(_INTERRUPTED)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

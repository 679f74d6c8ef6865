"""The lines that the user types: on a terminal with editing and a history, if prompt_toolkit is installed."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jswa.commands.chat.slash import COMMANDS

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT, MORE = "> ", "  "
NO_EDITING = 'No editing and no history of lines: pip install "prompt-toolkit>=3.0" gives both.'
LEAVING = "Ctrl-C again, or Ctrl-D, ends the chat."


class Typist(NamedTuple):
    """Reads messages from a terminal.

    Attributes:
        read: returns the next message. Raises EOFError and KeyboardInterrupt.
        unsent: returns what was typed when `read` raised KeyboardInterrupt.
        hint: what to tell the user once; "" is nothing.
    """

    read: Callable[[], str]
    unsent: Callable[[], str]
    hint: str = ""


def piped_messages(prompt: str = PROMPT) -> Iterator[str]:
    """Yield the lines of stdin until its end, without blank lines; each is a message."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def typed_messages(typist: Typist, say: Callable[[str], None]) -> Iterator[str]:
    """Yield what the user types on a terminal, until Ctrl-D, or Ctrl-C twice at an empty prompt."""
    is_leaving = False
    while True:
        try:
            text = typist.read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving:
                return
            is_leaving = not typist.unsent()
            if is_leaving:
                say(LEAVING)
            continue
        is_leaving = False
        if text.strip():
            yield text


def typist() -> Typist:
    """Return how messages are read here: with prompt_toolkit, and without it line by line."""
    try:
        session = _session(history_file())
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "prompt_toolkit":
            raise
        return Typist(_plain, lambda: "", NO_EDITING)
    return Typist(lambda: session.prompt(PROMPT), lambda: session.default_buffer.text)


def history_file() -> Path | None:
    """Return the file of the lines of earlier chats, which only this user may read; None if it cannot be written."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = home / "jswa" / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path if os.access(path, os.R_OK | os.W_OK) else None


def _plain() -> str:
    """Return a message; a backslash at the end of a line begins another line of it."""
    text = input(PROMPT)
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input(MORE)}"
    return text


def _session(history: Path | None) -> "PromptSession[str]":
    """Return a session of prompt_toolkit, with its own keys but for Enter, which sends. Raises ModuleNotFoundError."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        multiline=True,
        prompt_continuation=MORE,
        key_bindings=keys,
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        completer=WordCompleter([command.split()[0] for command in COMMANDS], sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_suspend=True,
        enable_open_in_editor=True,
    )

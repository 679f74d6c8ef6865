"""The commands of a conversation on a terminal, such as /help."""

import base64
import difflib
import mimetypes
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from jswa.commands.chat.conversation import Conversation

COMMANDS: Mapping[str, str] = {
    "/help": "list these commands",
    "/system [TEXT]": 'set the system message ("" is none) and start anew, or show it',
    "/clear": "start anew, with the same system message",
    "/image FILE": "send an image with the next message",
    "/regenerate": "answer the last message again",
    "/save FILE": "write the conversation to a file, as JSON in OpenAI's form",
    "/stats": "show the figures of the last answer and of the conversation",
    "/exit": "end the chat",
}
NAMES = [command.split()[0] for command in COMMANDS]
KEYS = """\
Enter sends a message. Alt-Enter begins another line of it, and so does a
backslash at the end of the line.
Ctrl-C stops an answer. Ctrl-D, or Ctrl-C twice, ends the chat.
A message that begins with a space is no command."""
_COMMAND = re.compile(r"(/\w+)(?:\s+(.*))?", re.DOTALL)
_OTHERS = {"/quit": "/exit", "/bye": "/exit", "/retry": "/regenerate", "/reset": "/clear", "/new": "/clear"}


class Outcome(NamedTuple):
    """What a command says, and what follows it."""

    text: str
    then: Literal["ask", "answer", "leave"] = "ask"


def is_command(line: str) -> bool:
    """Return whether a line is a command: its first word is a slash and letters, as in /help and not in /etc/hosts."""
    return _COMMAND.fullmatch(line.rstrip()) is not None


def obey(line: str, conversation: Conversation, model: str) -> Outcome:
    """Do what a command says. An unknown one says so, and names a near one."""
    found = _COMMAND.fullmatch(line.rstrip())
    assert found is not None
    name, text = found[1].lower(), (found[2] or "").strip()
    name = _OTHERS.get(name, name)
    if name in _ACTIONS:
        return _ACTIONS[name](conversation, text, model)
    near = difflib.get_close_matches(name, NAMES, n=1)
    meant = f"Did you mean {near[0]}?" if near else "/help lists the commands."
    return Outcome(f"{name} is no command. {meant}")


def _help(conversation: Conversation, text: str, model: str) -> Outcome:
    return Outcome("\n".join([*(f"{command:<16}{does}" for command, does in COMMANDS.items()), "", KEYS]))


def _system(conversation: Conversation, text: str, model: str) -> Outcome:
    if not text:
        return Outcome(f"system message: {conversation.system or 'none'}")
    conversation.begin("" if text in ('""', "''") else text)
    return Outcome("A new conversation has begun, with this system message." if conversation.system else _BEGUN)


def _clear(conversation: Conversation, text: str, model: str) -> Outcome:
    conversation.begin(conversation.system)
    return Outcome(_BEGUN)


def _image(conversation: Conversation, text: str, model: str) -> Outcome:
    if not text:
        return Outcome("/image needs the name of a file, as in /image cat.jpg.")
    path = Path(text).expanduser()
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        return Outcome(f"{path} is no image, as far as its name tells.")
    try:
        data = path.read_bytes()
    except OSError as error:
        return Outcome(f"{path} cannot be read: {error.strerror}.")
    conversation.images.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")
    return Outcome(f"The next message has {path.name}.")


def _regenerate(conversation: Conversation, text: str, model: str) -> Outcome:
    return Outcome("", "answer") if conversation.reopen() else Outcome("There is no message to answer yet.")


def _save(conversation: Conversation, text: str, model: str) -> Outcome:
    if not text:
        return Outcome("/save needs the name of a file, as in /save chat.json.")
    path = Path(text).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(conversation.json(model))
    except FileExistsError:
        return Outcome(f"{path} exists already: choose another name.")
    except OSError as error:
        return Outcome(f"{path} cannot be written: {error.strerror}.")
    return Outcome(f"{len(conversation.prompt())} messages are in {path}.")


def _stats(conversation: Conversation, text: str, model: str) -> Outcome:
    return Outcome(conversation.report())


def _exit(conversation: Conversation, text: str, model: str) -> Outcome:
    return Outcome("", "leave")


_BEGUN = "A new conversation has begun."
_ACTIONS: Mapping[str, Callable[[Conversation, str, str], Outcome]] = {
    "/help": _help,
    "/system": _system,
    "/clear": _clear,
    "/image": _image,
    "/regenerate": _regenerate,
    "/save": _save,
    "/stats": _stats,
    "/exit": _exit,
}

"""What `jswa chat` does with its options."""

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jswa.commands.chat.conversation import Conversation
from jswa.commands.chat.lines import piped_messages, typed_messages, typist
from jswa.commands.chat.models import Ask, of_engine, of_server
from jswa.commands.chat.screen import Screen
from jswa.commands.chat.tools import RunTool, find_tools
from jswa.commands.chat.turns import Setting, converse, talk
from jswa.commands.meter import Meter
from jswa.commands.options.named_model import DEFAULT, asked
from jswa.commands.start_lines import show_start
from jswa.config import EngineConfig
from jswa.text.chat_template import require_template


class Options(NamedTuple):
    """Options of the conversation.

    Attributes:
        sampling: the sampling parameters that the user has set, by name.
        tools: as `find_tools` takes it.
        stats: show the figures of each answer.
    """

    system: str
    sampling: Mapping[str, Any]
    tools: str | None
    stats: bool
    lora: str | None


def chat_at(url: str, words: Sequence[str], model: str | None, options: Options) -> None:
    """Chat with a model of a server. Raises RemoteError, ConfigError."""
    from jswa.commands.remote import asked_at

    functions, run_tool = find_tools(options.tools)
    name, messages = asked_at(url, words, model)
    name = options.lora or name
    _hold(of_server(url, name, options.sampling, functions), messages, name, run_tool, options)


def chat_with(words: Sequence[str], model: str | None, engine: EngineConfig, options: Options) -> None:
    """Load a model and chat with it. Raises JswaError."""
    functions, run_tool = find_tools(options.tools)
    named, messages = asked(words, model)
    show_start(str(named or DEFAULT))
    from jswa.llm import LLM

    with LLM(named or DEFAULT, **dataclasses.asdict(engine)) as llm:
        require_template(llm.chat_template)
        meter = Meter(llm)
        ask = of_engine(llm, options.sampling, options.lora, meter.count, functions)
        _hold(ask, messages, options.lora or named or DEFAULT, run_tool, options)
        if options.stats:
            print(meter.report(), file=sys.stderr)


def _hold(ask: Ask, messages: Sequence[str], model: str, run_tool: RunTool, options: Options) -> None:
    """Hold the conversation: with the messages of the command line, or else with those that the user types."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(sys.stdout, _columns if is_terminal else None)
    setting = Setting(ask, screen, sys.stderr if options.stats else None, run_tool)
    conversation = Conversation(options.system)
    if messages or not is_terminal:
        return converse(setting, messages or piped_messages(), conversation, echo=bool(messages))
    reader = typist()
    lines = typed_messages(reader, screen.say)
    screen.say(f"{model}: /help shows commands and keys, Ctrl-D ends the chat.")
    if reader.hint:
        screen.say(reader.hint)
    return talk(setting, lines, conversation, model)


def _columns() -> int:
    return shutil.get_terminal_size().columns

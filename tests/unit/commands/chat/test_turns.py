"""The turns of `jswa chat`, on models that a script answers for."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jswa.commands.chat.conversation import Conversation
from jswa.commands.chat.lines import Typist, piped_messages, typed_messages
from jswa.commands.chat.models import Ask, of_engine
from jswa.commands.chat.screen import Screen
from jswa.commands.chat.tools import CALCULATOR, find_tools
from jswa.commands.chat.turns import MOST_CALLS, Setting, converse, talk
from jswa.errors import PromptTooLong
from jswa.types import AnswerEvent
from tests.support.commands.terminal import TerminalText


class Parrot:
    """A model that answers with the last message, word by word."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []

    def chat(self, messages: Any, *, tools: Any, stream: bool, lora: str | None, **sampling: Any) -> Iterator[Any]:
        assert stream
        assert lora == "wise"
        assert sampling == {"temperature": 0.5}
        assert tools is None
        self.heard.append(list(messages))
        for word in messages[-1]["content"].split():
            events = [AnswerEvent("reasoning", "hm"), AnswerEvent("content", f"{word} ")]
            new = SimpleNamespace(text=f"hm{word} ", token_ids=[1], events=events)
            yield SimpleNamespace(outputs=[new], prompt_token_ids=[1, 2, 3], num_cached_tokens=2)


def parrot(model: Parrot, count: Callable[[list[int]], None] = lambda token_ids: None) -> Ask:
    return of_engine(model, {"temperature": 0.5}, "wise", count)


def test_each_prompt_is_the_whole_conversation_so_far() -> None:
    model, out, notes = Parrot(), io.StringIO(), io.StringIO()
    counted: list[int] = []
    conversation = Conversation("Be kind.")
    setting = Setting(parrot(model, counted.extend), Screen(out), notes)
    converse(setting, ["Hello you", "Bye"], conversation, echo=True)
    assert out.getvalue() == "> Hello you\nHello you \n\n> Bye\nBye \n\n"
    assert notes.getvalue().count("[3 tokens in, 2 cached;") == 2
    assert len(counted) == 3
    assert [[message["role"] for message in heard] for heard in model.heard] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    thoughts = {"reasoning_content": "hmhm", "reasoning": "hmhm"}
    assert model.heard[1][2] == {"role": "assistant", "content": "Hello you ", **thoughts}
    assert [figures[:3] for figures in conversation.figures] == [(3, 2, 2), (3, 2, 1)]


def test_a_terminal_shows_reasoning_and_a_file_does_not() -> None:
    """In a terminal it is dim."""
    out = TerminalText()
    converse(Setting(parrot(Parrot()), Screen(out)), ["Bye"], Conversation())
    assert out.getvalue() == "\x1b[2mhm\x1b[0mBye \n\n"


def test_blank_lines_are_skipped_and_the_end_of_input_ends_the_chat(monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n  \n/help\n"))
    assert list(piped_messages()) == ["one", "/help"]


class Clerk:
    """A model that has each sum of a message computed, says how many results it has got, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, Any]]] = []

    def chat(self, messages: Any, *, tools: Any, stream: bool, lora: str | None, **sampling: Any) -> Iterator[Any]:
        assert tools == (CALCULATOR,)
        self.heard.append(list(messages))
        sums = messages[-1]["content"].split() if messages[-1]["role"] == "user" else []
        said = [AnswerEvent("content", f"{len(messages)} messages" if not sums else "Well")]
        for index, one in enumerate(sums):
            said += [AnswerEvent("call", "calculator", index), AnswerEvent("arguments", '{"expression": ', index)]
            said += [AnswerEvent("arguments", f'"{one}"}}', index), AnswerEvent("end", "", index)]
        for event in said:
            new = SimpleNamespace(token_ids=[1], events=[event])
            yield SimpleNamespace(outputs=[new], prompt_token_ids=[1], num_cached_tokens=0)


def test_calls_are_shown_and_their_results_go_back_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    clerk = Clerk()
    tools, run_tool = find_tools("calculator")
    setting = Setting(of_engine(clerk, {}, tools=tools), Screen(sys.stdout), None, run_tool)
    converse(setting, ["2+3 4/0"], Conversation())
    assert capsys.readouterr().out.splitlines() == [
        "Well",
        'call calculator({"expression": "2+3"})',
        "result 5",
        'call calculator({"expression": "4/0"})',
        "result error: division by zero",
        "4 messages",
        "",
    ]
    _, said, *results = clerk.heard[1]
    assert [call["id"] for call in said["tool_calls"]] == [result["tool_call_id"] for result in results]
    assert [(result["role"], result["content"]) for result in results] == [
        ("tool", "5"),
        ("tool", "error: division by zero"),
    ]


def test_results_of_other_tools_are_typed(tmp_path: Path, monkeypatch: Any) -> None:
    """The end of input ends the conversation."""
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([CALCULATOR]))
    clerk = Clerk()
    monkeypatch.setattr("sys.stdin", io.StringIO("five\n"))
    ask = of_engine(clerk, {}, tools=(CALCULATOR,))
    converse(Setting(ask, Screen(io.StringIO()), None, find_tools(str(path))[1]), ["2+3", "4+5", "1"], Conversation())
    assert clerk.heard[1][-1]["content"] == "five"
    assert len(clerk.heard) == 3


def test_a_model_that_only_calls_is_stopped() -> None:
    """After ten answers, so that a tool that answers by itself cannot go on for ever."""

    class Stubborn(Clerk):
        def chat(self, messages: Any, **options: Any) -> Iterator[Any]:
            return super().chat([{"role": "user", "content": "1"}], **options)

    for clerk, rounds in ((Clerk(), 2), (Stubborn(), MOST_CALLS)):
        notes = io.StringIO()
        ask = of_engine(clerk, {}, tools=(CALCULATOR,))
        converse(Setting(ask, Screen(io.StringIO()), notes, lambda *_: ""), ["1"], Conversation())
        assert len(clerk.heard) == rounds
        assert ("10 answers in a row called tools" in notes.getvalue()) == (rounds == MOST_CALLS)


class Stage:
    """A conversation on a terminal with a model that gives an answer's events, and may press Ctrl-C between them."""

    def __init__(self, *answers: Sequence[AnswerEvent | str | Exception], system: str = "") -> None:
        self.out = io.StringIO()
        self.conversation = Conversation(system)
        self.asked: list[list[dict[str, Any]]] = []
        self.closed = 0
        self._answers = iter(answers)

    def ask(self, messages: list[dict[str, Any]]) -> Generator[Any]:
        """Answer; "^C" is a Ctrl-C, another text is content, and an exception is raised."""
        self.asked.append(messages)
        try:
            for one in next(self._answers):
                if one == "^C":
                    os.kill(os.getpid(), signal.SIGINT)
                elif isinstance(one, Exception):
                    raise one
                else:
                    event = AnswerEvent("content", one) if isinstance(one, str) else one
                    yield SimpleNamespace(events=[event], prompt_tokens=5, cached_tokens=4, tokens=1)
        finally:
            self.closed += 1

    def type(self, *lines: str, run_tool: Any = lambda *_: "") -> list[str]:
        """Type lines; return what is shown."""
        screen = Screen(self.out, lambda: 80)
        talk(Setting(self.ask, screen, None, run_tool), lines, self.conversation, "m")
        return [line for line in self.out.getvalue().splitlines() if line]


def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    """The model is told to end; what there is of the answer is marked, and stays for the next prompt."""
    before = signal.getsignal(signal.SIGINT)
    stage = Stage(["one ", "two", "^C", "never"], ["yes"])
    assert stage.type("count", "and?") == ["one two", "[stopped]", "yes"]
    assert stage.closed == 2
    assert [message["content"] for message in stage.asked[1]] == ["count", "one two", "and?"]
    assert "2 answers, 1 of them stopped" in stage.conversation.report()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_whose_answer_is_stopped_at_once_is_taken_back() -> None:
    """Some chat templates refuse two messages of the user in a row."""
    stage = Stage(["^C"], ["yes"])
    assert stage.type("count", "and?") == ["[stopped, and the message is taken back]", "yes"]
    assert [message["content"] for message in stage.asked[1]] == ["and?"]


def test_a_second_ctrl_c_ends_the_program() -> None:
    """The engine may have held back the first one, and cannot go on after the second."""

    class Held(Stage):
        def ask(self, messages: list[dict[str, Any]]) -> Generator[Any]:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            yield from ()

    with pytest.raises(SystemExit) as ended:
        Held().type("count")
    assert ended.value.code == 130


def test_calls_that_are_stopped_leave_no_call_without_a_result() -> None:
    call = [AnswerEvent("call", "f", 0), AnswerEvent("arguments", "{", 0)]
    stage = Stage(["Well", *call, "^C"], call, ["yes"])

    def interrupted(name: str, arguments: str) -> str:
        raise KeyboardInterrupt

    stage.type("a", "b", "c", run_tool=interrupted)
    assert [message["content"] for message in stage.asked[2]] == ["a", "Well", "c"]
    assert not any("tool_calls" in message for message in stage.asked[2])


def test_an_error_of_one_message_takes_it_back() -> None:
    stage = Stage([PromptTooLong("prompt", "9 tokens", "is too long")], ["yes"])
    assert stage.type("long", "short") == ["PromptTooLong: prompt = '9 tokens': is too long", "yes"]
    assert [message["content"] for message in stage.asked[1]] == ["short"]


def test_the_last_message_is_answered_again() -> None:
    stage = Stage(["one"], ["two"])
    assert stage.type("/regenerate", "hi", "/regenerate") == ["There is no message to answer yet.", "one", "two"]
    assert stage.asked[0] == stage.asked[1] == [{"role": "user", "content": "hi"}]
    assert [message["content"] for message in stage.conversation.messages] == ["hi", "two"]


def test_exit_ends_the_chat_and_other_lines_are_messages() -> None:
    """A path is no command, and neither is what begins with a space."""
    stage = Stage(["a"], ["b"])
    stage.type("/etc/hosts is what?", " /exit", "/exit", "never")
    assert [asked[-1]["content"] for asked in stage.asked] == ["/etc/hosts is what?", " /exit"]


def test_ctrl_c_ends_the_chat_only_twice_at_an_empty_prompt() -> None:
    """What is typed is dropped by the first one; another message comes between two."""
    keys: Iterator[Any] = iter(
        ["one", KeyboardInterrupt("half"), KeyboardInterrupt(""), "two", *[KeyboardInterrupt("")] * 2, "never"]
    )
    typed: list[str] = []

    def read() -> str:
        key = next(keys)
        typed[:] = [str(key)]
        if isinstance(key, KeyboardInterrupt):
            raise key
        return str(key)

    said: list[str] = []
    assert list(typed_messages(Typist(read, lambda: typed[0]), said.append)) == ["one", "two"]
    assert len(said) == 2
    assert next(keys) == "never"

"""`jswa chat` on a model that repeats the last message."""

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from jswa.commands.chat import converse, of_engine, typed_messages
from jswa.types import AnswerEvent, SamplingParams


class Parrot:
    """A model that answers with the last message, word by word."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []

    def chat(self, messages: Any, sampling_params: SamplingParams, *, stream: bool, lora: str | None) -> Iterator[Any]:
        assert stream
        assert lora == "wise"
        self.heard.append(list(messages))
        for word in messages[-1]["content"].split():
            events = [AnswerEvent("reasoning", "hm"), AnswerEvent("content", f"{word} ")]
            new = SimpleNamespace(text=f"hm{word} ", token_ids=[1], events=events)
            yield SimpleNamespace(outputs=[new], prompt_token_ids=[1, 2, 3], num_cached_tokens=2)


def test_each_prompt_is_the_whole_conversation_so_far() -> None:
    parrot, out, notes = Parrot(), io.StringIO(), io.StringIO()
    counted: list[int] = []
    ask = of_engine(parrot, SamplingParams(), "wise", counted.extend)
    converse(ask, ["Hello you", "Bye"], system="Be kind.", echo=True, stats=True, out=out, notes=notes)
    assert out.getvalue() == "> Hello you\nHello you \n\n> Bye\nBye \n\n"
    assert notes.getvalue().count("[3 tokens in, 2 cached;") == 2
    assert len(counted) == 3
    assert [[message["role"] for message in heard] for heard in parrot.heard] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert parrot.heard[1][2] == {"role": "assistant", "content": "Hello you ", "reasoning_content": "hmhm"}


def test_a_terminal_shows_reasoning_and_a_file_does_not() -> None:
    """In a terminal it is dim."""
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    converse(of_engine(Parrot(), SamplingParams(), "wise"), ["Bye"], out=out)
    assert out.getvalue() == "\x1b[2mhm\x1b[0mBye \n\n"


def test_blank_lines_are_skipped_and_the_end_of_input_ends_the_chat(monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n  \ntwo\n"))
    assert list(typed_messages()) == ["one", "two"]

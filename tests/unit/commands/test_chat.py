"""`jswa chat` on a model that repeats the last message."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jswa.commands.chat import CALCULATOR, MOST_CALLS, calculate, converse, find_tools, of_engine, typed_messages
from jswa.errors import ConfigError
from jswa.types import AnswerEvent, SamplingParams


class Parrot:
    """A model that answers with the last message, word by word."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []

    def chat(
        self, messages: Any, sampling_params: SamplingParams, *, tools: Any, stream: bool, lora: str | None
    ) -> Iterator[Any]:
        assert stream
        assert lora == "wise"
        assert tools is None
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
    thoughts = {"reasoning_content": "hmhm", "reasoning": "hmhm"}
    assert parrot.heard[1][2] == {"role": "assistant", "content": "Hello you ", **thoughts}


def test_a_terminal_shows_reasoning_and_a_file_does_not() -> None:
    """In a terminal it is dim."""
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    converse(of_engine(Parrot(), SamplingParams(), "wise"), ["Bye"], out=out)
    assert out.getvalue() == "\x1b[2mhm\x1b[0mBye \n\n"


def test_blank_lines_are_skipped_and_the_end_of_input_ends_the_chat(monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n  \ntwo\n"))
    assert list(typed_messages()) == ["one", "two"]


class Clerk:
    """A model that has each sum of a message computed, says how many results it has got, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, Any]]] = []

    def chat(
        self, messages: Any, sampling_params: SamplingParams, *, tools: Any, stream: bool, lora: str | None
    ) -> Iterator[Any]:
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
    converse(of_engine(clerk, SamplingParams(), tools=tools), ["2+3 4/0"], run_tool=run_tool)
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


def test_results_of_other_tools_are_typed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The end of input ends the conversation."""
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([CALCULATOR]))
    tools, run_tool = find_tools(str(path))
    assert list(tools) == [CALCULATOR]
    clerk = Clerk()
    monkeypatch.setattr("sys.stdin", io.StringIO("five\n"))
    converse(of_engine(clerk, SamplingParams(), tools=(CALCULATOR,)), ["2+3", "4+5", "1"], run_tool=run_tool)
    assert clerk.heard[1][-1]["content"] == "five"
    assert len(clerk.heard) == 3
    assert find_tools(None)[0] == ()


def test_a_model_that_only_calls_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    """After ten answers, so that a tool that answers by itself cannot go on for ever."""
    notes = io.StringIO()
    converse(of_engine(Clerk(), SamplingParams(), tools=(CALCULATOR,)), ["1"], notes=notes, run_tool=lambda *_: "")
    assert notes.getvalue() == ""

    class Stubborn(Clerk):
        def chat(self, messages: Any, *args: Any, **options: Any) -> Iterator[Any]:
            return super().chat([{"role": "user", "content": "1"}], *args, **options)

    stubborn = Stubborn()
    converse(of_engine(stubborn, SamplingParams(), tools=(CALCULATOR,)), ["1"], notes=notes, run_tool=lambda *_: "")
    assert len(stubborn.heard) == MOST_CALLS
    assert "10 answers in a row called tools" in notes.getvalue()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1234 * 57", "70338"), ("27 + 45", "72"), ("-(2 - 5) * 1.5", "4.5"), ("6 / 3", "2"), ("1 / 3", str(1 / 3)),
        ("2 ** 9", "error: only numbers"), ("__import__('os')", "error: only numbers"), ("1 +", "error: "),
        ("", "error: "), ("1" * 201, "error: expression must be a string of at most 200 characters"),
        ("1 / 0", "error: division by zero"), ("'a' * 9", "error: only numbers"), ("x", "error: only numbers"),
    ],
)  # fmt: skip
def test_the_calculator_computes_sums_and_nothing_else(expression: str, result: str) -> None:
    found = calculate("calculator", json.dumps({"expression": expression}))
    assert found.startswith(result) if result.startswith("error") else found == result


def test_a_call_that_is_none_gives_an_error_to_the_model() -> None:
    assert calculate("clock", "{}") == "error: there is no function clock"
    for arguments in ("", "[]", "{}", '{"expression": 3}', "{" * 99):
        assert calculate("calculator", arguments).startswith("error: ")


@pytest.mark.parametrize("text", ["", "{}", "[]", "[3]", '[{"name": "f"}]', "[{}]", '[{"function": {"name": 3}}]'])
def test_a_file_without_tools_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.json"
    with pytest.raises(ConfigError, match=r"tools = .*must be a JSON file or \"calculator\""):
        find_tools(str(path))
    path.write_text(text)
    with pytest.raises(ConfigError, match="tools = "):
        find_tools(str(path))

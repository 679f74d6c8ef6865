"""`jswa chat --url` and `jswa generate --url`, which ask a running server."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jswa.commands import cli, remote
from jswa.errors import RemoteError
from jswa.types import SamplingParams
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving
from tests.support.server.scripted import agent

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FIELDS = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    """A server with an engine that counts."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(FakeEngine(), template=template, api_key=("secret",)) as client:
        yield client


@pytest.fixture
def url(server: Client, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address, with the key in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    return f"{server.url}/v1"


def test_pieces_are_the_text_that_the_server_gives_at_once(server: Client, url: str) -> None:
    """Of a prompt and of a conversation; the last event has the usage."""
    model = remote.served_models(url)[0]
    body = {"model": model, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": "Bearer secret"}
    whole = server.post("/v1/completions", {**body, "prompt": "abc"}, headers=headers).json()
    events = list(remote.complete(url, model, "abc", GREEDY))
    assert "".join(event.text for event in events) == whole["choices"][0]["text"]
    assert len([event for event in events if event.text]) > 1
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
    assert events[-1].prompt_tokens == whole["usage"]["prompt_tokens"]
    assert events[-1].completion_tokens == whole["usage"]["completion_tokens"] == 6
    said = server.post("/v1/chat/completions", {**body, "messages": MESSAGES}, headers=headers).json()
    answer = "".join(event.text for event in remote.answer(url, model, MESSAGES, FIELDS))
    assert answer == said["choices"][0]["message"]["content"]


def test_the_commands_print_the_answers(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without loading a model; the first word and --model name one of the server's."""
    assert cli.run(["generate", "abc", "--url", url, "--max-tokens", "4", "--temperature", "0", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["prompt"], row["finish_reason"]) == ("abc", "length")
    assert row["text"]
    assert cli.run(["chat", "abc", "--url", url.removesuffix("/v1"), "--max-tokens", "4", "--stats"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("> abc\n")
    assert len(shown.out.splitlines()[1]) > 0
    assert "tokens in" in shown.err
    assert cli.run(["chat", remote.served_models(url)[0], "abc", "--url", url, "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("> abc\n")
    assert cli.run(["chat", "other/name", "abc", "--url", url]) == 2
    assert "model = 'other/name': the server serves " in capsys.readouterr().err
    assert cli.run(["chat", "abc", "--url", url, "--model", "other"]) == 2
    assert "status 404" in capsys.readouterr().err


def test_a_chat_asks_with_the_defaults_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A request has only the sampling parameters that the user has set."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(template=template, defaults={"max_tokens": 3, "temperature": 0.5, "top_k": 7}) as client:
        assert cli.run(["chat", "abc", "--url", client.url]) == 0
        assert cli.run(["chat", "abc", "--url", client.url, "--max-tokens", "2", "--temperature", "0"]) == 0
        own, given = [request.params for request in client.engine.seen]
    assert (own.max_tokens, own.temperature, own.top_k) == (3, 0.5, 7)
    assert (given.max_tokens, given.temperature, given.top_k) == (2, 0, 7)
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [5, 3, 0, 5, 2, 0]


def test_tools_are_called_through_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The calls of a stream are put together, and their results are read from stdin: there are two."""
    tools = tmp_path / "tools.json"
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]))
    with agent() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("rain\nsun\n"))
        assert cli.run(["chat", "weather: Oslo, Rome", "--url", f"{client.url}/v1", "--tools", str(tools)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "> weather: Oslo, Rome",
        'call get_weather({"city": "Oslo"})',
        'call get_weather({"city": "Rome"})',
        "rain, sun (2 calls, 2 thoughts)",
        "",
    ]


def test_errors_are_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the server, with its message; of the network, with advice; of the address."""
    with pytest.raises(RemoteError, match=r"status 400: .*maximum context length"):
        list(remote.complete(url, "fake", "abc", SamplingParams(max_tokens=10**8)))
    with pytest.raises(RemoteError, match=r"cannot be reached: .*is the server running"):
        remote.served_models("http://127.0.0.1:9/v1")
    with pytest.raises(RemoteError, match="must begin with http"):
        remote.served_models("localhost:8000/v1")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(RemoteError, match="status 401"):
        remote.served_models(url)

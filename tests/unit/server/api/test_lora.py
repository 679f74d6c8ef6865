"""LoRA adapters over HTTP: each is listed as a model, chosen by its name, and named in the answer."""

import dataclasses
from collections.abc import Iterator

import pytest

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from server import cli, launch
from server.options import ServeConfig
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server whose engine has two adapters."""
    engine = FakeEngine(adapters=("poet", "judge/v2"))
    with serving(engine, template="{% for m in messages %}{{ m.content }}{% endfor %}") as found:
        yield found


def test_adapters_are_listed_with_their_base_model(client: Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("fake", None), ("alias", None), ("poet", "fake"), ("judge/v2", "fake"),
    ]  # fmt: skip
    assert {card["root"] for card in cards} == {"fake"}
    assert client.get("/v1/models/judge/v2").json() == cards[-1]


@pytest.mark.parametrize(("name", "index"), [("fake", 0), ("alias", 0), (None, 0), ("poet", 1), ("judge/v2", 2)])
def test_a_request_runs_with_the_adapter_that_it_names(client: Client, name: str | None, index: int) -> None:
    """The answer has the adapter's name, with and without streaming."""
    assert client.complete(model=name)["model"] == (name or "fake")
    assert client.engine.seen[-1].adapter == index
    answer = client.post("/v1/chat/completions", {**CHAT, "model": name}).json()
    assert answer["model"] == (name or "fake")
    assert client.engine.seen[-1].adapter == index
    events = client.events("/v1/chat/completions", {**CHAT, "model": name, "n": 2})
    assert {event["model"] for event in events[:-1]} == {name or "fake"}
    assert [request.adapter for request in client.engine.seen[-2:]] == [index, index]
    assert client.post("/tokenize", {"model": name, "prompt": "a"}).status_code == 200


@pytest.mark.parametrize("name", ["Poet", "poet ", "judge", "nobody", ""])
def test_unknown_adapter_names_are_refused(client: Client, name: str) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        error = client.refusal(path, {**body, "model": name}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert client.get("/v1/models/nobody").status_code == 404


def test_lora_modules_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option accepts several values after one flag, as in vLLM, one flag per value, or the environment variable."""
    seen: list[tuple[str, EngineConfig]] = []

    def start(model: str, server: ServeConfig, engine: EngineConfig) -> int:
        seen.append((model, engine))
        return 0

    monkeypatch.setattr(launch, "launch", start)
    both = ("a=/x/y=z", "b=w")
    cli.main(["m", "--lora-modules", *both, "--port", "1"])
    cli.main(["m", "--lora-modules", both[0], "--lora-modules", both[1]])
    monkeypatch.setenv("JSWA_LORA_MODULES", " ".join(both))
    cli.main(["m"])
    assert [model for model, _ in seen] == ["m"] * 3
    for _, engine in seen:
        assert engine.lora_modules == both
        assert {name: str(folder) for name, folder in engine.adapters.items()} == {"a": "/x/y=z", "b": "w"}


def test_an_adapter_must_not_have_the_name_of_the_model() -> None:
    """The error is raised before the model is loaded: the test has no such model."""
    engine = dataclasses.replace(EngineConfig(), lora_modules=("m=x",))
    with pytest.raises(ConfigError, match="'m': is a name of the model itself"):
        launch.launch("nowhere", ServeConfig(served_model_name=("k", "m")), engine)

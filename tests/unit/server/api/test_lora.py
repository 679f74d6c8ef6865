"""LoRA adapters over HTTP: each is listed as a model, chosen by its name, and named in the answer."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from server import cli, launch
from server.options import ServeConfig
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    """A server whose engine has two adapters."""
    engine = FakeEngine(adapters=("poet", "judge/v2"))
    with serving(engine, template="{% for m in messages %}{{ m.content }}{% endfor %}") as found:
        yield found


def test_adapters_are_listed_with_their_base_model(client: Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("fake", None), ("alias", None), ("poet", "fake"), ("judge/v2", "fake"),
    ]  # fmt: skip
    assert {card["root"] for card in cards} == {"acme/fake"}, "as the operator has named the model"
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
        assert error["message"].endswith("this server serves 'fake', 'alias', 'poet', 'judge/v2'.")
    assert client.get("/v1/models/nobody").status_code == 404


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def operator() -> Iterator[Client]:
    """A server with one adapter, and room for two others; the client has the admin key."""
    headers = {"Authorization": "Bearer root"}
    with serving(FakeEngine(adapters=("poet",)), admin_api_key="root", headers=headers) as found:
        yield found


def names(client: Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_adapters_are_loaded_and_unloaded(operator: Client) -> None:
    """The answers are vLLM's. Requests for an adapter get 404 before and after."""
    operator.refusal("/v1/completions", {"prompt": "a", "model": "judge"}, 404)
    done = operator.post(LOAD, {"lora_name": "judge", "lora_path": "/some/where"})
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'judge' added successfully.")
    assert names(operator) == ["fake", "alias", "poet", "judge"]
    assert operator.get("/v1/models/judge").json()["parent"] == "fake"
    assert operator.complete(model="judge")["model"] == "judge"
    assert operator.engine.seen[-1].adapter == 2
    done = operator.post(UNLOAD, {"lora_name": "judge", "lora_int_id": 1})
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'judge' removed successfully.")
    assert names(operator) == ["fake", "alias", "poet"]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = operator.refusal(path, {**body, "model": "judge"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 404, "lora_path = '/nowhere': must be a folder"),
        (LOAD, {"lora_name": "x", "lora_path": "/torn"}, 400, "lora_path = '/torn': is torn"),
        (LOAD, {"lora_name": "poet", "lora_path": "/other"}, 400, "lora_name = 'poet': is loaded"),
        (LOAD, {"lora_name": "alias", "lora_path": "/other"}, 400, "lora_name: 'alias' is a name of the model itself"),
        (LOAD, {"lora_name": "", "lora_path": "/other"}, 400, "lora_name: "),
        (LOAD, {"lora_name": "x", "lora_path": "/" * 4097}, 400, "lora_path: "),
        (LOAD, {"lora_name": "x", "lora_path": 3}, 400, "lora_path: "),
        (LOAD, {"lora_name": "x"}, 400, "lora_path: "),
        (LOAD, {"lora_path": "/other"}, 400, "lora_name: "),
        (UNLOAD, {"lora_name": "nobody"}, 404, "lora_name = 'nobody': is not loaded"),
        (UNLOAD, {}, 400, "lora_name: "),
    ],
)
def test_what_cannot_be_loaded_or_unloaded_is_refused(
    operator: Client, path: str, body: dict[str, object], status: int, says: str
) -> None:
    before = dict(operator.engine.adapters)
    assert operator.refusal(path, body, status)["message"].startswith(says)
    assert operator.engine.adapters == before


def test_no_more_adapters_are_loaded_than_fit_but_one_may_be_replaced(operator: Client) -> None:
    for name in ("x", "y"):
        assert operator.post(LOAD, {"lora_name": name, "lora_path": f"/{name}"}).status_code == 200
    assert "max_loras = 3" in operator.refusal(LOAD, {"lora_name": "z", "lora_path": "/z"})["message"]
    assert operator.post(UNLOAD, {"lora_name": "x"}).status_code == 200
    assert operator.post(LOAD, {"lora_name": "y", "lora_path": "/z", "load_inplace": True}).status_code == 200
    assert operator.engine.adapters["y"] == "digest of /z"


def test_a_request_whose_adapter_is_unloaded_before_it_runs_gets_404(operator: Client) -> None:
    """Never the tokens of the model without it. Here it waits for programs to be compiled meanwhile."""
    operator.engine.prepare_delay = 0.3
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "model": "poet", "logprobs": 1}
        asked = pool.submit(operator.refusal, "/v1/completions", body, 404)
        until(lambda: operator.service.running == 1)
        assert operator.post(UNLOAD, {"lora_name": "poet"}).status_code == 200
        assert asked.result()["code"] == "model_not_found"
    assert not operator.engine.seen


@pytest.mark.one_process
def test_a_request_whose_adapter_is_unloaded_while_its_prompt_is_read_gets_404(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name was checked before: it must not be taken for one of the model's."""
    start = operator.service.start

    async def late(*arguments: Any) -> Any:
        operator.engine.unload_lora("poet")
        return await start(*arguments)

    monkeypatch.setattr(operator.service, "start", late)
    assert operator.refusal("/v1/completions", {"prompt": "a", "model": "poet"}, 404)["code"] == "model_not_found"
    assert not operator.engine.seen


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

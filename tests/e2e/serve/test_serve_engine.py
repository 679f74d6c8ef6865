"""The server on a real engine in this process: a failed engine is replaced, and compiling does not block requests."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import StepPlan
from jswa.running.stepping import PendingStep
from jswa.storage.hub import TINY
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams
from server.core.service import Served
from tests.support.server.harness import Client, serve, until
from tests.support.tiny import ONE_SHAPE

PATH = "/v1/completions"
GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}


def engines(breaks: threading.Event) -> Iterator[Engine]:
    """Yield one engine after the other; the first one fails to launch a step once `breaks` is set."""
    llm = LLM("tiny", **ONE_SHAPE)
    first = weakref.ref(llm.engine)
    break_when(breaks, llm.engine)
    yield llm.engine
    llm.close()
    gc.collect()
    assert first() is None, "the failed engine must be freed: its memory is needed"
    llm = LLM("tiny", **ONE_SHAPE)
    yield llm.engine


def break_when(breaks: threading.Event, engine: Engine) -> None:
    """Make launches fail once an event is set."""
    launch = engine.runner.launch

    def failing(plan: StepPlan) -> PendingStep:
        if breaks.is_set():
            raise RuntimeError("the device is gone")
        return launch(plan)

    engine.runner.launch = failing  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def breaks() -> threading.Event:
    """While this is set, the first engine fails."""
    return threading.Event()


@pytest.fixture(scope="module")
def client(breaks: threading.Event) -> Iterator[Client]:
    """A server that restarts its engine."""
    with serve(Served(engines(breaks).__next__, Tokenizer.load(TINY)), restart_engine=True) as found:
        found.http.timeout = httpx2.Timeout(120)
        yield found


def sample(client: Client, name: str) -> float:
    """Return one value of /metrics."""
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"jswa:{name} ")]
    return float(line.rpartition(" ")[2])


def test_other_requests_go_on_while_programs_are_compiled(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request for log probabilities waits for its programs until a stream has got 20 more tokens."""
    lines: list[str] = []
    done = threading.Event()
    engine = client.service.local.thread.engine
    prepare = engine.prepare

    def read() -> None:
        body = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "stream": True}
        while not done.is_set():
            with httpx2.stream("POST", client.url + PATH, json=body, timeout=60) as response:
                lines.extend(response.iter_lines())

    def prepare_until_others_went_on(params: SamplingParams, **options: Any) -> None:
        before = len(lines)
        prepare(params, **options)
        # An empty line follows each token's. Programs that are not urgent may outlast the test.
        until(lambda: done.is_set() or len(lines) > before + 40, 60)

    monkeypatch.setattr(engine, "prepare", prepare_until_others_went_on)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        until(lambda: len(lines) > 20)
        scored = client.complete(logprobs=2, echo=True, max_tokens=2)
    finally:
        done.set()
        reader.join()
    assert len(scored["choices"][0]["logprobs"]["tokens"]) > 2
    assert sample(client, 'compilations_total{model_name="fake",when="in_step"}') == 0
    assert sample(client, 'compilations_total{model_name="fake",when="beside"}') == 2
    for part in ("plan", "launch", "wait", "apply"):
        assert sample(client, f'engine_step_seconds_total{{model_name="fake",part="{part}"}}') > 0
    assert sample(client, 'kv_pages_slid_total{model_name="fake"}') > 0


def test_a_failed_engine_is_replaced(client: Client, breaks: threading.Event) -> None:
    wanted = client.complete(**GREEDY)["choices"][0]["text"]
    errors: list[Any] = []

    def ask(stream: bool) -> None:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": stream}
        errors.append(httpx2.post(client.url + PATH, json=body, timeout=60))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    until(lambda: client.get("/server_info").json()["load"]["running"] == 2)
    breaks.set()
    for thread in threads:
        thread.join()
    assert sorted(response.status_code for response in errors) == [200, 500]
    assert all('"code":"engine_dead"' in response.text for response in errors)
    assert client.get("/health").status_code == 503
    waits = client.refusal(PATH, GREEDY, 503)
    assert waits["code"] == "engine_restarting"
    until(lambda: client.get("/ready").status_code == 200, 120)
    assert client.complete(**GREEDY)["choices"][0]["text"] == wanted
    assert sample(client, 'engine_restarts_total{model_name="fake"}') == 1
    load = client.get("/server_info").json()["load"]
    assert (load["full_pages"], load["local_pages"]) == (0, 0)

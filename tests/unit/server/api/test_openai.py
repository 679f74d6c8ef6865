"""Every exception class of the openai package, raised by the server's answers."""

import threading

import httpx2
import openai
import pytest

from jswa.errors import GenerationError
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until


def connect(client: Client, key: str = "none", **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=client.url + "/v1", api_key=key, max_retries=0, **options)  # type: ignore[arg-type]


def test_refused_requests_raise_the_right_classes() -> None:
    with serving(api_key=("right",), max_body_size=1000) as client:
        with connect(client, "wrong") as sdk, pytest.raises(openai.AuthenticationError) as error:
            sdk.models.list()
        assert error.value.code == "invalid_api_key"
        with connect(client, "right") as sdk:
            with pytest.raises(openai.NotFoundError):
                sdk.models.retrieve("nothing")
            with pytest.raises(openai.NotFoundError):
                sdk.moderations.create(model="fake", input="a")
            with pytest.raises(openai.BadRequestError) as bad:
                sdk.completions.create(model="fake", prompt="a", n=1000)
            assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
            with pytest.raises(openai.APIStatusError) as large:
                sdk.completions.create(model="fake", prompt="a" * 1000)
            assert large.value.status_code == 413
            with pytest.raises(openai.PermissionDeniedError):
                sdk.post("/../abort", cast_to=object, body={})


def test_failed_requests_raise_the_right_classes() -> None:
    with (
        serving(FakeEngine(rule=lambda _, at: GenerationError("no next token") if at else 100)) as client,
        connect(client) as sdk,
    ):
        with pytest.raises(openai.InternalServerError) as failed:
            sdk.completions.create(model="fake", prompt="a")
        assert failed.value.code == "generation_failed"
        with pytest.raises(openai.APIError, match="no next token"):
            list(sdk.completions.create(model="fake", prompt="a", stream=True))
        client.service.draining = True
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            sdk.completions.create(model="fake", prompt="a")


def test_the_client_retries_when_the_queue_is_full() -> None:
    engine = FakeEngine(max_rows=1)
    engine.delay = 0.005
    with serving(engine, max_queued_requests=1) as client, connect(client) as sdk:
        body = {"prompt": "abc", "max_tokens": 60}
        threads = []
        for waiting in (0, 1):
            threads.append(threading.Thread(target=client.post, args=("/v1/completions", body)))
            threads[-1].start()
            until(lambda waiting=waiting: bool(engine.running) and client.service.local.admission.texts == waiting)  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as full:
            sdk.completions.create(model="fake", prompt="a")
        assert full.value.code == "queue_full"
        patient = sdk.with_options(max_retries=3)
        assert patient.completions.create(model="fake", prompt="abc", max_tokens=4).choices[0].text == "efgh"
        for thread in threads:
            thread.join()


def test_a_client_that_times_out_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    engine.delay = 0.02
    with serving(engine) as client:
        with connect(client, timeout=httpx2.Timeout(0.3)) as sdk, pytest.raises(openai.APITimeoutError):
            sdk.completions.create(model="fake", prompt="abc", max_tokens=200)
        until(lambda: not engine.has_work())
        assert not client.service.jobs

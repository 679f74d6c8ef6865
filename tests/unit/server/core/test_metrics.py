"""/metrics: it answers at all times, its figures are right, and it needs a key."""

import logging
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from tests.support.server.fake_engine import FakeEngine, count_up
from tests.support.server.harness import BYTES, Client, serve, serving, until

PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 4}


class Held:
    """A rule for the fake engine: its step does not end until `go` is set, once a text has `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, prompt: list[int], position: int) -> int:
        """Return the token at a position of the text."""
        if position >= self.tokens:
            self.reached.set()
            assert self.go.wait(20)
        return count_up(prompt, position)


@pytest.fixture
def held() -> Iterator[Held]:
    """A rule that holds the engine after three tokens of a text."""
    rule = Held(3)
    yield rule
    rule.go.set()


def scrape(client: Client, **headers: str) -> dict[str, float]:
    """Return the values of all samples by name and labels."""
    response = client.get("/metrics", headers=headers)
    assert response.status_code == 200, response.text
    samples = [one for family in text_string_to_metric_families(response.text) for one in family.samples]
    return {
        ",".join([one.name.removeprefix("jswa:"), *(v for k, v in one.labels.items() if k != "model_name")]): one.value
        for one in samples
    }


def test_a_scrape_waits_for_no_step_and_sees_tokens_of_texts_that_run(held: Held) -> None:
    with serving(FakeEngine(rule=held)) as client:
        thread = threading.Thread(target=client.post, args=(PATH, {**BODY, "max_tokens": 9, "stream": True}))
        thread.start()
        assert held.reached.wait(10)
        until(lambda: scrape(client)["generation_tokens_total"] == 3)
        found = scrape(client)
        assert found["prompt_tokens_total"] == 4
        assert found["engine_up"] == found["engine_state,up"] == 1
        assert found["engine_step_running_seconds"] > 0
        assert client.get("/server_info").json()["state"] == "up"
        held.go.set()
        thread.join()
        until(lambda: scrape(client)["generation_tokens_total"] == 9)
        found = scrape(client)
        assert (found["prompt_tokens_total"], found["engine_step_running_seconds"]) == (4, 0)
        assert (found["engine_steps_total"], found["num_requests_running"]) == (client.engine.steps, 0)


def test_prompts_that_were_never_run_are_not_counted(held: Held) -> None:
    with serving(FakeEngine(rule=held, max_rows=1)) as client:
        first = threading.Thread(target=client.post, args=(PATH, {**BODY, "max_tokens": 9}))
        first.start()
        assert held.reached.wait(10)
        content = '{"prompt": "a"}'
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", int(client.url.rpartition(":")[2]))) as second:
            second.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
            until(lambda: len(client.service.jobs) == 2)
        until(lambda: len(client.service.jobs) == 1)
        held.go.set()
        first.join()
        assert scrape(client)["prompt_tokens_total"] == 4
        assert scrape(client)[f"http_requests_total,{PATH},499"] == 1


def test_a_dead_engine_can_be_scraped() -> None:
    engine = FakeEngine()
    engine.steps_left = 3
    with serving(engine) as client:
        assert client.post(PATH, {**BODY, "max_tokens": 100}).status_code == 500
        found = scrape(client)
        assert (found["engine_up"], found["engine_state,dead"], found["engine_state,up"]) == (0, 1, 0)
        assert found["engine_steps_total"] == engine.steps, "its figures are those at its death"
        assert found[f"http_requests_total,{PATH},500"] == 1
        assert client.get("/server_info").json()["state"] == "dead"


def test_an_engine_that_is_built_anew_can_be_scraped() -> None:
    engines, go = [FakeEngine(), FakeEngine()], threading.Event()
    engines[0].steps_left = 3

    def build() -> FakeEngine:
        if len(engines) == 1:
            assert go.wait(20)
        return engines.pop(0)

    with serve(Served(build, Tokenizer.load(BYTES)), restart_engine=True) as client:
        assert client.post(PATH, {**BODY, "max_tokens": 100}).status_code == 500
        assert scrape(client)["engine_state,restarting"] == 1
        assert client.post(PATH, BODY).status_code == 503
        go.set()
        until(lambda: scrape(client)["engine_up"] == 1)
        found = scrape(client)
        assert (found["engine_restarts_total"], found["engine_steps_total"]) == (1, 0)
        assert found[f"http_requests_total,{PATH},503"] == 1


def test_responses_are_counted_by_route_and_status_with_refusals() -> None:
    options: dict[str, Any] = {
        "api_key": ("one",),
        "admin_api_key": "root",
        "max_body_size": 500,
        "max_queued_requests": 2,
    }
    headers = {"Authorization": "Bearer one"}
    with serving(headers=headers, **options) as client:
        assert client.post(PATH, BODY).status_code == 200
        client.events(PATH, BODY)
        client.post(PATH, {"prompt": "abc", "n": 0})
        client.post(PATH, BODY, headers={"Authorization": "Bearer two"})
        client.post(PATH, {"prompt": "a" * 600})
        client.http.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
        client.get(PATH)
        client.get("/v1/models/fake")
        client.get("/v1/models/other")
        client.post("/flush_cache")
        for index in range(50):
            client.get(f"/made/up/{index}")
            client.get(f"/v1/models/{index}")
        client.service.local.admission.admit("one", 2, 2)
        assert client.post(PATH, BODY).status_code == 429
        found = {k.removeprefix("http_requests_total,"): v for k, v in scrape(client).items() if "http_requests" in k}
        models = "/v1/models/{model}"
        assert found == {
            f"{PATH},200": 2, f"{PATH},400": 2, f"{PATH},401": 1, f"{PATH},413": 1, f"{PATH},429": 1, f"{PATH},405": 1,
            f"{models},200": 1, f"{models},404": 51, "/flush_cache,401": 1, "other,404": 50,
        }  # fmt: skip


def test_the_admin_key_opens_metrics_and_nothing_else() -> None:
    with serving(api_key=("one", "two"), api_key_weight=(3.0, 1.0), admin_api_key="root") as client:
        for key, status in (("root", 200), ("one", 200), ("three", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/metrics", headers=headers).status_code == status
            assert client.get("/server_info", headers=headers).status_code == (200 if key == "one" else 401)
        assert client.get("/metrics").status_code == 401
        info = client.get("/server_info", headers={"Authorization": "Bearer one"}).text
        assert "weight" not in info, "a tenant would see how many there are, and their shares"


@pytest.mark.one_process
def test_an_unexpected_error_bears_the_id_of_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as client:
        monkeypatch.setattr(client.service, "check_model", lambda _: 1 / 0)
        response = client.post(PATH, BODY, headers={"x-request-id": "mine"})
        assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
        assert response.json()["error"]["message"] == "internal error"
        (record,) = [one for one in caplog.records if one.exc_info]
        assert "mine" in record.getMessage()
        assert vars(record)["data"] == {"request_id": "mine"}
        assert record.exc_info is not None
        assert record.exc_info[0] is ZeroDivisionError
        assert scrape(client)[f"http_requests_total,{PATH},500"] == 1


def test_the_access_log_is_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as client:
        caplog.set_level(logging.DEBUG, "jswa.server")
        client.post(PATH, {"prompt": 1}, headers={"x-request-id": "mine"})
        client.get("/a%0Ab%20c")

        def lines() -> list[str]:
            return [one.getMessage() for one in caplog.records if "access" in one.getMessage()]

        until(lambda: len(lines()) == 2)  # the log lines are written after the responses
        first, second = lines()
        assert re.fullmatch(
            rf"access: client=127.0.0.1 method=POST path={PATH} status=400 seconds=[\d.e-]+ request_id=mine", first
        )
        assert "path=/a%0Ab%20c status=400" in second


def test_a_stream_that_pauses_after_its_first_token_gets_keep_alive_comments(held: Held) -> None:
    with serving(FakeEngine(rule=held), keep_alive=0.1) as client:
        text = ""
        with client.http.stream("POST", PATH, json={**BODY, "max_tokens": 5, "stream": True}) as response:
            for piece in response.iter_text():
                text += piece
                if text.count(": keep-alive\n\n") >= 2:
                    held.go.set()
        before, comment, after = text.partition(": keep-alive\n\n")
        assert comment
        assert before.count("data: {") == 3
        assert after.count("data: {") == 2
        assert text.endswith("data: [DONE]\n\n")

"""New weights, pauses and sleep over HTTP, with vLLM's and SGLang's names; with one process, and with front ends."""

from collections.abc import Iterator

import pytest

from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving

UPDATE = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def operator(form: int) -> Iterator[Client]:
    """A server; the client has the admin key."""
    with serving(FakeEngine(), admin_api_key="root", headers={"Authorization": "Bearer root"}) as found:
        yield found


def test_each_change_of_weights_is_a_version(operator: Client) -> None:
    """The version counts the changes, and the engine gets folder and mode; bad weights are refused by name."""
    engine = operator.engine
    before = operator.get("/weight_version").json()["weight_version"]
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "continue"),
        ({"in_flight": "finish"}, "finish"),
        ({"abort_all_requests": True}, "abort"),
    ]
    for number, (body, mode) in enumerate(cases, before + 1):
        answer = operator.post(UPDATE, {"model_path": "/some/where", **body})
        assert answer.json() == {"success": True, "weight_version": number}
        assert engine.turnover.given[-1] == ("/some/where", mode)
    assert operator.get("/weight_version").json() == {"weight_version": before + 3}
    error = operator.refusal(UPDATE, {"model_path": "bad"})
    assert "model.norm.weight" in error["message"]
    assert operator.refusal(UPDATE, {})["param"] == "model_path"
    assert operator.refusal(UPDATE, {"model_path": "a", "in_flight": "later"})["param"] == "in_flight"
    assert operator.get("/weight_version").json() == {"weight_version": before + 3}


def test_the_engine_pauses_and_sleeps(operator: Client) -> None:
    """An engine that sleeps does not resume; waking resumes too."""

    def state() -> tuple[bool, bool]:
        return operator.get("/is_paused").json()["is_paused"], operator.get("/is_sleeping").json()["is_sleeping"]

    assert state() == (False, False)
    for mode in ("keep", "abort", "wait"):
        assert operator.post(f"/pause?mode={mode}").status_code == 200
        assert state() == (True, False)
        assert operator.post("/resume").status_code == 200
        assert state() == (False, False)
    assert operator.post("/sleep?level=2").status_code == 200
    assert operator.engine.turnover.level == 2
    assert state() == (True, True)
    operator.refusal("/resume", {})
    assert operator.post("/wake_up").status_code == 200
    assert state() == (False, False)
    assert operator.refusal("/pause?mode=later", {})["param"] == "mode"
    assert operator.refusal("/sleep?level=3", {})["param"] == "level"
    assert operator.complete(max_tokens=2)["choices"][0]["finish_reason"] == "length"

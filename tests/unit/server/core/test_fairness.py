"""Fair queueing between API keys: the order of sequences, and shares of the queue."""

import threading
from collections import Counter

import pytest

from server.core.fairness import Admission, Turns
from server.http.errors import ApiError
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import serving, until


def serve_all(turns: Turns, waiting: list[tuple[int, str]], count: int) -> list[str]:
    """Run `count` sequences one after the other and return their keys in order."""
    served = []
    for _ in range(count):
        start, key = min(waiting)
        waiting.remove((start, key))
        turns.runs(start)
        served.append(key)
    return served


def test_with_one_tenant_sequences_run_in_order_of_arrival() -> None:
    turns = Turns({None: 1.0})
    assert turns.starts(None, [5, 6, 7]) == [0, 0, 0]


def test_a_key_that_floods_the_queue_delays_only_itself() -> None:
    turns = Turns({"hog": 1.0, "other": 1.0})
    waiting = [(start, "hog") for start in turns.starts("hog", [10] * 100)]
    assert serve_all(turns, waiting, 50) == ["hog"] * 50
    waiting += [(start, "other") for start in turns.starts("other", [10] * 20)]
    served = Counter(serve_all(turns, waiting, 20))
    assert abs(served["hog"] - served["other"]) <= 1


def test_keys_are_served_by_weight_and_tokens() -> None:
    turns = Turns({"a": 3.0, "b": 1.0})
    waiting = [(start, key) for key in ("a", "b") for start in turns.starts(key, [10] * 400)]
    served = Counter(serve_all(turns, waiting, 200))
    assert served["a"] == pytest.approx(3 * served["b"], rel=0.05)
    turns = Turns({"long": 1.0, "short": 1.0})
    waiting = [(start, "long") for start in turns.starts("long", [100] * 400)]
    waiting += [(start, "short") for start in turns.starts("short", [10] * 400)]
    served = Counter(serve_all(turns, waiting, 220))
    assert served["short"] == pytest.approx(10 * served["long"], rel=0.1)


def test_an_idle_key_saves_up_nothing() -> None:
    turns = Turns({"a": 1.0, "b": 1.0})
    waiting = [(start, "a") for start in turns.starts("a", [10] * 200)]
    serve_all(turns, waiting, 100)
    waiting += [(start, "b") for start in turns.starts("b", [10] * 100)]
    served = Counter(serve_all(turns, waiting, 40))
    assert served["b"] <= 21, "the idle key must not get the turns that it did not use"


def test_generated_tokens_count_against_a_key() -> None:
    turns = Turns({"a": 1.0, "b": 1.0})
    turns.starts("a", [10])
    turns.starts("b", [10])
    turns.charge("a", 500)
    assert turns.starts("a", [1])[0] > turns.starts("b", [1])[0]


def test_half_of_the_queue_is_reserved_by_weight() -> None:
    queue = Admission(100, 10_000, {"a": 3.0, "b": 1.0})
    for _ in range(87):  # b's share of the reserved half is an eighth of the queue
        queue.admit("a", 1, 1)
    with pytest.raises(ApiError) as full:
        queue.admit("a", 1, 1)
    assert full.value.status == 429
    queue.admit("b", 12, 12)
    with pytest.raises(ApiError):
        queue.admit("b", 2, 2)
    queue.release("a", 87, 87)
    queue.release("b", 12, 12)
    assert (queue.texts, queue.tokens, queue.refused) == (0, 0, 2)
    queue.admit("b", 62, 62)  # the unreserved half, and b's own share
    with pytest.raises(ApiError):
        queue.admit("b", 1, 1)


def test_a_single_tenant_has_the_whole_queue() -> None:
    queue = Admission(10, 100)
    queue.admit(None, 10, 10)
    with pytest.raises(ApiError):
        queue.admit(None, 1, 0)
    queue.release(None, 10, 10)
    queue.admit(None, 1, 100)
    with pytest.raises(ApiError):
        queue.admit(None, 1, 1)
    queue.release(None, 1, 100)
    queue.admit(None, 11, 1_000)  # an empty queue accepts one request of any size
    assert (queue.texts, queue.tokens, queue.refused) == (11, 1_000, 2)


def test_over_http_a_flood_of_one_key_does_not_block_another() -> None:
    engine = FakeEngine(max_rows=2)
    engine.delay = 0.002
    with serving(engine, api_key=("hog", "other")) as client:
        body = {"prompt": "abc", "max_tokens": 20, "n": 100}
        flood = threading.Thread(
            target=client.post, args=("/v1/completions", body), kwargs={"headers": {"Authorization": "Bearer hog"}}
        )
        flood.start()
        until(lambda: len(engine.waiting) > 90)
        for _ in range(3):
            client.post("/v1/completions", {**body, "n": 1}, headers={"Authorization": "Bearer other"})
        assert len(engine.waiting) > 70, "the other key must wait for a few turns only"
        flood.join()
        assert client.service.admission.texts == 0


def test_with_several_keys_a_raised_priority_is_refused() -> None:
    with serving(api_key=("a", "b"), headers={"Authorization": "Bearer a"}) as client:
        assert client.refusal("/v1/completions", {"prompt": "a", "priority": -1})["param"] == "priority"
        client.complete(priority=3)
        assert client.engine.seen[-1].priority == 3
    with serving(api_key=("a",), headers={"Authorization": "Bearer a"}) as client:
        client.complete(priority=-1)
        assert client.engine.seen[-1].priority == -1

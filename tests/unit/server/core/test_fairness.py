"""Fairness between API keys: shares of budgets and of the queue, and turns at helpers."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from jswa.errors import EngineDead
from server.core.fairness import Admission, Budget, Helpers, Lanes, Weights, check_size
from server.http.errors import ApiError
from tests.support.attacks.floods import slow_tokenizer
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import serving, until

KEYS: Weights = {"hog": 1.0, "a": 1.0, "b": 1.0, "c": 1.0}


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on an event loop."""

    async def whole() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(whole())


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


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
    assert (queue.texts, queue.tokens, queue.refused) == (0, 0, 2)


def test_one_request_has_at_most_half_of_the_queue() -> None:
    """A larger request would wait for ever beside others, or shut them out, so it is refused at once."""
    check_size(10, 100, 5, 50)
    for texts, tokens, param in ((6, 6, "n"), (1, 51, "prompt")):
        with pytest.raises(ApiError) as refused:
            check_size(10, 100, texts, tokens)
        assert (refused.value.status, refused.value.param) == (400, param)
    check_size(1, 100, 1, 1)


def test_a_budget_keeps_a_share_for_each_key() -> None:
    budget = Budget(800, KEYS)
    assert budget.acquire("hog", 500)
    assert not budget.acquire("hog", 1)
    for key in ("a", "b", "c"):
        assert budget.acquire(key, 100)
    assert (budget.used, budget.refused) == (800, 1)
    budget.release("hog", 500)
    assert budget.acquire("a", 400)


def test_an_empty_budget_takes_what_is_larger_than_itself() -> None:
    """Otherwise such a request could never be served."""
    budget = Budget(10, KEYS)
    assert budget.acquire("hog", 50)
    assert not budget.acquire("a", 1)
    budget.release("hog", 50)
    assert budget.acquire("a", 1)


def test_one_key_never_has_all_queue() -> None:
    async def test() -> None:
        lanes, done = Lanes(2, KEYS, 100), list[str]()

        async def work(key: str, go: asyncio.Event) -> None:
            async with lanes.lane(key):
                await go.wait()
                done.append(key)

        held, free = asyncio.Event(), asyncio.Event()
        free.set()
        hogs = [asyncio.ensure_future(work("hog", held)) for _ in range(5)]
        await settle()
        assert lanes.waiting == 4
        for key in ("a", "b", "c"):
            await work(key, free)
        assert done == ["a", "b", "c"], "their place was free"
        held.set()
        await asyncio.gather(*hogs)
        assert lanes.waiting == 0

    run(test)


def test_keys_that_wait_are_called_in_turn() -> None:
    async def test() -> None:
        lanes, done = Lanes(1, KEYS, 100), list[str]()

        async def work(key: str) -> None:
            async with lanes.lane(key):
                await asyncio.sleep(0)
                done.append(key)

        waiting = ["hog"] * 6 + ["a", "a", "b"]
        await asyncio.gather(*map(work, waiting))
        assert done == ["hog", "hog", "a", "b", "hog", "a", "hog", "hog", "hog"]

    run(test)


def test_a_place_is_free_again_however_its_owner_ends() -> None:
    async def test() -> None:
        lanes = Lanes(1, {None: 1.0}, 100)

        async def work() -> None:
            async with lanes.lane(None):
                await asyncio.sleep(10)

        tasks = [asyncio.ensure_future(work()) for _ in range(4)]
        await settle()
        tasks[1].cancel()  # this task waits for the lane
        tasks[0].cancel()  # this task occupies the lane, so the next one gets it
        await settle()
        tasks[2].cancel()
        await settle()
        assert lanes.waiting == 0
        tasks[3].cancel()
        await settle()
        await lanes.acquire(None)

    run(test)


def test_who_waits_is_bounded_for_each_key() -> None:
    async def test() -> None:
        lanes = Lanes(1, KEYS, 16)
        await lanes.acquire("hog")
        waiting = [asyncio.ensure_future(lanes.acquire("hog")) for _ in range(40)]
        await settle()
        full = [task for task in waiting if task.done()]
        assert len(full) == 30, "half of the places, and an eighth of its own"
        error = full[0].exception()
        assert isinstance(error, ApiError)
        assert error.status == 429
        assert lanes.refused == 30
        quiet = asyncio.ensure_future(lanes.acquire("a"))
        await settle()
        assert not quiet.done()
        for task in (*waiting, quiet):
            task.cancel()

    run(test)


def test_a_thread_is_taken_until_its_work_ends() -> None:
    """This includes work whose caller was cancelled: otherwise later work would queue in the thread pool behind it."""

    async def test() -> None:
        helpers, go = Helpers(1, {None: 1.0}), threading.Event()
        first = asyncio.ensure_future(helpers.run(None, go.wait))
        await asyncio.sleep(0.02)
        first.cancel()
        second = asyncio.ensure_future(helpers.run(None, lambda: 7))
        await asyncio.sleep(0.02)
        assert helpers.lanes.waiting == 1
        go.set()
        assert await second == 7
        with pytest.raises(ZeroDivisionError):
            await helpers.run(None, lambda: 1 // 0)
        helpers.close()

    run(test)


@pytest.mark.one_process
def test_large_prompts_of_one_key_hold_up_no_other() -> None:
    """Keys share the threads that tokenize over HTTP, as they share the engine."""
    with serving(FakeEngine(max_model_len=20_000), api_key=("hog", "other")) as client:
        with slow_tokenizer(client, {"hog": 20}):
            until(lambda: client.service.helpers.lanes.waiting > 10)
            answer = client.post("/tokenize", {"prompt": "quick" * 2_000}, headers={"Authorization": "Bearer other"})
        assert answer.json()["count"] == 10_001


def test_over_http_a_flood_of_one_key_does_not_block_another() -> None:
    engine = FakeEngine(max_rows=2)
    engine.delay = 0.002
    with serving(engine, api_key=("hog", "other"), api_key_weight=(1.0, 2.0)) as client:
        body = {"prompt": "abc", "max_tokens": 20, "n": 100}
        flood = threading.Thread(
            target=client.post, args=("/v1/completions", body), kwargs={"headers": {"Authorization": "Bearer hog"}}
        )
        flood.start()
        until(lambda: len(engine.waiting) > 90)
        for _ in range(3):
            client.post("/v1/completions", {**body, "n": 1}, headers={"Authorization": "Bearer other"})
        assert len(engine.waiting) > 70, "the other key must wait for a few turns only"
        assert {(request.options.tenant, request.options.weight) for request in engine.seen} == {("0", 1.0), ("1", 2.0)}
        flood.join()
        assert client.service.local.admission.texts == 0


def test_going_before_others_must_be_allowed() -> None:
    for keys in ((), ("a",), ("a", "b")):
        with serving(api_key=keys, headers={"Authorization": "Bearer a"}) as client:
            error = client.refusal("/v1/completions", {"prompt": "a", "priority": -1})
            assert error["param"] == "priority"
            assert "--allow-priority" in error["message"]
            client.complete(priority=3)
            assert client.engine.seen[-1].options.priority == 3
    with serving(allow_priority=True) as client:
        client.complete(priority=-(2**31))
        assert client.engine.seen[-1].options.priority == -(2**31)


def test_a_request_that_cannot_be_begun_gives_its_places_back() -> None:
    """A failure between the admission and the engine releases the admission."""
    with serving() as client:
        submit = client.service.local.thread.submit

        def fail(*_: object) -> None:
            raise EngineDead("the engine has failed")

        client.service.local.thread.submit = fail  # type: ignore[method-assign,assignment]
        assert client.post("/v1/completions", {"prompt": "abc"}).status_code == 500
        assert (client.service.local.admission.texts, client.service.local.admission.tokens) == (0, 0)
        client.service.local.thread.submit = submit  # type: ignore[method-assign]
        client.complete()

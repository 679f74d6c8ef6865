"""The events of /live: the whole view first, then changes from which a client has the same view; for admins only."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.view import ArenaGeometry, CacheView
from server.http.errors import ApiError
from server.pages.live import Feed, changes, complete
from tests.support.server.harness import serving

GEOMETRY = ArenaGeometry(16, 2, 20, 4, 32, False, True)
ADMIN = {"Authorization": "Bearer root"}


def a_view(slots: list[int], seconds: float = 0.0) -> CacheView:
    """Return a view with these slots."""
    rows, tree = np.array([[0, 5, 0, 0, 1]], np.int32), np.array([[-1, 0, 16, 1, 1, 0, 0]])
    return CacheView(
        GEOMETRY, np.array(slots, np.uint8), np.array(slots[:8], np.uint8), rows, tree, np.array([[0, 16]]), seconds
    )


def parsed(event: bytes) -> Any:
    """Return the value of an event."""
    return json.loads(event.removeprefix(b"data: "))


def slots_of(change: Any) -> list[int]:
    """Return the slots of a change that has all."""
    return list(base64.b64decode(change["slots"]))


codes = st.lists(st.integers(0, 6), min_size=40, max_size=40)


@given(codes, st.lists(st.tuples(st.integers(0, 39), st.integers(0, 6)), max_size=8), codes)
def test_changes_lead_from_one_view_to_the_next(
    before: list[int], some: list[tuple[int, int]], other: list[int]
) -> None:
    after = list(before)
    for slot, code in some:
        after[slot] = code
    for target in (after, other):
        event = parsed(changes(a_view(before), a_view(target), tree=False))
        assert follow(before, event["arena"]) == target
        assert follow(before[:8], event["host"]) == target[:8]
        assert "tree" not in event


def follow(before: list[int], change: Any) -> list[int]:
    """Return the slots after a change."""
    found = slots_of(change) if "slots" in change else list(before)
    runs = change.get("runs", [])
    for first, count, code in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        found[first : first + count] = [code] * count
    return found


def test_a_whole_view_has_all() -> None:
    event = parsed(complete(a_view([1] * 40), "tiny"))
    assert (slots_of(event["arena"]), slots_of(event["host"])) == ([1] * 40, [1] * 8)
    assert (event["model"], event["geometry"]["window"]) == ("tiny", 32)
    assert (event["rows"], event["windows"], event["tree"]) == ([0, 5, 0, 0, 1], [0, 16], [[-1, 0, 16, 1, 1, 0, 0]])


def test_looks_wait_for_a_hundred_times_as_long_as_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def short(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    async def look(_: Any) -> CacheView:
        return a_view([0] * 40, seconds=0.02 if len(waits) > 2 else 0.0)

    async def main() -> None:
        monkeypatch.setattr(asyncio, "sleep", short)
        feed = Feed(look, lambda: len(waits) > 5, "tiny")
        events = [parsed(event) async for event in feed.events(feed.join())]
        assert [event["type"] for event in events] == ["whole", *["changes"] * 5]

    asyncio.run(main())
    assert waits == [0.1, 0.1, 0.1, 2.0, 2.0, 2.0]


def test_nobody_looks_without_watchers_and_a_dead_engine_is_named() -> None:
    looks = 0

    async def look(_: Any) -> CacheView:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise ApiError(500, "the engine has failed")
        return a_view([0] * 40)

    async def main() -> None:
        feed = Feed(look, lambda: False, "tiny")
        assert looks == 0
        events = [parsed(event) async for event in feed.events(feed.join())]
        assert events[0]["type"] == "whole"
        assert events[-1]["error"]["message"] == "the engine has failed"

    asyncio.run(main())


def test_a_slow_watcher_skips_changes_and_gets_the_whole_view_again() -> None:
    async def look(_: Any) -> CacheView:
        return a_view([0] * 40)

    async def main() -> None:
        feed = Feed(look, lambda: feed.looks > 25, "tiny")
        queue = feed.join()
        while feed.looks <= 6:
            await asyncio.sleep(0.02)
        assert queue.qsize() <= 4
        kinds = [parsed(event)["type"] async for event in feed.events(queue)]
        assert kinds[0] == "whole"
        assert kinds.count("whole") == 2

    asyncio.run(main())


def test_the_stream_is_for_admins() -> None:
    with serving(api_key=("user",), admin_api_key="root") as client:
        assert client.get("/live/events").status_code == 401
        assert client.get("/live/events", headers={"Authorization": "Bearer user"}).status_code == 401
        with client.http.stream("GET", "/live/events", headers=ADMIN) as stream:
            line = next(stream.iter_lines())
        assert json.loads(line.removeprefix("data: "))["type"] == "whole"
    with serving() as client:
        assert client.get("/live/events").status_code == 403


def test_profiles_are_for_admins_and_need_a_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "profiles")
    with serving(admin_api_key="root", profile_dir=folder) as client:
        assert client.post("/start_profile").status_code == 401
        assert client.post("/stop_profile", headers=ADMIN).status_code == 400
        assert client.post("/start_profile", headers=ADMIN).json() == {"status": "ok"}
        assert client.engine.profiled == folder
        assert client.post("/stop_profile", headers=ADMIN).json() == {"status": "ok"}
        assert folder not in client.get("/server_info").text
    with serving(admin_api_key="root") as client:
        response = client.post("/start_profile", headers=ADMIN)
        assert (response.status_code, "--profile-dir" in response.text) == (400, True)

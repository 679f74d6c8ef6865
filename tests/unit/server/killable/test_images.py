"""Images are prepared in processes with limits: whatever a file does, the next one is prepared."""

import json
import os
import signal
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from jswa.errors import ConfigError
from jswa.images.decode import decode
from jswa.images.picture import Geometry, Picture
from jswa.images.prepare import prepare
from server.core.fairness import weights_of
from server.http.errors import ApiError
from server.killable import images
from server.killable.worker import Answer
from server.text.images import Preparer
from tests.support.attacks.images import file_of, image_of, lying, moving
from tests.support.server.harness import until
from tests.support.server.killable import Looped, kill, state, stop

FIELD = "messages[0].content[1].image_url"
GEOMETRY = Geometry(16, 3, 70)
FILE = file_of(image_of(300, 200))


class Running:
    """A preparer on an event loop of its own."""

    def __init__(self) -> None:
        self.loop = Looped()
        self.preparer = Preparer(GEOMETRY, weights_of((), ()))
        self.loop.call(self.preparer.start())

    def close(self) -> None:
        """End the processes and the loop."""
        self.loop.call(self.preparer.close())
        self.loop.close()

    def prepare(self, data: bytes = FILE) -> Picture:
        """Prepare an image."""
        return self.loop.call(self.preparer.prepare(data, FIELD))

    def pids(self) -> list[int]:
        """The processes that have started, once there are three. An image notices those that are lost."""
        assert self.prepare().tokens == 60
        until(lambda: len(self._running()) == 3)
        return self._running()

    def _running(self) -> list[int]:
        return [pid for pid in self.preparer.pool.idle if state(pid) not in "ZX"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A preparer for a server without keys."""
    found = Running()
    yield found
    found.close()


@pytest.mark.parametrize("size", [(300, 200), (1, 1), (3, 2_000)])
def test_a_process_makes_the_same_picture(running: Running, size: tuple[int, int]) -> None:
    data = file_of(image_of(*size))
    theirs, ours = running.prepare(data), prepare(decode(data, FIELD), GEOMETRY)
    assert np.array_equal(theirs.patches, ours.patches)
    assert np.array_equal(theirs.positions, ours.positions)
    assert theirs[2:] == ours[2:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", f"{FIELD} = '0 bytes': must be a JPEG, PNG, WebP, GIF or BMP image"),
        (FILE[:-50], f"{FIELD} = 'PNG': cannot be decoded: image file is truncated"),
        (moving("gif", 2), f"{FIELD} = 'GIF of 20 x 10 pixels': must not be animated"),
        (lying("png", 50_000, 50_000), f"{FIELD} = 'PNG of 50000 x 50000 pixels': must have at most 67108864 pixels"),
    ],
)
def test_a_refused_image_costs_no_process(running: Running, data: bytes, reason: str) -> None:
    before = running.pids()
    with pytest.raises(ApiError) as caught:
        running.prepare(data)
    assert caught.value.message.startswith(reason)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, FIELD, "invalid_value")
    assert running.prepare().tokens == 60
    assert running.pids() == before


@pytest.mark.parametrize("killed", range(3))
def test_an_image_whose_process_is_killed_is_prepared_by_another_one(running: Running, killed: int) -> None:
    """The processes are stopped, so that one of them has the image when one is killed; in some case it is the same."""
    ids = running.pids()
    stop(*ids)
    answer = running.loop.begin(running.preparer.prepare(FILE, FIELD))
    time.sleep(0.2)
    assert not answer.done()
    kill(ids.pop(killed))
    for pid in ids:
        os.kill(pid, signal.SIGCONT)
    assert answer.result(60).tokens == 60


def test_an_image_that_takes_too_long_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its processes are killed; others take their places."""
    ids, killed = running.pids(), running.preparer.pool.killed
    stop(*ids)
    monkeypatch.setattr("server.text.images.TIMEOUT", 0.2)
    with pytest.raises(ApiError, match=r"is too costly: it takes more than 10 s") as caught:
        running.prepare()
    assert caught.value.status == 400
    monkeypatch.undo()
    assert running.preparer.pool.killed == killed + 2
    kill(*(pid for pid in ids if state(pid) == "T"))
    assert running.prepare().tokens == 60


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    """What a process answers, in this one."""
    monkeypatch.setattr(os, "nice", lambda more: 0)
    with warnings.catch_warnings():
        yield images.begin(None, images.packed(GEOMETRY))


@pytest.mark.parametrize(
    ("error", "reason"), [(MemoryError(), "takes more than 2 GiB of memory"), (ConfigError("a", "b", "c"), None)]
)
def test_whatever_decoding_raises_is_answered(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str | None
) -> None:
    """A fault of the server is no fault of the image."""

    def fails(data: bytes, field: str) -> None:
        raise error

    monkeypatch.setattr(images, "decode", fails)
    found = answer(FILE)
    if reason is None:
        with pytest.raises(RuntimeError, match="could not be prepared: ConfigError: a = 'b': c"):
            images.read(bytearray(found), GEOMETRY)
    else:
        refusal = images.read(bytearray(found), GEOMETRY)
        assert isinstance(refusal, images.Refusal)
        assert reason in refusal.limit
        assert json.loads(found) == list(refusal)

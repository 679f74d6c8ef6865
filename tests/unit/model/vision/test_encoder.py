"""The laws of the encoder: an image is computed once at a time, the cache is bounded, nobody changes what it holds."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jswa.errors import InvalidImage
from jswa.images.picture import Picture
from jswa.model.collectives import AXIS
from jswa.model.vision.config import VisionConfig, vision_config_of
from jswa.model.vision.encoder import ImageEncoder, Program
from jswa.model.vision.weights import load_tower
from tests.parity.images.load import MOST_TOKENS, drawn_pictures, load_images
from tests.parity.weights import write_checkpoint

PICTURES = [Picture(*drawn) for drawn in drawn_pictures(0)]  # of 1, 2, 3 and 20 tokens
WIDTH = 5
ROW = 4 * WIDTH  # bytes


class MadeUp:
    """Stands for the tower: a soft token is the number of the image's pixels; `go` holds computations back.

    Attributes:
        begun: released when a computation begins.
        calls: computations.
        failing: they raise MemoryError.
    """

    def __init__(self) -> None:
        self.begun, self.go, self.calls, self.failing = threading.Semaphore(0), threading.Event(), 0, False
        self.go.set()

    def __call__(self, patches: Any, positions: Any, rest: Any) -> Any:
        self.calls += 1
        rest(0.01)
        self.begun.release()
        assert self.go.wait(60)
        if self.failing:
            raise MemoryError("no room")
        seen = positions[:, 0] >= 0
        return np.full((MOST_TOKENS, WIDTH), patches[seen].size, np.float32)


def config_of(config_json: dict[str, Any]) -> VisionConfig:
    """Return the tower of a config that has one."""
    found = vision_config_of(config_json)
    assert found is not None
    return found


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """The tower that encoders compile."""
    made = MadeUp()
    monkeypatch.setattr("jswa.model.vision.encoder.compiled_tower", lambda *_: Program(made, 0))
    return made


@pytest.fixture
def encoder(tower: MadeUp) -> Iterator[ImageEncoder]:
    """An encoder with room for five rows, which keeps its laws."""
    made = ImageEncoder(config_of(load_images("clipped").config), {}, most_tokens=MOST_TOKENS, most_bytes=5 * ROW)
    yield made
    made.check()


@pytest.mark.parametrize("devices", [None, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_transformers(devices: int | None, dtype: str, tmp_path: Path) -> None:
    fixture, mesh = load_images("clipped"), None if devices is None else Mesh(np.array(jax.devices()[:1]), (AXIS,))
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    config = config_of(fixture.config)
    params = load_tower(tmp_path, config, jnp.dtype(dtype), mesh=mesh)
    encoder = ImageEncoder(config, params, most_tokens=MOST_TOKENS, most_bytes=1 << 20, mesh=mesh)
    pictures = [Picture(*drawn) for drawn in fixture.pictures]
    for picture, expected in zip(pictures, fixture.soft_tokens, strict=True):
        rows = encoder.encode(picture)
        assert rows.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(rows.astype(np.float32), expected, rtol=0, atol=2e-5 if dtype == "float32" else 0.15)
    encoder.check()


def test_rows_are_read_only(encoder: ImageEncoder) -> None:
    rows = encoder.encode(PICTURES[1])
    assert rows.shape == (2, WIDTH)
    assert (rows == PICTURES[1].patches.size).all()
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    assert rows.base is None, "it must not hold the rows of padding"


def test_an_image_is_encoded_once(encoder: ImageEncoder) -> None:
    first = encoder.encode(PICTURES[1])
    assert encoder.encode(PICTURES[1]) is first
    assert (encoder.encoded, encoder.hits, encoder.held_bytes) == (1, 1, 2 * ROW)


@pytest.mark.parametrize("busy", [True, False])
def test_it_rests_while_others_want_the_device(
    busy: bool, encoder: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as a layer took, which is 0.01 s here."""
    slept = list[float]()
    monkeypatch.setattr("jswa.model.vision.encoder.time.sleep", slept.append)
    encoder.encode(PICTURES[1], busy=lambda: busy)
    assert slept == [0.01] * busy


def test_what_was_asked_for_longest_ago_is_dropped(encoder: ImageEncoder) -> None:
    one, two, three, _ = PICTURES
    encoder.encode(one)
    encoder.encode(two)
    encoder.encode(one)
    encoder.encode(three)  # with six rows there is no room for `two`
    assert encoder.held_bytes == 4 * ROW
    encoder.encode(one)
    assert (encoder.encoded, encoder.hits) == (3, 2)
    encoder.encode(two)
    assert (encoder.encoded, encoder.hits) == (4, 2)


def test_an_image_with_more_bytes_than_the_cache_is_not_held(encoder: ImageEncoder) -> None:
    encoder.encode(PICTURES[0])
    encoder.encode(PICTURES[3])
    assert encoder.held_bytes == ROW
    encoder.encode(PICTURES[0])
    assert (encoder.encoded, encoder.hits) == (2, 1)


def test_threads_that_ask_for_one_image_wait_for_one_computation(encoder: ImageEncoder, tower: MadeUp) -> None:
    tower.go.clear()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(encoder.encode, PICTURES[1]) for _ in range(8)]
        while encoder.hits < 7:
            encoder.check()
        tower.go.set()
        rows = [one.result(60) for one in asked]
    assert tower.calls == encoder.encoded == 1
    assert all(one is rows[0] for one in rows)


def test_images_are_computed_one_at_a_time(encoder: ImageEncoder, tower: MadeUp) -> None:
    """One that is held already is found meanwhile."""
    first = encoder.encode(PICTURES[0])
    assert tower.begun.acquire(timeout=60)
    tower.go.clear()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(encoder.encode, picture) for picture in PICTURES[1:3]]
        assert tower.begun.acquire(timeout=60)
        assert not tower.begun.acquire(timeout=0.2)
        assert encoder.encode(PICTURES[0]) is first
        tower.go.set()
        assert [len(one.result(60)) for one in asked] == [2, 3]


def test_all_who_wait_for_a_failed_computation_are_told(encoder: ImageEncoder, tower: MadeUp) -> None:
    """The next one to ask computes again."""
    tower.go.clear()
    tower.failing = True
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(encoder.encode, PICTURES[1]) for _ in range(2)]
        while encoder.hits < 1:
            encoder.check()
        tower.go.set()
        for one in asked:
            with pytest.raises(MemoryError, match="no room"):
                one.result(60)
    tower.failing = False
    assert len(encoder.encode(PICTURES[1])) == 2
    assert (encoder.encoded, tower.calls) == (1, 2)


def test_many_threads_keep_the_laws(encoder: ImageEncoder, tower: MadeUp) -> None:
    order = np.random.default_rng(0).integers(0, 4, 400)
    with ThreadPoolExecutor(6) as pool:
        rows = list(pool.map(lambda number: encoder.encode(PICTURES[number]), order))
    for number, found in zip(order, rows, strict=True):
        assert found.shape == (PICTURES[number].tokens, WIDTH)
        assert (found == PICTURES[number].patches.size).all()
    assert encoder.encoded == tower.calls
    assert encoder.encoded + encoder.hits == len(order)


def test_an_image_is_not_found_under_another_salt(tower: MadeUp, encoder: ImageEncoder) -> None:
    encoder.encode(PICTURES[1], "one")
    encoder.encode(PICTURES[1], "one")
    assert tower.calls == 1
    encoder.encode(PICTURES[1], "two")
    encoder.encode(PICTURES[1])
    assert (tower.calls, encoder.hits) == (3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 3}, "no whole squares"),
        ({"positions": PICTURES[1].positions - 1}, "no padding"),
        ({"tokens": 21}, "at most 20"),
    ],
)
def test_a_picture_that_breaks_the_laws_of_patches_is_no_input(
    encoder: ImageEncoder, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        encoder.encode(PICTURES[1]._replace(**change))


def test_a_picture_of_more_patches_than_the_tower_has_places_for_is_refused(encoder: ImageEncoder) -> None:
    wide = PICTURES[1]._replace(positions=PICTURES[1].positions + 24)
    with pytest.raises(InvalidImage, match="must have at most 24, as the model has"):
        encoder.encode(wide)

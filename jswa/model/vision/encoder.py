"""The vision tower as an engine holds it: its programs, and a cache of the images that it has encoded."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, UInt8

from jswa.errors import InvalidImage
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput
from jswa.model.binding import bound, run_dtype
from jswa.model.transformer import Params
from jswa.model.vision.config import VisionConfig
from jswa.model.vision.gemma4 import PADDING, Layer, Tower

SoftTokens = Float[np.ndarray, "tokens M"]
Key = tuple[str, bytes]  # salt and digest


class Program(NamedTuple):
    """A compiled tower, and the bytes of its temporaries.

    `run` gets padded patches and positions, and waits for soft tokens. After each layer it calls its last argument with
    the seconds that the layer took.
    """

    run: Callable[
        [UInt8[np.ndarray, "N P"], Int32[np.ndarray, "N 2"], Callable[[float], object]], Float[np.ndarray, "S M"]
    ]
    scratch_bytes: int


def compiled_tower(config: VisionConfig, params: Params, most_tokens: int, mesh: Mesh | None = None) -> Program:
    """Compile the tower for images of `most_tokens` soft tokens: what comes first, one layer for all, and the end.

    Args:
        params: as `load_tower` returns them. The program keeps them.
        mesh: the one on whose devices the parameters are; all of them compute the same.
    """
    dtype = jnp.dtype(run_dtype(params))

    def enter(params: Params, patches: UInt8[Array, "N P"], positions: Int32[Array, "N 2"]) -> Float[Array, "N W"]:
        return bound(lambda: Tower(config, dtype), params).enter(patches, positions)

    def layer(params: Params, x: Float[Array, "N W"], positions: Int32[Array, "N 2"]) -> Float[Array, "N W"]:
        return bound(lambda: Layer(config, dtype), params)(x, positions)

    def leave(params: Params, x: Float[Array, "N W"], positions: Int32[Array, "N 2"]) -> Float[Array, "S M"]:
        return bound(lambda: Tower(config, dtype), params).leave(x, positions)

    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    count = most_tokens * config.pooling**2
    patches = jax.ShapeDtypeStruct((count, 3 * config.patch**2), np.uint8, sharding=whole)  # type: ignore[no-untyped-call]
    positions = jax.ShapeDtypeStruct((count, 2), np.int32, sharding=whole)  # type: ignore[no-untyped-call]
    x = jax.ShapeDtypeStruct((count, config.width), dtype, sharding=whole)  # type: ignore[no-untyped-call]
    prefixes = [f"blocks.{number}." for number in range(config.layers)]
    layers = [
        {name.removeprefix(own): value for name, value in params.items() if name.startswith(own)} for own in prefixes
    ]
    first, each, last = (
        jax.jit(part, out_shardings=whole).lower(own, read, positions).compile()
        for part, own, read in ((enter, params, patches), (layer, layers[0], x), (leave, params, x))
    )

    def run(
        patches: UInt8[np.ndarray, "N P"], positions: Int32[np.ndarray, "N 2"], rest: Callable[[float], object]
    ) -> Float[np.ndarray, "S M"]:
        x = first(params, patches, positions)
        for own in layers:
            begin = time.monotonic()
            x = each(own, x, positions).block_until_ready()
            rest(time.monotonic() - begin)
        return np.asarray(last(params, x, positions))

    found = [one.memory_analysis() for one in (first, each, last)]
    takes = [int(one.temp_size_in_bytes + one.output_size_in_bytes) for one in found if one is not None]
    return Program(run, max(takes) + math.prod(x.shape) * x.dtype.itemsize if takes else 0)


class ImageEncoder:
    """Encodes images, one at a time, in any thread and beside the engine's steps.

    It owns the tower's parameters and its compiled programs. All images are padded to one size, so that there is one
    set of programs; they are compiled when the encoder is made.

    Laws (`check`): the cache has at most `most_bytes`, and drops the image that was asked for longest ago; no image is
    computed twice at the same time.

    Attributes:
        most_tokens: soft tokens that an image may have.
        most_bytes: bytes of soft tokens that the cache may hold; an image with more is not held.
    """

    def __init__(
        self, config: VisionConfig, params: Params, *, most_tokens: int, most_bytes: int, mesh: Mesh | None = None
    ) -> None:
        """Compile the program.

        Args:
            params: as `load_tower` returns them.
            mesh: the one on whose devices the parameters are.
        """
        self.most_tokens, self.most_bytes = most_tokens, most_bytes
        self._config = config
        self._program = compiled_tower(config, params, most_tokens, mesh)
        self._device = threading.Lock()  # one image at a time: the temporary memory of several may not fit
        self._lock = threading.Lock()  # of all below
        self._held: OrderedDict[Key, SoftTokens] = OrderedDict()  # what was asked for last comes last
        self._running: dict[Key, Future[SoftTokens]] = {}
        self._bytes = self._encoded = self._hits = 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the program takes on the device while it runs."""
        return self._program.scratch_bytes

    @property
    def encoded(self) -> int:
        """Images that were computed."""
        return self._encoded

    @property
    def hits(self) -> int:
        """Images that were found in the cache, or were being computed already."""
        return self._hits

    @property
    def held_bytes(self) -> int:
        """Bytes in the cache."""
        return self._bytes

    def encode(self, picture: Picture, salt: str = "", *, busy: Callable[[], bool] = lambda: False) -> SoftTokens:
        """Return the soft tokens of an image, read-only, on the host, in the type of the activations.

        The same image is not computed again while it is in the cache or another thread computes it; this thread then
        waits, and raises what the other one raises. Raises InvalidImage if the tower has no numbers for its positions.

        Args:
            salt: images are found under the same salt only: its time would tell other tenants what images there were.
            busy: whether others want the device. While they do, it rests after each layer for as long as that took.
        """
        key = salt, picture.digest
        with self._lock:
            held = self._held.get(key)
            running = self._running.get(key)
            if held is not None:
                self._held.move_to_end(key)
            if held is not None or running is not None:
                self._hits += 1
            else:
                own = self._running[key] = Future[SoftTokens]()
        if held is not None:
            return held
        if running is not None:
            return running.result()
        try:
            rows = self._computed(picture, busy)
        except BaseException as error:
            with self._lock:
                del self._running[key]
            own.set_exception(error)
            raise
        with self._lock:
            self._encoded += 1
            self._hold(key, rows)
            del self._running[key]
        own.set_result(rows)
        return rows

    def check(self) -> None:
        """Assert the laws of the cache."""
        with self._lock:
            assert self._bytes == sum(rows.nbytes for rows in self._held.values()), "the cache counts its bytes"
            assert self._bytes <= self.most_bytes, "the cache is bounded"
            assert not self._held.keys() & self._running.keys(), "what is held is not computed again"
            assert not any(rows.flags.writeable for rows in self._held.values()), "nobody changes what is held"

    def _hold(self, key: Key, rows: SoftTokens) -> None:
        if rows.nbytes > self.most_bytes:
            return
        self._held[key] = rows
        self._bytes += rows.nbytes
        while self._bytes > self.most_bytes:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= oldest.nbytes

    def _computed(self, picture: Picture, busy: Callable[[], bool]) -> SoftTokens:
        count, pooling = len(picture.patches), self._config.pooling
        assert picture.tokens <= self.most_tokens, f"{picture.tokens} tokens, at most {self.most_tokens}"
        assert count == len(picture.positions) == picture.tokens * pooling**2, f"{count} patches are no whole squares"
        assert picture.positions.min() >= 0, "there is no padding"
        furthest, most = int(picture.positions.max()) + 1, self._config.positions
        if furthest > most:
            raise InvalidImage("image", f"{furthest} patches each way", f"must have at most {most}, as the model has")
        size = self.most_tokens * pooling**2
        patches = np.zeros((size, picture.patches.shape[1]), np.uint8)
        positions = np.full((size, 2), PADDING, np.int32)
        patches[:count], positions[:count] = picture.patches, picture.positions
        with self._device:
            rows = self._program.run(patches, positions, partial(_rest, busy))[: picture.tokens].copy()
        rows.flags.writeable = False
        return rows


def _rest(busy: Callable[[], bool], seconds: float) -> None:
    """Leave the device to others for so many seconds, if they want it."""
    if busy():
        time.sleep(seconds)


class Sight(NamedTuple):
    """What an engine needs to read images: what makes prompts of them, and what encodes them."""

    images: ImageInput
    encoder: ImageEncoder

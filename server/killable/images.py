"""A kind of processes that can be killed: they prepare images, which takes code in C that reads what strangers sent.

The first question is the geometry, as JSON, and each later one the file of an image. The answer is the letter P, the
number of patches in a row, as four bytes, and the patches; or a `Refusal`, as JSON; or after the letter F why the
process has failed.
"""

import contextlib
import json
import os
import struct
import warnings
from functools import partial
from typing import NamedTuple

import numpy as np

from jswa.errors import ConfigError, InvalidImage
from jswa.images.decode import decode, require_pillow
from jswa.images.picture import Geometry, Picture, picture_of
from jswa.images.prepare import cut

from .worker import MEMORY, NICE, Answer

_HEAD = struct.Struct("<cI")


class Refusal(NamedTuple):
    """What is wrong with an image, and what is allowed, in words."""

    value: str
    limit: str


def load(data: bytes) -> None:
    """Import what decoding needs."""
    with contextlib.suppress(ConfigError):  # without Pillow, each image is answered with the reason
        require_pillow()


def begin(loaded: None, first: bytes) -> Answer:
    """Return what prepares images."""
    os.nice(NICE)
    warnings.simplefilter("ignore")  # Pillow's, about a stranger's file
    return partial(_answer, Geometry(*json.loads(first)))


def packed(geometry: Geometry) -> bytes:
    """Return the first question."""
    return json.dumps(geometry).encode()


def read(answer: bytearray, geometry: Geometry) -> Picture | Refusal:
    """Return what a process has answered. Raises RuntimeError if it has failed."""
    if answer[:1] == b"F":
        raise RuntimeError(f"an image could not be prepared: {str(memoryview(answer)[1:], 'utf-8')}")
    if answer[:1] != b"P":
        return Refusal(*json.loads(answer))
    _, columns = _HEAD.unpack_from(answer)
    patches = np.frombuffer(answer, np.uint8, offset=_HEAD.size).reshape(-1, 3 * geometry.patch**2)
    return picture_of(patches, columns, geometry)


def _answer(geometry: Geometry, question: bytes) -> bytes:
    """Return the answer of a question."""
    try:
        patches, columns = cut(decode(question, "image"), geometry)
        return _HEAD.pack(b"P", columns) + patches.tobytes()
    except InvalidImage as error:
        return json.dumps(Refusal(str(error.value), error.limit)).encode()
    except MemoryError:
        return json.dumps(Refusal("image", f"takes more than {MEMORY // 2**30} GiB of memory to decode")).encode()
    except Exception as error:  # a fault of jswa, or of its installation, which is no fault of the image
        return b"F" + f"{type(error).__name__}: {error!s:.1000}".encode(errors="replace")

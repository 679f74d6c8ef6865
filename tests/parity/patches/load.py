"""Images, and what transformers makes of them (`make.py`)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ARCHIVE = Path(__file__).with_name("patches.npz")
SAMPLES = 64  # numbers of a picture


class Drawn(NamedTuple):
    """An image by its size, and the most tokens that it may have."""

    width: int
    height: int
    most_tokens: int = 280


class Expected(NamedTuple):
    """What transformers makes of an image.

    Attributes:
        samples: numbers of its patches, at `sampled`.
        sha256: of its patches, as bytes.
    """

    columns: int
    rows: int
    tokens: int
    samples: NDArray[np.uint8]
    sha256: bytes


SHAPES = {
    "landscape": Drawn(640, 480),
    "portrait": Drawn(333, 777),
    "of its final size": Drawn(768, 768),
    "of one pixel": Drawn(1, 1),
    "30 to 1": Drawn(1_800, 60),
    "1 to 30": Drawn(40, 1_200, 70),
    "800 to 1": Drawn(2_400, 3),
    "1 to 800": Drawn(3, 2_400, 560),
    "few tokens": Drawn(500, 401, 140),
    "many tokens": Drawn(1_024, 700, 1_120),
}


def pixels(width: int, height: int) -> NDArray[np.uint8]:
    """Return an image with smooth and rough places, the same with any version of NumPy."""
    y, x = np.mgrid[:height, :width].astype(np.uint32)
    rough = ((x * 2_654_435_761 ^ y * 2_246_822_519) >> 13) & 255
    smooth = [x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)]
    third = (x // 24 + y // 24) % 3
    return np.stack([np.where(third == n, rough, plane) for n, plane in enumerate(smooth)], -1).astype(np.uint8)


def sampled(patches: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return some of the numbers of a picture's patches, among them the first and the last one."""
    found: NDArray[np.uint8] = patches.reshape(-1)[np.linspace(0, patches.size - 1, SAMPLES).astype(int)]
    return found


def expected() -> dict[str, Expected]:
    """Return what transformers makes of the images of `SHAPES`."""
    with np.load(ARCHIVE, allow_pickle=False) as data:
        return {
            name: Expected(columns, rows, tokens, samples, digest.tobytes())
            for name, (columns, rows, tokens), samples, digest in zip(
                SHAPES, data["shapes"].tolist(), data["samples"], data["sha256"], strict=True
            )
        }


def files() -> dict[str, tuple[bytes, NDArray[np.uint8]]]:
    """Return files of every mode, and transformers' RGB of each."""
    with np.load(ARCHIVE, allow_pickle=False) as data:
        names = [name.removeprefix("file ") for name in data.files if name.startswith("file ")]
        return {name: (data[f"file {name}"].tobytes(), data[f"rgb {name}"]) for name in names}

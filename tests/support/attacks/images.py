"""Files of images, and headers that lie about the size of theirs."""

import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image

from tests.parity.patches.load import pixels


def image_of(width: int, height: int) -> Image.Image:
    """Return an RGB image."""
    return Image.fromarray(pixels(width, height))


def file_of(image: Image.Image, form: str = "png", **options: Any) -> bytes:
    """Return an image as a file, as Pillow writes it."""
    image.save(file := BytesIO(), form, **options)
    return file.getvalue()


def lying(form: str, width: int, height: int) -> bytes:
    """Return the file of a small image whose header has another size."""
    data = bytearray(file_of(image_of(20, 10), form))
    if form == "png":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif form == "jpeg":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
    elif form == "gif":
        frame = data.index(b"\x2c\0\0\0\0" + struct.pack("<HH", 20, 10)) + 5  # the canvas holds its frames
        data[6:10] = data[frame : frame + 4] = struct.pack("<HH", width, height)
    elif form == "bmp":
        data[18:26] = struct.pack("<ii", width, height)
    else:
        assert form == "webp"
        data[26:30] = struct.pack("<HH", width, height)
    return bytes(data)


def moving(form: str, frames: int) -> bytes:
    """Return the file of an animation."""
    shown = [Image.new("RGB", (20, 10), (40 * n, 0, 0)) for n in range(frames)]
    return file_of(shown[0], form, save_all=True, append_images=shown[1:], duration=100)

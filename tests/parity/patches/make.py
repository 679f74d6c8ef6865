# mypy: disable-error-code="import-not-found"
"""Compute what transformers makes of images (`make parity`).

    python -m tests.parity.patches.make [--check]

`--check` writes nothing, and exits with status 1 if an array differs from the committed one.
"""

import hashlib
import sys
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.parity.patches.load import ARCHIVE, SHAPES, Drawn, pixels, sampled

SIZE = (21, 13)  # of the files
TURNED = 6  # EXIF's number


def main(arguments: list[str]) -> None:
    """Make all anew; see the module."""
    made = {**pictures(), **files()}
    if "--check" not in arguments:
        np.savez_compressed(ARCHIVE, **made)
        return
    with np.load(ARCHIVE, allow_pickle=False) as data:
        old = dict(data)
    wrong = [name for name in sorted({*old, *made}) if not np.array_equal(old.get(name, []), made.get(name, []))]
    print("\n".join(f"{name} differs" for name in wrong) or "all arrays equal the committed ones")
    if wrong:
        raise SystemExit(1)


def pictures() -> dict[str, Any]:
    """Return columns, rows and tokens of the drawn images, samples of their patches and a hash of all."""
    shapes, samples, hashes = zip(*(picture(drawn) for drawn in SHAPES.values()), strict=True)
    return {"shapes": np.array(shapes, np.int32), "samples": np.stack(samples), "sha256": np.stack(hashes)}


def picture(drawn: Drawn) -> tuple[tuple[int, int, int], Any, Any]:
    """Return what there is to know of one image."""
    image = Image.fromarray(pixels(drawn.width, drawn.height))
    found = Gemma4ImageProcessorPil(max_soft_tokens=drawn.most_tokens)(images=image)
    positions = np.asarray(found["image_position_ids"][0])
    count = int((positions[:, 0] >= 0).sum())
    columns, rows = (positions[:count].max(0) + 1).tolist()
    x, y = np.meshgrid(np.arange(columns), np.arange(rows))
    assert np.array_equal(positions[:count], np.stack([x, y], -1).reshape(-1, 2))
    values = np.asarray(found["pixel_values"][0][:count], np.float64) * 255
    patches = np.rint(values).astype(np.uint8)
    assert np.abs(values - patches).max() < 1e-4
    digest = hashlib.sha256(patches.tobytes()).digest()
    return (
        (columns, rows, int(found["num_soft_tokens_per_image"][0])), sampled(patches), np.frombuffer(digest, np.uint8),
    )  # fmt: skip


def files() -> dict[str, Any]:
    """Return files of every mode, and the RGB of each."""
    colours = Image.fromarray(pixels(*SIZE))
    grey = colours.convert("L")
    alpha = Image.fromarray(pixels(*SIZE[::-1])[..., 0].T.copy())
    clear = colours.copy()
    clear.putalpha(alpha)
    pale = grey.copy()
    pale.putalpha(alpha)
    deep = Image.fromarray((np.asarray(grey).astype(np.int32) * 257 - 128).clip(0).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = TURNED
    palette = colours.quantize(16)
    see_through = clear.quantize(16)
    written: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "1 png": (colours.convert("1"), {}),
        "L png": (grey, {}),
        "LA png": (pale, {}),
        "I;16 png": (deep, {}),
        "P png": (palette, {}),
        "P png, one colour transparent": (palette, {"transparency": 3}),
        "P png, alpha for each colour": (see_through, {}),
        "L png, one grey transparent": (grey, {"transparency": int(np.asarray(grey)[3, 4])}),
        "RGB png, one colour transparent": (colours, {"transparency": tuple(np.asarray(colours)[3, 4].tolist())}),
        "RGBA png": (clear, {}),
        "RGBA png, turned": (clear, {"exif": exif}),
        "P gif": (palette, {}),
        "P gif, one colour transparent": (palette, {"transparency": 3}),
        "L jpeg": (grey, {}),
        "RGB jpeg": (colours, {}),
        "RGB jpeg, turned": (colours, {"exif": exif}),
        "CMYK jpeg": (colours.convert("CMYK"), {}),
        "RGB webp": (colours, {"lossless": True}),
        "RGBA webp": (clear, {"lossless": True, "exact": True}),
        "RGB bmp": (colours, {}),
        "P bmp": (palette, {}),
        "1 bmp": (colours.convert("1"), {}),
    }
    found: dict[str, Any] = {}
    for name, (image, options) in written.items():
        kind = name.partition(",")[0].split()[-1]
        image.save(file := BytesIO(), kind, **options)
        read = Image.open(BytesIO(file.getvalue()))
        found[f"file {name}"] = np.frombuffer(file.getvalue(), np.uint8)
        found[f"rgb {name}"] = convert_to_rgb(ImageOps.exif_transpose(read), return_numpy=True)
        print(f"{name:35s} is read as {read.mode}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

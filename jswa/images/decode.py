"""Decode images that strangers have sent. Pillow does it; limits hold before it decodes a pixel.

Pillow (extra `images`) is imported when it is first needed. Of its readers, those of five formats are used.
"""

from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from jswa.errors import ConfigError, InvalidImage, install

if TYPE_CHECKING:
    from PIL import Image, ImageFile


class Limits(NamedTuple):
    """What an image may cost. Of the most pixels, decoding takes up to 1.7 GB and 4 s of the processor.

    Attributes:
        most_bytes: of the file.
        most_pixels: of the decoded image.
        most_side: pixels of its width or height. To resize a longer side takes more memory than the image.
    """

    most_bytes: int = 20 * 2**20
    most_pixels: int = 2**26
    most_side: int = 2**16


LIMITS = Limits()


def require_pillow() -> None:
    """Raise ConfigError unless Pillow is installed."""
    _readers()


def decode(data: bytes, field: str, limits: Limits = LIMITS) -> "Image.Image":
    """Return the image of a JPEG, PNG, WebP, GIF or BMP file, in RGB, the right way up.

    EXIF's orientation is applied, as transformers' `load_image` does. What is transparent becomes white, as by
    transformers' `convert_to_rgb`; `load_image` would show the colours behind it.

    Raises InvalidImage, which names `field`; MemoryError; and ConfigError if Pillow is not installed.
    """
    if len(data) > limits.most_bytes:
        raise InvalidImage(field, f"{len(data)} bytes", f"must have at most {limits.most_bytes} bytes")
    for reader in _readers():
        if reader.accepts(data):
            return _decoded(reader, data, field, limits)
    raise InvalidImage(field, f"{len(data)} bytes", "must be a JPEG, PNG, WebP, GIF or BMP image")


class _Reader(NamedTuple):
    """Reads the files that have `mark` at `place`."""

    opens: "type[ImageFile.ImageFile]"
    mark: bytes
    place: int = 0

    def accepts(self, data: bytes) -> bool:
        """Whether a file has the mark."""
        return data.startswith(self.mark, self.place)


def _readers() -> tuple[_Reader, ...]:
    try:
        from PIL.BmpImagePlugin import BmpImageFile
        from PIL.GifImagePlugin import GifImageFile
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
        from PIL.WebPImagePlugin import WebPImageFile
    except ImportError as error:
        raise ConfigError("images", str(error), f"need Pillow: {install('images')}") from error
    return (
        _Reader(JpegImageFile, b"\xff\xd8\xff"),  # of several pictures in one file, as of two lenses, the first one
        _Reader(PngImageFile, b"\x89PNG\r\n\x1a\n"),
        _Reader(WebPImageFile, b"WEBP", 8),
        _Reader(GifImageFile, b"GIF8"),
        _Reader(BmpImageFile, b"BM"),
    )


def _decoded(reader: _Reader, data: bytes, field: str, limits: Limits) -> "Image.Image":
    from PIL import Image, ImageOps

    name = reader.opens.format
    try:
        image = reader.opens(BytesIO(data))
        _check(image, field, limits)
        ImageOps.exif_transpose(image, in_place=True)
        return in_rgb(image)
    except (InvalidImage, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidImage(field, name, f"must have at most {limits.most_pixels} pixels") from error
    except Exception as error:  # of many kinds: whatever Pillow trips over is the file's fault
        reason = f"{error!s:.200}" or type(error).__name__
        raise InvalidImage(field, name, f"cannot be decoded: {reason}") from error


def _check(image: "ImageFile.ImageFile", field: str, limits: Limits) -> None:
    """Raise InvalidImage if an image of which the header has been read exceeds a limit, or moves."""
    width, height = image.size
    shown = f"{image.format} of {width} x {height} pixels"
    if width < 1 or height < 1:
        raise InvalidImage(field, shown, "must have a pixel")
    if width * height > limits.most_pixels:
        raise InvalidImage(field, shown, f"must have at most {limits.most_pixels} pixels")
    if max(width, height) > limits.most_side:
        raise InvalidImage(field, shown, f"must have at most {limits.most_side} pixels each way")
    if getattr(image, "is_animated", False):
        raise InvalidImage(field, shown, "must not be animated: send its frames as images")


def in_rgb(image: "Image.Image") -> "Image.Image":
    """Return an image of Pillow in RGB, on white where it is transparent."""
    if image.has_transparency_data:
        from PIL import Image

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")

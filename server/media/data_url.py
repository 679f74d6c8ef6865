"""Read the file of an image from a data: URL."""

import binascii
import re
from collections.abc import Iterator

from ..core.off_loop import Run, gathered
from ..http.errors import invalid

_HEAD = re.compile(r"data:image/[a-z0-9][a-z0-9.+-]{0,63};base64,", re.IGNORECASE)
_LONGEST_HEAD = 128
_PIECE = 2**16  # characters that are decoded in one call, which holds Python's lock; a multiple of 4


def is_data(url: str) -> bool:
    """Return whether a URL contains its file."""
    return url[:5].lower() == "data:"


def size_of(url: str, field: str, most: int) -> int:
    """Return how many bytes the file of a data: URL may have. Raises ApiError if it is not the URL of an image.

    Args:
        most: bytes of the file.
    """
    size = (len(url) - _start(url, field)) * 3 // 4
    if size > most + 2:  # the last four characters stand for one byte at least
        raise invalid(field, f"has {size} bytes: must have at most {most} (--max-image-size)")
    return size


async def read(url: str, field: str, run: Run) -> bytes:
    """Return the file of a data: URL. Raises ApiError if its base64 is wrong.

    Args:
        run: runs long work in a thread.
    """
    start = _start(url, field)
    try:
        return b"".join(await gathered(_decoded(url, start), len(url), run))
    except ValueError as error:  # binascii's errors are ValueErrors
        raise invalid(field, f"its base64 is wrong: {error}") from None


def _start(url: str, field: str) -> int:
    """Return where the base64 begins. Raises ApiError."""
    head = _HEAD.match(url, 0, _LONGEST_HEAD)
    if head is None:
        raise invalid(field, 'must begin with "data:image/TYPE;base64,"')
    return head.end()


def _decoded(url: str, start: int) -> Iterator[bytes]:
    """Yield the file in pieces. Raises ValueError."""
    padded = url.find("=", start)
    if 0 <= padded < len(url) - 2:
        raise ValueError("a = is not at its end")
    for at in range(start, len(url), _PIECE):
        yield binascii.a2b_base64(url[at : at + _PIECE].encode("ascii"), strict_mode=True)

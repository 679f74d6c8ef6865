"""Files in data: URLs."""

import asyncio
import base64
import os

import pytest

from server.http.errors import ApiError
from server.media import data_url

HEAD = "data:image/png;base64,"


def read(url: str) -> bytes:
    """The file of a URL."""
    return asyncio.run(data_url.read(url, "field", asyncio.to_thread))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 49_151, 49_152, 49_153, 300_000])
def test_files_of_all_lengths(size: int) -> None:
    """49,152 bytes are a piece."""
    file = os.urandom(size)
    url = HEAD + base64.b64encode(file).decode()
    assert read(url) == file
    assert size <= data_url.size_of(url, "field", size) <= size + 2


def test_a_file_that_is_too_large_is_not_decoded() -> None:
    with pytest.raises(ApiError, match="has 303 bytes: must have at most 300"):
        data_url.size_of(HEAD + "A" * 404, "field", 300)


@pytest.mark.parametrize("wrong", ["=", "==", "A", "AA", "A===", "AA==AAAA", "AAAA====", "AA\n=", "A-_A", "AAA=\n"])
@pytest.mark.parametrize("before", [0, 65_536])
def test_base64_is_strict(wrong: str, before: int) -> None:
    with pytest.raises(ApiError, match="field: its base64 is wrong"):
        read(HEAD + "A" * before + wrong)


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64", "data:image/png,", "data:image/png;charset=x;base64,", "data:image/;base64,",
     "data:text/plain;base64,", "data:image/png;base64 ,", f"data:image/{'a' * 200};base64,"],
)  # fmt: skip
def test_heads_that_are_refused(head: str) -> None:
    with pytest.raises(ApiError, match="must begin with"):
        data_url.size_of(head + "AAAA", "field", 100)


def test_the_case_of_a_head_does_not_matter() -> None:
    assert data_url.is_data("DATA:Image/PNG;Base64,AAAA")
    assert read("DATA:Image/PNG;Base64,AAAA") == b"\0\0\0"

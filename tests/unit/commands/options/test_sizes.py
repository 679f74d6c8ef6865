"""Numbers of tokens and bytes with units."""

import pytest

from jswa.commands.options.sizes import bytes_in, tokens_in


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25_600),
        ("1.5K", 1536),
        ("1m", 10**6),
        ("1M", 2**20),
    ],
)
def test_tokens_are_read_as_vllm_reads_them(text: str, number: int) -> None:
    """Lower case is decimal, upper case binary."""
    assert tokens_in(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("1000", 1000), ("7B", 7), ("64G", 64 * 2**30), ("64GiB", 64 * 2**30), ("64GB", 64 * 10**9),
        ("64g", 64 * 10**9), ("1.5GiB", 3 * 2**29), ("1.5G", 3 * 2**29), ("2T", 2**41), ("4KiB", 4096), ("4kB", 4000),
    ],
)  # fmt: skip
def test_bytes_have_the_usual_units(text: str, number: int) -> None:
    assert bytes_in(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1e9", " 5", "8kk", "8 k", "0.5", "1.0001k", "8P", "9" * 40, "٣"])
def test_other_texts_are_refused(text: str) -> None:
    for read in (tokens_in, bytes_in):
        with pytest.raises(ValueError, match=r"must be a whole number|is no whole number"):
            read(text)


@pytest.mark.parametrize("text", ["8kB", "8KiB", "8B"])
def test_tokens_are_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="8k or 32K"):
        tokens_in(text)

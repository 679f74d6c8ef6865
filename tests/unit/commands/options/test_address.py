"""Addresses of servers with and without /v1."""

import pytest

from jswa.commands.options.address import api_address


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://host/behind/proxy", "https://host/behind/proxy/v1"),
        ("https://v2.host", "https://v2.host/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
        ("https://host/v1beta/openai/", "https://host/v1beta/openai"),
    ],
)
def test_the_version_is_added_where_it_is_left_out(given: str, found: str) -> None:
    assert api_address(given) == found

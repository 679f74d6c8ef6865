"""A server that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.support.server.harness import Client, serving


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    """A server with a fake engine and a chat template."""
    with serving(template="{% for m in messages %}{{ m.content }}{% endfor %}") as client:
        yield client

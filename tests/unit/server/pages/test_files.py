"""The files of the pages: served without a key, strict about what they may load, compressed, and not at all if off."""

import re
from collections.abc import Iterator

import pytest

from server.pages.files import PAGES
from tests.support.server.harness import Client, serving


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server with keys."""
    with serving(api_key=("secret",)) as found:
        yield found


@pytest.mark.parametrize("path", PAGES)
def test_every_file_needs_no_key_and_forbids_what_it_does_not_need(client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-encoding"] == "gzip"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    again = client.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(path, headers={"Accept-Encoding": "identity"}).text == response.text
    assert client.http.head(path).status_code == 200
    assert client.post(path, {}).status_code == 405


@pytest.mark.parametrize("path", PAGES)
def test_no_file_names_another_address_or_makes_html(client: Client, path: str) -> None:
    text = client.get(path).text
    assert not re.findall(r"https?://(?!www\.w3\.org)[\w.]+", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|style=\"", text)


def test_only_listed_files_are_served(client: Client) -> None:
    for path in ("/pages/chat.html", "/pages/", "/pages/../files.py", "/pages/%2e%2e/files.py"):
        assert client.get(path).status_code == 401, "as any route that is not there"


def test_the_pages_can_be_switched_off() -> None:
    with serving(pages=False) as client:
        assert {client.get(path).status_code for path in PAGES} == {404}


def test_other_hosts_names_are_refused() -> None:
    with serving() as client:
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403

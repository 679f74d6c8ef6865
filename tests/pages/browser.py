"""A browser for the tests of the pages: Debian's Chromium, or the one that CHROMIUM names."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.server.processes import Process, started

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
PHONE = {"viewport": {"width": 390, "height": 760}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
_SIZE = {"width": 1100, "height": 760}
expect.set_options(timeout=20_000)


class View(NamedTuple):
    """A page of a browser. `requests`: the addresses that it has asked for; `said`: messages of its console."""

    page: Page
    requests: list[str]
    said: list[str]

    def open(self, address: str) -> None:
        """Go to an address."""
        self.page.goto(address)

    def ask(self, text: str) -> None:
        """Write into the message field and send."""
        self.page.locator("#input").fill(text)
        self.page.locator("#input").press("Enter")

    def answered(self, number: int) -> None:
        """Wait until so many answers are there as a whole."""
        expect(self.page.locator(".message.assistant .stats")).to_have_count(number)

    def shot(self, name: str) -> None:
        """Write a picture for the documentation."""
        PICTURES.mkdir(exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start the browser."""
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        started_one = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started_one
        started_one.close()


@contextmanager
def view(of: Browser, **options: Any) -> Iterator[View]:
    """Open a window with storage of its own. Its page must have thrown nothing by the end."""
    context = of.new_context(**{"viewport": _SIZE, "reduced_motion": "reduce", **options})
    page = context.new_page()
    requests: list[str] = []
    said: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield View(page, requests, said)
    context.close()
    assert not errors


def scripted(**options: Any) -> AbstractContextManager[Process]:
    """Start a server whose model writes a script."""
    return started(["-m", "tests.pages.scripted_server", json.dumps(options)])


def tiny(*options: str) -> AbstractContextManager[Process]:
    """Start `jswa serve tiny`."""
    return started(["-m", "jswa", "serve", "tiny", "--port", "0", *options])

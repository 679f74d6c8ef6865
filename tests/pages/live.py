"""The view of the KV cache at /live, in a browser: on `jswa serve tiny`, under load, on a plan file: `make pages`."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Browser, expect

from tests.pages.browser import PHONE, View, browser, scripted, tiny, view
from tests.support.server.processes import ROOT, started

ADMIN = "admin"
PLAN = """
import jswa
llm = jswa.LLM("tiny", max_num_seqs=6, max_model_len=2048, kv_cache_memory_bytes=8_000_000)
texts = [f"Tell me a story about a {name} named Max." for name in ("fox", "girl", "bear", "dog", "bird", "frog")]
llm.generate(texts * 2, temperature=0, max_tokens=200, ignore_eos=True)
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


def watch(one: View, url: str) -> None:
    one.open(f"{url}/live")
    one.page.locator("[name=key]").fill(ADMIN)
    one.page.locator("[name=key]").press("Enter")
    expect(one.page.locator("#status")).to_have_text("live")


def figure(one: View, name: str) -> int:
    """Return a number of the legend."""
    text = one.page.locator("#legend .key", has_text=name).first.inner_text()
    return int(text.rpartition(" ")[2].replace(",", ""))


def test_rows_slide_and_their_pages_stay_in_the_cache(chromium: Browser) -> None:
    sizes = ("--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "20000000")
    with tiny("--admin-api-key", ADMIN, *sizes) as process, view(chromium, color_scheme="light") as one:
        watch(one, process.url)
        page = one.page
        expect(page.locator("#rows-size")).to_contain_text("0 of 8")
        body = {"prompt": "One day a fox named Max went to the forest.", "max_tokens": 1900, "n": 6, "ignore_eos": True}
        thread = threading.Thread(target=lambda: httpx2.post(f"{process.url}/v1/completions", json=body, timeout=300))
        thread.start()
        expect(page.locator("#rows-size")).to_contain_text("6 of 8")
        expect(page.locator("#legend")).to_contain_text("local, in windows of rows")
        page.wait_for_timeout(1000)
        before = figure(one, "local, in windows")
        page.locator("#full-kv").check()
        expect(page.locator("#full-kv-text")).to_contain_text("With full KV the same text takes")
        one.shot("live")
        page.wait_for_timeout(700)
        assert abs(figure(one, "local, in windows") - before) <= before / 2, "windows grow no further"
        thread.join()
        expect(page.locator("#rows-size")).to_contain_text("0 of 8")
        expect(page.locator("#tree-size")).not_to_have_text("0 edges, 0 windows")
        assert figure(one, "full, cached") > 0


def test_a_large_arena_stays_fluid(chromium: Browser) -> None:
    with started(["-m", "tests.pages.load_server"]) as process, view(chromium) as one:
        watch(one, process.url)
        expect(one.page.locator("#rows-size")).to_have_text("1,400 of 1,400, 8 a line")
        frames = one.page.evaluate(
            """async () => {
                const gaps = [];
                let last = performance.now();
                const end = last + 5000;
                while (last < end) {
                    await new Promise(requestAnimationFrame);
                    const now = performance.now();
                    gaps.push(now - last);
                    last = now;
                }
                gaps.sort((a, b) => a - b);
                const late = gaps[Math.floor(gaps.length * 0.95)];
                return { frames: gaps.length, median: gaps[gaps.length >> 1], late };
            }"""
        )
        print(frames)
        assert frames["frames"] >= 60, "at least twelve frames a second, on a machine without a GPU"
        one.shot("live-large")


def test_a_lost_server_is_joined_again_and_a_wrong_key_is_named(chromium: Browser) -> None:
    with started(["-m", "tests.pages.load_server"]) as process, view(chromium) as one:
        one.open(f"{process.url}/live")
        expect(one.page.locator("#key-why")).to_have_text("Enter the admin key.")
        expect(one.page.locator("#key-dialog")).to_contain_text("--admin-api-key")
        expect(one.page.locator("#cache")).to_be_hidden()
        one.page.locator("[name=key]").fill("wrong")
        one.page.locator("[name=key]").press("Enter")
        expect(one.page.locator("#key-why")).to_have_text("This is not the admin key.")
        one.page.locator("[name=key]").fill(ADMIN)
        one.page.locator("[name=key]").press("Enter")
        expect(one.page.locator("#status")).to_have_text("live")
        process.process.kill()
        expect(one.page.locator("#status")).to_contain_text("broke off")


def test_a_server_without_admin_key_says_how_to_give_it_one(chromium: Browser) -> None:
    with scripted() as process, view(chromium) as one:
        one.open(f"{process.url}/live")
        expect(one.page.locator("#status")).to_contain_text("jswa serve MODEL --admin-api-key KEY")
        expect(one.page.locator("#key-dialog")).to_be_hidden()


def test_a_phone_has_a_line_for_the_title_and_the_chat_is_one_tap_away(chromium: Browser) -> None:
    with started(["-m", "tests.pages.load_server"]) as process, view(chromium, **PHONE) as one:
        watch(one, process.url)
        page = one.page
        expect(page.locator("#title")).to_have_text("KV cache of load")
        expect(page).to_have_title("KV cache – load – jswa")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        for selector in ("header strong", "#status", "#pause", "#key-button"):
            assert page.locator(selector).bounding_box()["height"] < 40, f"{selector} has one line"
        title = page.locator("header strong")
        assert title.evaluate("(node) => node.scrollWidth <= node.clientWidth"), "the title is not cut"
        page.get_by_role("link", name="jswa").tap()
        expect(page.locator("#model")).to_be_visible()


def test_a_plan_file_plays_without_events(chromium: Browser, tmp_path: Path) -> None:
    plans = tmp_path / "plans.jsonl"
    environ = {**os.environ, "JSWA_DUMP_PLANS": str(plans)}
    subprocess.run([sys.executable, "-c", PLAN], cwd=ROOT, check=True, env=environ)
    with started(["-m", "tests.pages.load_server"]) as process, view(chromium) as one:
        one.open(f"{process.url}/live")
        one.page.keyboard.press("Escape")
        one.page.locator("#file").set_input_files(plans)
        expect(one.page.locator("#status")).to_contain_text("plans.jsonl")
        expect(one.page.locator("#play")).to_have_text("Stop")
        one.page.locator("#speed").fill("60")
        expect(one.page.locator("#rows-size")).to_contain_text("6 of 6")
        one.page.locator("#play").click()
        one.page.locator("#at").fill("150")
        expect(one.page.locator("#step")).to_contain_text("step 150 of")
        local = figure(one, "local, in windows")
        assert 0 < local <= 6 * 5 * 16, "windows of six rows"
        one.shot("live-plan")


def test_evicted_pages_move_to_host_memory(chromium: Browser) -> None:
    sizes = ("--max-model-len", "512", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "2000000")
    memory = ("--host-kv-bytes", "8000000")
    with tiny("--admin-api-key", ADMIN, *sizes, *memory) as process, view(chromium, color_scheme="light") as one:
        watch(one, process.url)
        expect(one.page.locator("#host-legend")).to_have_text(re.compile(r"^free [\d,]+$"))
        for number in range(8):
            body = {"prompt": f"One day {number} " * 40, "max_tokens": 100, "ignore_eos": True}
            httpx2.post(f"{process.url}/v1/completions", json=body, timeout=300)
        expect(one.page.locator("#host-legend")).to_contain_text("full, cached")
        expect(one.page.locator("#host-legend")).to_contain_text("local, kept windows")
        one.shot("live-host")

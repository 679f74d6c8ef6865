"""The chat at /, in a browser, on `jswa serve tiny` and on a model that writes a script: `make pages`."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, expect

from tests.pages.browser import PHONE, View, browser, scripted, tiny, view
from tests.support.server.harness import until
from tests.support.server.pictures import file_of

MOST_REQUESTS = 9
MOST_BYTES = 24_000  # of all files, compressed
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted() as process:
        yield process.url


@pytest.fixture
def chat(chromium: Browser, url: str) -> Iterator[View]:
    with view(chromium) as found:
        found.open(url)
        yield found


def of_server(url: str, path: str) -> Any:
    return httpx2.get(url + path).json()


def test_the_page_is_small_and_loads_nothing_from_elsewhere(chromium: Browser, url: str) -> None:
    with view(chromium) as found:
        sizes: dict[str, int] = {}
        found.page.on("requestfinished", lambda one: sizes.update({one.url: one.sizes()["responseBodySize"]}))
        found.open(url)
        expect(found.page.locator("#model option")).to_have_text(["scripted"])
        found.page.wait_for_load_state("networkidle")
        assert all(one.startswith((url, "data:")) for one in found.requests)
        asked = ("data:", f"{url}/v1/", f"{url}/server_info")
        files = [one for one in found.requests if not one.startswith(asked)]
        size = sum(sizes[one] for one in files)
        print(f"{len(files)} requests, {size} bytes")
        assert len(files) <= MOST_REQUESTS
        assert size <= MOST_BYTES
        assert found.said == []


def test_tiny_answers_its_examples_and_says_what_they_cost(chromium: Browser) -> None:
    with tiny() as process, view(chromium, color_scheme="light") as chat:
        page = chat.page
        chat.open(process.url)
        examples = page.locator(".examples button")
        expect(examples).to_have_text(of_server(process.url, "/server_info")["chat"]["examples"])
        expect(page.locator(".empty .model")).to_have_text("tiny · context of 4,096 tokens")
        chat.shot("chat-empty")
        page.get_by_role("button", name="Write a JSON record").click()
        expect(page.locator(".message.assistant .bubble")).to_have_text('{"name": "Rosa", "age": 7, "town": "Paris"}')
        page.keyboard.press("Alt+n")
        page.get_by_role("button", name="Hello! My name is Bruno.").click()
        expect(page.locator(".message.assistant .bubble")).to_have_text("Nice to meet you, Bruno!")
        chat.ask("What is my name?")
        chat.answered(2)
        for line in page.locator(".stats summary").all_inner_texts():
            assert re.fullmatch(r"[\d.,]+ tokens/s · [\d.]+ m?s", line)
        first, second = page.locator(".stats").all()
        expect(first).to_contain_text("computed: new text")
        expect(second.get_by_text("from the cache")).to_be_hidden()
        second.locator("summary").click()
        cached = re.match(r"([\d,]+) of [\d,]+ prompt tokens", second.get_by_text("from the cache").inner_text())
        assert cached is not None
        assert int(cached[1]) > 0
        chat.ask("Tell me a story about a fox named Max.")
        chat.answered(3)
        chat.shot("chat")


def test_other_models_have_general_examples_and_one_click_asks(chat: View) -> None:
    page = chat.page
    expect(page.locator(".examples button")).to_have_count(3)
    question = page.locator(".examples button").first.inner_text()
    page.locator(".examples button").first.click()
    expect(page.locator(".message.user .bubble")).to_have_text(question)
    chat.answered(1)
    assert page.locator(".examples").count() == 0


def test_titles_name_the_conversation_and_the_model(chat: View) -> None:
    page = chat.page
    expect(page).to_have_title("scripted – jswa")
    chat.ask("  one\n two " + "three " * 20)
    title = "one two" + " three" * 8 + "…"
    expect(page).to_have_title(f"{title} – scripted – jswa")
    expect(page.locator(".chat-item .open")).to_have_text(title)
    page.on("dialog", lambda dialog: dialog.accept("my own"))
    page.get_by_role("button", name="Rename").click()
    expect(page).to_have_title("my own – scripted – jswa")
    page.keyboard.press("Alt+n")
    expect(page).to_have_title("scripted – jswa")


def test_a_refused_message_is_not_sent_again(chat: View) -> None:
    page = chat.page
    chat.ask("hello")
    chat.answered(1)
    chat.ask("word " * 5000)
    expect(page.locator(".message .error").last).to_contain_text("maximum context length")
    expect(page.locator(".message .note").last).to_contain_text("is sent without this one")
    expect(page.locator(".message.out")).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as sent:
        chat.ask("again")
    assert [one["content"] for one in sent.value.post_data_json["messages"]] == ["hello", "You said: hello", "again"]
    chat.answered(2)
    expect(page.locator(".message.assistant .bubble").last).to_have_text("You said: again")
    page.get_by_role("button", name="Edit the message without an answer").click()
    page.locator(".edit textarea").fill("shorter")
    page.locator(".edit textarea").press("Enter")
    expect(page.locator(".message.assistant .bubble").last).to_have_text("You said: shorter")
    expect(page.locator(".message.out")).to_have_count(0)


def test_buttons_stand_below_their_text_and_titles_have_the_whole_line(chat: View) -> None:
    page = chat.page
    chat.ask("a conversation whose title is longer than the side has room for")
    chat.answered(1)
    left = """(selector) => {
        const range = document.createRange();
        range.selectNodeContents(document.querySelector(selector));
        return range.getBoundingClientRect().left;
    }"""
    text = page.evaluate(left, ".message.assistant .bubble")
    assert abs(page.evaluate(left, ".message.assistant .bar button") - text) < 1
    right = "(selector) => document.querySelector(selector).getBoundingClientRect().right"
    assert page.evaluate(right, ".chat-item .open") == page.evaluate(right, ".chat-item")
    page.locator(".chat-item").hover()
    expect(page.locator(".chat-item .tools")).to_have_css("opacity", "1")


def test_text_streams_and_stop_ends_the_request(chat: View, url: str) -> None:
    chat.ask("long")
    text = chat.page.locator(".message.assistant .bubble")
    expect(text).to_contain_text("word3 ")
    assert "word399" not in text.inner_text()
    expect(chat.page.locator("#send")).to_have_text("Stop")
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator(".stats")).to_contain_text("stopped")
    until(lambda: of_server(url, "/server_info")["load"]["requests"] == 0)
    so_far = text.inner_text()
    assert so_far.startswith("word0 word1")
    chat.page.reload()
    expect(text).to_have_text(so_far)


def test_edits_and_retries_are_branches(chat: View) -> None:
    page = chat.page
    chat.ask("first")
    chat.answered(1)
    expect(page.locator(".message.assistant .bubble")).to_have_text("You said: first")
    page.locator("#input").press("ArrowUp")
    page.locator(".edit textarea").fill("second")
    page.locator(".edit textarea").press("Enter")
    expect(page.locator(".message.assistant .bubble")).to_have_text("You said: second")
    chat.answered(1)
    expect(page.locator(".message.user .branch")).to_have_text("2/2")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant .branch")).to_have_text("2/2")
    chat.answered(1)
    page.locator(".message.user").get_by_role("button", name="Previous branch").click()
    expect(page.locator(".message.assistant .bubble")).to_have_text("You said: first")
    page.reload()
    expect(page.locator(".message.user .branch")).to_have_text("1/2")
    expect(page.locator(".message.assistant .bubble")).to_have_text("You said: first")


def test_pictures_go_with_a_message_if_the_model_reads_images(chat: View, chromium: Browser) -> None:
    expect(chat.page.locator("#picture")).to_be_hidden()
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": file_of(200)}
    other = {"name": "b.png", "mimeType": "image/png", "buffer": b"no picture"}
    with scripted(sees=True) as process, view(chromium) as seeing:
        page = seeing.page
        seeing.open(process.url)
        expect(page.locator("#picture")).to_be_visible()
        page.locator("#files").set_input_files([picture, other])
        expect(page.get_by_text("b.png is no picture that this browser reads.")).to_be_visible()
        page.get_by_role("button", name="Remove this picture").click()
        expect(page.locator("#pictures img")).to_have_count(0)
        page.locator("#files").set_input_files([picture])
        expect(page.locator("#pictures img")).to_have_count(1)
        with page.expect_request("**/v1/chat/completions") as sent:
            seeing.ask("What is this?")
        image, text = sent.value.post_data_json["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert text == {"type": "text", "text": "What is this?"}
        expect(page.locator(".message.user img")).to_have_count(1)
        expect(page.locator("#pictures img")).to_have_count(0)
        seeing.answered(1)


def test_conversations_stay_in_the_browser(chat: View) -> None:
    page = chat.page
    chat.ask("one")
    chat.answered(1)
    page.keyboard.press("Alt+n")
    expect(page.locator(".empty")).to_be_visible()
    chat.ask("two")
    chat.answered(1)
    expect(page.locator(".chat-item .open")).to_have_text(["two", "one"])
    page.get_by_role("button", name="one", exact=True).click()
    expect(page.locator(".message.user .bubble")).to_have_text("one")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete two").click()
    expect(page.locator(".chat-item .open")).to_have_text(["one"])


def test_markdown_never_becomes_html(chat: View) -> None:
    page = chat.page
    chat.ask("markdown")
    chat.answered(1)
    answer = page.locator(".message.assistant .bubble")
    for selector in (
        "h1",
        "em",
        "strong",
        "del",
        "ul ul li em",
        "ol[start='3']",
        "table td.to-right",
        "blockquote strong",
    ):
        assert answer.locator(selector).count() > 0, selector
    assert answer.locator("script, img, iframe, b, [onerror]").count() == 0
    assert answer.locator("a").evaluate_all("links => links.map((link) => link.href)") == [
        "https://example.com/a_(b)",
        "https://example.com/p.png",
        "https://example.com/",
    ]
    for text in (
        "<img src=x onerror=",
        "<script>document.title",
        '<script>alert("code stays text")</script>',
        "2 * 3 * 4",
    ):
        expect(answer).to_contain_text(text)
    assert page.title() == "markdown – scripted – jswa"
    reasoning = page.locator("details.reasoning")
    expect(reasoning.locator("div")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator("div")).to_have_text("They ask for something.")
    assert chat.said == []


def test_calls_are_shown_and_take_results(chat: View) -> None:
    page = chat.page
    page.keyboard.press("Alt+p")
    page.locator("[name=tools]").fill("[")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings-error")).to_contain_text("Tools")
    page.locator("[name=tools]").fill(json.dumps(TOOLS))
    page.locator("[name=temperature]").fill("0")
    page.get_by_role("button", name="Save").click()
    chat.ask("weather")
    expect(page.locator(".call .name")).to_have_text("weather")
    expect(page.locator(".call pre")).to_contain_text('"city": "Oslo"')
    page.locator(".call textarea").fill("rain")
    page.get_by_role("button", name="Send result").click()
    expect(page.locator(".message.tool .bubble")).to_have_text("rain")
    expect(page.locator(".message.assistant .bubble").last).to_have_text("It rains in Oslo.")


def test_parameters_reach_the_server(chat: View) -> None:
    page = chat.page
    page.get_by_role("button", name="Settings").click()
    assert page.locator("[name=temperature]").get_attribute("placeholder") == "0.7"
    assert page.locator("[name=max_tokens]").get_attribute("placeholder") == "no limit"
    efforts = page.locator("select[name=reasoning_effort]")
    expect(efforts.locator("option")).to_have_text(["default", "low", "high"])
    efforts.select_option("low")
    page.locator("[name=system]").fill("Be brief.")
    page.locator("[name=max_tokens]").fill("40")
    page.locator("[name=other]").fill('{"min_tokens": 2}')
    page.get_by_role("button", name="Save").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        chat.ask("hello")
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (body["max_tokens"], body["min_tokens"], "temperature" in body) == (40, 2, False)
    assert body["reasoning_effort"] == "low"
    expect(page.locator(".stats")).to_contain_text("ended by max_tokens")


def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: Browser) -> None:
    with scripted(api_key=["secret"]) as process, view(chromium) as chat:
        page = chat.page
        chat.open(process.url)
        expect(page.locator("#key-why")).to_contain_text("The server asks for an API key.")
        page.locator("[name=key]").fill("wrong")
        page.locator("[name=key]").press("Enter")
        expect(page.locator("#key-why")).to_contain_text("The server does not know this key.")
        page.locator("[name=key]").fill("secret")
        page.locator("[name=key]").press("Enter")
        expect(page.locator("#model option")).to_have_text(["scripted"])
        chat.ask("hello")
        chat.answered(1)
        page.reload()
        expect(page.locator("#model option")).to_have_text(["scripted"])
        assert "secret" not in page.evaluate("() => JSON.stringify(localStorage)")
        page.locator("#key-button").click()
        page.locator("[name=keep]").check()
        page.locator("#key-dialog").get_by_role("button", name="Save").click()
        assert "secret" in page.evaluate("() => JSON.stringify(localStorage)")


def test_a_broken_server_is_named_and_a_retry_goes_on(chromium: Browser) -> None:
    with view(chromium) as chat:
        page = chat.page
        with scripted(port=0) as process:
            chat.open(process.url)
            port = int(process.url.rpartition(":")[2])
            chat.ask("long")
            expect(page.locator(".message.assistant .bubble")).to_contain_text("word3 ")
            process.process.kill()
            expect(page.locator(".message .error")).to_contain_text("broke off")
            expect(page.locator(".message.assistant .bubble")).to_contain_text("word3 ")
            chat.ask("hello")
            expect(page.locator(".message .error").last).to_contain_text("does not answer")
        with scripted(port=port):
            page.get_by_role("button", name="Answer again").last.click()
            expect(page.locator(".message.assistant .bubble").last).to_have_text("You said: hello")


def test_a_phone_has_room_for_all(chromium: Browser, url: str) -> None:
    with view(chromium, **PHONE) as chat:
        page = chat.page
        chat.open(url)
        chat.ask("markdown")
        chat.answered(1)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        expect(page.locator("#side")).to_be_hidden()
        page.locator("#menu").tap()
        expect(page.locator("#new")).to_be_visible()
        expect(page.locator(".chat-item .tools")).to_have_css("opacity", "1")
        page.locator(".chat-item .open").first.tap()
        expect(page.locator("#side")).to_be_hidden()
        chat.shot("chat-phone")


def test_dark_is_as_the_system_or_as_chosen(chromium: Browser, url: str) -> None:
    with view(chromium, color_scheme="dark") as chat:
        page = chat.page
        chat.open(url)
        back = "() => getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(back) == "rgb(22, 24, 29)"
        chat.ask("markdown")
        chat.answered(1)
        chat.shot("chat-dark")
        page.locator("#theme").click()
        assert page.evaluate(back) == "rgb(255, 255, 255)"
        page.reload()
        assert page.evaluate(back) == "rgb(255, 255, 255)"

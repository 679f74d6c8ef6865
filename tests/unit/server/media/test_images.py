"""Images in the requests of all three protocols: their order, their tokens, and what is refused."""

import base64
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from jswa.images.tokens import image_ids
from server.core.fairness import Key
from server.media import album
from server.media.fetch import Fetcher
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until
from tests.support.server.pictures import GEOMETRY, TEMPLATE, TOKENS, file_of, image, seeing, text, tokenizer, url_of

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
URL = "messages[0].content[0].image_url.url"


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    """A server whose model reads images; it takes five in a request."""
    with serving(seeing(), tokenizer=tokenizer(), template=TEMPLATE, max_images=5) as found:
        yield found


def user(*parts: Any) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": list(parts)}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"messages": list(messages), "max_tokens": 1, **more}


def refused(client: Client, *parts: Any, **more: Any) -> tuple[str, str]:
    """Send a chat that must be refused; return the field and the message."""
    error = client.refusal(CHATS, chat(user(*parts), **more))
    return error["param"], error["message"]


def told(engine: FakeEngine) -> list[Any]:
    """The last prompt: texts, and for an image its number among all that the engine has seen."""
    prompt = engine.seen[-1].prompt.tolist()
    known = {int(image_ids(one.digest, 1)[0]): n for n, one in enumerate(engine.pictures)}
    found: list[Any] = [""]
    while prompt:
        token = prompt.pop(0)
        if token == TOKENS.begin:
            number = known[prompt[0]]
            count = engine.pictures[number].tokens
            assert prompt[:count] == image_ids(engine.pictures[number].digest, count).tolist()
            assert prompt[count] == TOKENS.end
            prompt = prompt[count + 1 :]
            found += [number, ""]
        else:
            found[-1] += chr(token - 3) if token < 259 else f"({token})"
    return found


def colours(engine: FakeEngine, *numbers: int) -> list[int]:
    """The colours of pictures that the engine has seen."""
    return [int(engine.pictures[number].patches.max()) for number in numbers]


def test_texts_and_images_keep_their_order(client: Client) -> None:
    engine = client.engine
    parts = [text("a"), image(50), text("b"), text("c"), image(60), image(50)]
    answer = client.post(CHATS, chat({"role": "system", "content": "s"}, user(*parts))).json()
    first, one, middle, two, between, three, last = told(engine)
    assert (first, middle, between, last) == ("<system>s<user>a", "b\nc", "", "")
    assert colours(engine, one, two, three) == [50, 60, 50]
    assert engine.prepared_images
    soft = sum(engine.pictures[number].tokens for number in (one, two, three))
    assert answer["usage"]["prompt_tokens"] == len("<system>s<user>ab\nc") + 3 * 2 + soft
    assert len(answer["choices"][0]["message"]["content"]) == 1


def test_text_behind_an_image_is_decoded(client: Client) -> None:
    """The last tokens of the prompt, behind which text is decoded, are those of an image."""
    events = client.events(CHATS, chat(user(text("a"), image()), max_tokens=5))
    content = "".join(one["choices"][0]["delta"].get("content", "") for one in events[:-1] if one["choices"])
    assert len(content) == 5
    assert content.isalpha()


def test_prompts_without_images_are_as_before(client: Client) -> None:
    client.post(CHATS, chat(user(text("a"), text("b"))))
    assert told(client.engine) == ["<user>a\nb"]
    assert not client.engine.seen[-1].prompt.min() < 0


def test_the_token_of_an_image_in_a_text_is_text(client: Client) -> None:
    """In texts of all roles, and beside an image."""
    literal = "<|image|><|image><image|>"
    messages = [{"role": "system", "content": "<|image|>"}, user(text(literal), image(70), text(literal))]
    messages += [{"role": "assistant", "content": "<|image|>"}, {"role": "user", "content": literal}]
    assert client.post(CHATS, chat(*messages)).status_code == 200
    before, number, behind = told(client.engine)
    assert before == f"<system><|image|><user>{literal}"
    assert behind == f"{literal}<assistant><|image|><user>{literal}"
    assert colours(client.engine, number) == [70]


def test_a_bare_url_is_taken_as_in_vllm(client: Client) -> None:
    part = {"type": "image_url", "image_url": url_of(file_of(80)), "detail": "low"}
    assert client.post(CHATS, chat(user(part))).status_code == 200
    assert colours(client.engine, told(client.engine)[1]) == [80]


def test_responses_keep_images_for_the_next_request(client: Client) -> None:
    parts = [{"type": "input_image", "image_url": url_of(file_of(90)), "detail": "auto"}]
    body = {"input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": "a"}]}]}
    first = client.post(RESPONSES, {**body, "max_output_tokens": 1})
    assert first.status_code == 200, first.text
    output = {"type": "function_call_output", "call_id": "x", "output": parts}
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    more = {"input": [call, output], "previous_response_id": first.json()["id"], "max_output_tokens": 1}
    second = client.post(RESPONSES, more)
    assert second.status_code == 200, second.text
    begin, one, middle, two, _ = told(client.engine)
    assert begin == "<user>"
    assert middle.startswith("a<assistant>")
    assert middle.endswith("<user>")  # the template has no place for results
    assert one == two or colours(client.engine, one, two) == [90, 90]
    assert colours(client.engine, one) == [90]


def test_images_of_anthropics_blocks_are_read(client: Client) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(100)).decode()}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [block, text("b")], "is_error": True}
    use = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    messages = [user(text("a"), block), {"role": "assistant", "content": [use]}, user(result)]
    body = {"messages": messages, "max_tokens": 1}
    answer = client.post(MESSAGES, body)
    assert answer.status_code == 200, answer.text
    begin, one, middle, two, end = told(client.engine)
    assert (begin, end) == ("<user>a", "b")
    assert middle.endswith("<user>Error")
    assert colours(client.engine, one, two) == [100, 100]
    counted = client.post(f"{MESSAGES}/count_tokens", body).json()["input_tokens"]
    assert counted == len(client.engine.seen[-1].prompt)


def test_tokenize_shows_the_tokens_of_images(client: Client) -> None:
    found = client.post("/tokenize", {"messages": [user(image(), text("a"))], "return_token_strs": True}).json()
    inside = found["tokens"][len("<user>") :]
    assert inside == [TOKENS.begin, *[TOKENS.image] * (found["count"] - 9), TOKENS.end, ord("a") + 3]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])


def test_several_texts_of_a_prompt_share_its_images(client: Client) -> None:
    before = len(client.engine.pictures)
    answer = client.post(CHATS, chat(user(image(110), image(110)), n=3)).json()
    assert len(answer["choices"]) == 3
    assert len(client.engine.pictures) == before + 2


def test_a_message_with_too_many_images_is_refused(client: Client) -> None:
    parts = [text("a"), *[image(n) for n in range(6)]]
    field, message = refused(client, *parts)
    assert field == "messages[0].content[6]"
    assert "may have 5 (--max-images)" in message


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "must be a data: URL with base64"),
        ("ftp://a/b.png", "must be a data: URL with base64"),
        ("javascript:alert(1)", "must be a data: URL with base64"),
        ("", "must be a data: URL with base64"),
        ("http://user:pw@a/b.png", "must be a data: URL with base64"),
        ("http://a/b.png", "no --allowed-media-hosts"),
        ("data:image/png,abc", "must begin with"),
        ("data:text/html;base64,AAAA", "must begin with"),
        ("data:;base64,AAAA", "must begin with"),
        ("data:image/png;base64,AA A", "base64 is wrong"),
        ("data:image/png;base64,AA=A", "base64 is wrong"),
        ("data:image/png;base64,AAA", "base64 is wrong"),
        ("data:image/png;base64,AAé=", "base64 is wrong"),
        ("data:image/png;base64,", "must be a JPEG, PNG, WebP, GIF or BMP"),
        ("data:image/png;base64,AAAA", "must be a JPEG, PNG, WebP, GIF or BMP"),
    ],
)
def test_urls_that_are_refused(client: Client, url: str, reason: str) -> None:
    field, message = refused(client, {"type": "image_url", "image_url": {"url": url}})
    assert field == URL
    assert reason in message


def test_files_that_are_refused(client: Client) -> None:
    jpeg = file_of(kind="JPEG", size=(600, 600))
    frames = [seeing_frame(colour) for colour in (0, 200)]
    moving = file_of(kind="GIF", save_all=True, append_images=frames)
    bomb = file_of(size=(12_000, 12_000))
    assert len(bomb) < 2**20
    for file, reason in ((jpeg[: len(jpeg) // 2], "cannot be decoded"), (moving, "animated"), (bomb, "pixels")):
        field, message = refused(client, {"type": "image_url", "image_url": {"url": url_of(file)}})
        assert field == URL
        assert reason in message
    assert client.post(CHATS, chat(user(image()))).status_code == 200
    until(lambda: client.used("bodies") == 0)


def seeing_frame(colour: int) -> Any:
    """A further frame of a file that moves."""
    from PIL import Image

    return Image.new("RGB", (96, 96), (colour, colour, colour))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat({"role": "system", "content": [image()]}), "messages[0].content[0].type"),
        (chat({"role": "assistant", "content": [image()]}), "messages[0].content[0].type"),
        (chat(user({"type": "image_url"})), "messages[0].content[0].image_url"),
        (chat(user({"type": "image_url", "image_url": {}})), "messages[0].content[0].image_url.url"),
        (chat(user({"type": "image_url", "image_url": {"url": 1}})), "messages[0].content[0].image_url.url"),
        (chat(user({"type": "input_audio"})), "messages[0].content[0].type"),
        (chat(user(image()), prompt_logprobs=1), "prompt_logprobs"),
        (chat(user(image()), truncate_prompt_tokens=3), "truncate_prompt_tokens"),
        (chat(user(image()), echo=True), "echo"),
    ],
)
def test_what_is_refused_with_images(client: Client, body: dict[str, Any], field: str) -> None:
    assert client.refusal(CHATS, body)["param"] == field


def test_other_protocols_name_their_own_fields(client: Client) -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    body = {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}], "instructions": "b"}
    assert client.refusal(RESPONSES, body)["param"] == "input[1].content[0].image_url"
    for wrong, field in (({"file_id": "file-1"}, "file_id"), ({"image_url": None}, "image_url")):
        body = {"input": [{"role": "user", "content": [{**part, **wrong}]}]}
        assert client.refusal(RESPONSES, body)["param"] == f"input[0].content[0].{field}"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    for wrong, field in (
        ({}, "data"), ({"media_type": "image/\n"}, "media_type"), ({"type": "file"}, "type"), ({"data": None}, "data"),
        ({"type": "url", "url": "file:///a"}, "url"), ({"type": "url"}, "url"),
    ):  # fmt: skip
        block = {"type": "image", "source": {**source, **wrong}}
        answer = client.post(MESSAGES, {"messages": [user(text("a"), block)], "system": "s", "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].split()[0].rstrip(":") == f"messages[0].content[1].source.{field}"


def test_results_with_images_follow_the_order_of_their_calls(client: Client) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    asked = [user(text("x")), {"role": "assistant", "content": "", "tool_calls": calls}]
    one, two = ({"role": "tool", "tool_call_id": name, "content": [image(n)]} for name, n in (("a", 120), ("b", 130)))
    assert client.post(CHATS, chat(*asked, one, two)).status_code == 200
    assert colours(client.engine, *told(client.engine)[1::2]) == [120, 130]
    stranger = {**one, "tool_call_id": "c"}
    for results in ((two, one), (stranger, one), (one, one)):
        assert client.refusal(CHATS, chat(*asked, *results))["param"] == "messages[3].tool_call_id"
    assert client.post(CHATS, chat(*asked, two, {**one, "content": "y"})).status_code == 200


class Remembering(Fetcher):
    """Fetches the same file from everywhere."""

    def __init__(self, *hosts: str) -> None:
        super().__init__(hosts, 1.0, {None: 1.0})
        self.asked: list[str] = []

    async def fetch(self, url: str, field: str, key: Key, most: int, took: Callable[[int], Awaitable[None]]) -> bytes:
        """Return the file."""
        self.asked.append(url)
        file = file_of(140)
        await took(len(file))
        return file


def test_images_of_named_hosts_are_fetched_once(form: int) -> None:
    fetcher = Remembering("a.example")
    part = {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}
    with serving(seeing(), tokenizer=tokenizer(), template=TEMPLATE, allowed_media_hosts=("a.example",)) as client:
        other = {"type": "image_url", "image_url": {"url": "https://b.example/x.png"}}
        field, message = refused(client, part, other)
        assert field == "messages[0].content[1].image_url.url"
        assert "does not name its host" in message
        for service in client.services:
            service.fetcher = fetcher
        assert client.post(CHATS, chat(user(part, text("a"), part))).status_code == 200
        assert fetcher.asked == ["https://a.example/x.png"]
        assert colours(client.engine, *told(client.engine)[1::2]) == [140, 140]
        until(lambda: client.used("bodies") == 0)


def test_a_named_host_on_this_machine_is_not_connected_to(form: int) -> None:
    """Its own server would answer."""
    with serving(seeing(), tokenizer=tokenizer(), template=TEMPLATE, allowed_media_hosts=("localhost",)) as client:
        field, message = refused(client, {"type": "image_url", "image_url": {"url": "http://localhost/health"}})
        assert (field, message) == (URL, f"{URL}: could not be fetched")


def test_a_template_that_shows_no_images_is_refused(form: int) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(seeing(), tokenizer=tokenizer(), template=template) as client:
        field, message = refused(client, image())
        assert field == "messages"
        assert "does not show each image" in message


def test_a_model_without_images_says_so(shared: Client) -> None:
    assert refused(shared, text("a"), image()) == (
        "messages[0].content[1].type", f"messages[0].content[1].type: {album.TEXT_ONLY}",
    )  # fmt: skip
    assert "Gemma 4 E2B" in album.TEXT_ONLY


def test_images_count_in_the_memory_of_bodies(form: int) -> None:
    """While the model reads them, and no longer."""
    engine = seeing()
    engine.see_delay = 1.0
    file = file_of(size=(200, 200))
    with serving(engine, tokenizer=tokenizer(), template=TEMPLATE, max_body_memory=2**20) as client:
        body = chat(user({"type": "image_url", "image_url": {"url": url_of(file)}}), max_tokens=200)
        sender = threading.Thread(target=client.post, args=(CHATS, body))
        sender.start()
        patches = GEOMETRY.most_tokens * GEOMETRY.pooling**2 * 3 * GEOMETRY.patch**2
        until(lambda: client.used("bodies") > patches)
        sender.join()
        until(lambda: client.used("bodies") == 0)
    with serving(seeing(), tokenizer=tokenizer(), template=TEMPLATE, max_body_memory=20_000) as client:
        assert client.refusal(CHATS, chat(user(image(size=(200, 200)))), status=429)["code"] == "body_memory_full"
        until(lambda: client.used("bodies") == 0)


def test_images_of_one_key_hold_up_no_other(form: int) -> None:
    """Neither while they are prepared, nor while the model reads them."""
    engine = seeing()
    engine.see_delay = 0.5
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("hog", "other")}
    with serving(engine, tokenizer=tokenizer(), template=TEMPLATE, api_key=tuple(keys)) as client:
        done: list[int] = []

        def flood() -> None:
            done.append(client.post(CHATS, chat(user(image(), image())), headers=keys["hog"]).status_code)

        floods = [threading.Thread(target=flood) for _ in range(8)]
        for one in floods:
            one.start()
        until(lambda: len(engine.pictures) >= 2)
        waiting = next(
            one for one in client.get("/metrics", headers=keys["other"]).text.splitlines() if 'helper="image"' in one
        )
        assert float(waiting.split()[-1]) > 0
        assert client.post(CHATS, chat(user(text("a"))), headers=keys["other"]).status_code == 200
        assert client.post(CHATS, chat(user(image())), headers=keys["other"]).status_code == 200
        assert len(done) < 6, "the other key waited for the images of the first one"
        for one in floods:
            one.join()
        assert done == [200] * 8

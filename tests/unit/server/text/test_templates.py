"""Turns of keys at the processes that render chat templates, and what happens if one must be killed."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from server.killable.templates import packed
from server.text.templates import answer_of, encoded
from tests.support.attacks.floods import slow_tokenizer
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until

PATH = "/v1/chat/completions"
TEMPLATE = """{% for m in messages %}{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}
{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server with two keys and a template that never ends for some messages."""
    engine = FakeEngine(max_model_len=20_000)
    with serving(engine, template=TEMPLATE, api_key=("hog", "other"), render_timeout=1.5) as found:
        yield found


def chat(client: Client, key: str, content: str) -> int:
    """Send a chat; return its status."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return client.post(PATH, body, headers={"Authorization": f"Bearer {key}"}).status_code


def test_slow_templates_of_one_key_hold_up_no_other(client: Client) -> None:
    statuses: list[int] = []
    floods = [threading.Thread(target=lambda: statuses.append(chat(client, "hog", "loop"))) for _ in range(3)]
    renderer = client.service.renderer
    assert renderer is not None
    until(lambda: len(renderer.pool.pids) == 3)
    for flood in floods:
        flood.start()
    until(lambda: renderer.pool.lanes.waiting == 2)
    for _ in range(5):
        assert chat(client, "other", "a") == 200
    assert len(statuses) <= 1, "the other key waited for renderings of the first one"
    for flood in floods:
        flood.join()
    assert statuses == [400] * 3
    assert (renderer.pool.killed, renderer.pool.lanes.waiting) == (3, 0)


def test_a_spare_process_is_ready_when_one_is_killed(client: Client) -> None:
    renderer = client.service.renderer
    assert renderer is not None
    assert chat(client, "other", "a") == 200
    slow = threading.Thread(target=chat, args=(client, "other", "loop"))
    before = set(renderer.pool.pids)
    slow.start()
    slow.join()
    kept = set(renderer.pool.pids)
    assert chat(client, "other", "a") == 200
    assert kept, "no process was left"
    assert set(renderer.pool.pids) >= kept, "the next chat had to wait for a new process"
    assert not before <= kept, "the slow process was not killed"
    assert len(renderer.pool.pids) <= 3


def test_the_clock_of_a_template_does_not_count_waiting_for_threads(client: Client) -> None:
    """The tokenization of large prompts may occupy all helper threads; templates have threads of their own."""
    helpers = client.service.helpers
    renderer = client.service.renderer
    assert renderer is not None
    killed = renderer.pool.killed
    with slow_tokenizer(client, {"hog": 8, "other": 8}):
        until(lambda: helpers.lanes.waiting >= 8)
        assert chat(client, "other", "a") == 200
    assert renderer.pool.killed == killed


@pytest.mark.parametrize(
    "value", ["", "a" * 99, 'ż\n\ud800😀"\\' * 20, {}, [], None, {"a": [1, 2.5, {"b" * 40: ["c" * 30, True]}]}]
)
def test_questions_are_encoded_in_pieces_that_joined_are_json(value: Any) -> None:
    """Also of strings and names that are longer than a piece, with characters that JSON escapes."""
    pieces = list(encoded({"messages": [{"content": value}], "variables": {}}, piece=16))
    assert json.loads(b"".join(pieces)) == {"messages": [{"content": value}], "variables": {}}
    assert max(map(len, pieces)) <= 16 * 12  # a character beyond 16 bits is escaped as two


@pytest.mark.parametrize("text", ["", "T", '{"a', "ż\n\ud800😀" * 9])
def test_a_prompt_comes_back_as_it_is(text: str) -> None:
    """No JSON has to be parsed for it; other answers are JSON."""
    assert answer_of(packed(text)) == {"text": text}
    assert packed(text)[:1] == b"T"
    assert answer_of(packed({"failed": text})) == {"failed": text}

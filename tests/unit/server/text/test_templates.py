"""Turns of keys at the processes that render chat templates, and what happens if one must be killed."""

import threading
from collections.abc import Iterator

import pytest

from tests.support.server.fake_engine import FakeEngine
from tests.support.server.floods import slow_tokenizer
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
    until(lambda: len(renderer.pids) == 3)
    for flood in floods:
        flood.start()
    until(lambda: renderer.lanes.waiting == 2)
    for _ in range(5):
        assert chat(client, "other", "a") == 200
    assert len(statuses) <= 1, "the other key waited for renderings of the first one"
    for flood in floods:
        flood.join()
    assert statuses == [400] * 3
    assert (renderer.killed, renderer.lanes.waiting) == (3, 0)


def test_a_spare_process_is_ready_when_one_is_killed(client: Client) -> None:
    renderer = client.service.renderer
    assert renderer is not None
    assert chat(client, "other", "a") == 200
    slow = threading.Thread(target=chat, args=(client, "other", "loop"))
    before = set(renderer.pids)
    slow.start()
    slow.join()
    kept = set(renderer.pids)
    assert chat(client, "other", "a") == 200
    assert kept, "no process was left"
    assert set(renderer.pids) >= kept, "the next chat had to wait for a new process"
    assert not before <= kept, "the slow process was not killed"
    assert len(renderer.pids) <= 3


def test_the_clock_of_a_template_does_not_count_waiting_for_threads(client: Client) -> None:
    """The tokenization of large prompts may occupy all helper threads; templates have threads of their own."""
    helpers = client.service.helpers
    renderer = client.service.renderer
    assert renderer is not None
    killed = renderer.killed
    with slow_tokenizer(client, {"hog": 8, "other": 8}):
        until(lambda: helpers.lanes.waiting >= 8)
        assert chat(client, "other", "a") == 200
    assert renderer.killed == killed

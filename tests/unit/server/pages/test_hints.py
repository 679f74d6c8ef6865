"""What /server_info tells a chat of the model: examples, defaults of parameters, and the choices of reasoning."""

import pytest

from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from server.pages.hints import efforts
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import BYTES, serve, serving
from tests.support.server.pictures import TEMPLATE, seeing, tokenizer

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, []),
        ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}", ["none"]),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", ["none"]),
        ("I was thinking {{ message.thinking }}", []),
        ('{{ "Reasoning: " + reasoning_effort }}', None),
        ('{% if reasoning_effort | lower == "none" %}', None),
        ("{% if reasoning_effort not in ['high', 'low', 'no_think'] %}", ["high", "low", "no_think"]),
        ('{% if reasoning_effort in ("low", "minimal") or reasoning_effort == \'low\' %}', ["low", "minimal"]),
        (
            "{% if thinking is defined and reasoning_effort == 'high' %}{% elif reasoning_effort == 'max' %}",
            ["none", "high", "max"],
        ),
        ("{% if reasoning_effort != '' %}{{ reasoning_effort }}{% endif %}", None),
        ("reasoning_effort in [" * 20_000, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_choices_of_reasoning_are_those_that_the_template_compares(template: str, expected: list[str] | None) -> None:
    assert efforts(template) == expected


def test_server_info_tells_what_a_chat_shows() -> None:
    served = Served(
        FakeEngine, Tokenizer.load(BYTES), ChatTemplate({"default": PLAIN}, {}),
        default_sampling={"temperature": 0.6, "max_tokens": 40}, chat_examples=("Hello!", "Why?"),
    )  # fmt: skip
    with serve(served) as client:
        chat = client.get("/server_info").json()["chat"]
        assert chat["examples"] == ["Hello!", "Why?"]
        assert chat["reasoning_efforts"] == []
        assert chat["images"] == 0
        defaults = chat["sampling"]
        assert (defaults["temperature"], defaults["max_tokens"], defaults["seed"]) == (0.6, 40, None)
        assert (defaults["top_p"], defaults["repetition_penalty"]) == (1.0, 1.0)


def test_server_info_tells_how_many_images_a_request_may_have() -> None:
    with serving(seeing(), tokenizer=tokenizer(), template=TEMPLATE, max_images=3) as client:
        assert client.get("/server_info").json()["chat"]["images"] == 3


def test_a_model_without_a_chat_template_has_no_chat() -> None:
    with serving() as client:
        assert client.get("/server_info").json()["chat"] is None

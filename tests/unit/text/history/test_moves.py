"""Conversations that a template would leave out or refuse: every text of them reaches the prompt."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from jswa.errors import InvalidPrompt
from jswa.text.chat_template import ChatTemplate
from jswa.text.history.probes import PROBES
from tests.support.checkpoints.text_folders import FAMILIES

Message = dict[str, Any]
_CALLS = "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}]{% endfor %}"
_ALL = "<{{ m.role }}>{{ m.content }}"


def each(body: str) -> str:
    """Return a template that writes each message."""
    return "{% for m in messages %}" + body + "{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def refusing(condition: str) -> str:
    """Return the part of a template that refuses messages."""
    return "{% if " + condition + " %}{{ raise_exception('refused') }}{% endif %}"


# In the style of released templates: what each leaves out or refuses.
TEMPLATES = {
    "everything": each(_ALL + _CALLS),
    "user and assistant in turns": each(
        refusing("m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0)") + _ALL
    ),
    "text only": each(_ALL),
    "nothing of the operator": each("{% if m.role not in ['system', 'developer'] %}" + _ALL + _CALLS + "{% endif %}"),
    "one system message, first": each(
        refusing("m.role == 'developer' or (m.role == 'system' and loop.index0)") + _ALL + _CALLS
    ),
    "the first message may be the operator's": each(
        "{% if loop.first or m.role not in ['system', 'developer'] %}" + _ALL + _CALLS + "{% endif %}"
    ),
    "one call": each(refusing("m.tool_calls and m.tool_calls | length > 1") + _ALL + _CALLS),
    "the first call": each(
        _ALL + "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}[{{ c.function.arguments | tojson }}]{% endif %}"
    ),
    "text or calls": each("{% if m.tool_calls %}" + _CALLS + "{% else %}" + _ALL + "{% endif %}"),
    "arguments as text": each(
        _ALL + "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    ),
    "short ids": each(
        refusing("m.tool_call_id and m.tool_call_id | length != 9") + _ALL + _CALLS
        + "{% for c in m.tool_calls if c.id | length != 9 %}{{ raise_exception('id') }}{% endfor %}"
    ),
    "answers with content": each(
        refusing("m.role == 'assistant' and not m.content and not m.tool_calls") + _ALL + _CALLS
    ),
    "content that is a text": each("<{{ m.role + m.content }}" + _CALLS),
    "no user behind a result": each(
        refusing("m.role == 'user' and not loop.first and messages[loop.index0 - 1].role in ['tool', 'user']")
        + _ALL + _CALLS
    ),
    "results of calls": (
        "{% set known = namespace(ids=[]) %}{% for m in messages %}{% if m.role != 'tool' %}"
        "{% set known.ids = m.tool_calls | default([]) | map(attribute='id') | list %}{% endif %}"
        + refusing("m.role == 'tool' and m.tool_call_id not in known.ids") + _ALL + _CALLS + "{% endfor %}"
    ),
    "system in the last message of the user": (
        "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' %}{{ messages[0].content }}"
        "{% endif %}" + _ALL + _CALLS + "{% endfor %}"
    ),
}  # fmt: skip


@cache
def template(name: str) -> ChatTemplate:
    """Return one of the templates."""
    return ChatTemplate({"default": TEMPLATES[name]}, {})


def said(role: str, text: str | None, **more: Any) -> Message:
    """Return a message as a client sends it."""
    return {"role": role, "content": text, "refusal": None, **more}


def calling(*texts: str, content: str | None = None, name: str = "abcdefgh") -> list[Message]:
    """Return a message with a call for each text, and their results."""
    calls = [
        {"id": f"{name}{index}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{text}"}}'}}
        for index, text in enumerate(texts)
    ]
    results = [
        said("tool", f"result of {text}", tool_call_id=call["id"]) for text, call in zip(texts, calls, strict=True)
    ]
    return [said("assistant", content, tool_calls=calls), *results]


USER, ANSWER = said("user", "ask"), said("assistant", "answer")
SHAPES: dict[str, list[Message]] = {
    "several of the operator": [
        said("system", "one"), said("developer", "two"), USER, said("developer", "three"), ANSWER,
        said("system", "four"), said("user", "more"),
    ],
    "an answer last": [said("system", "one"), USER, ANSWER],
    "the operator last": [USER, said("system", "one")],
    "only the operator": [said("system", "one")],
    "a developer": [said("developer", "one"), USER],
    "several calls": [USER, *calling("a", "b"), ANSWER, said("user", "more")],
    "text beside calls": [USER, *calling("a", "b", content="text"), said("user", "more")],
    "long ids": [USER, *calling("a", name="call_0123456789"), said("user", "more")],
    "loops": [said("system", "one"), USER, *calling("a"), *calling("b", name="abcdefgi")],
    "an empty answer": [USER, said("assistant", None), said("user", "more")],
    "only reasoning": [USER, said("assistant", None, reasoning_content="hm"), said("user", "more")],
    "an answer without content": [USER, {"role": "assistant"}, said("user", "more")],
    "a refusal": [USER, {"role": "assistant", "content": None, "refusal": "no"}, said("user", "more")],
    "an empty result": [USER, calling("a")[0], {"role": "tool", "tool_call_id": "abcdefgh0", "content": None}],
    "a result of no call": [USER, said("tool", "r", tool_call_id="abcdefghi"), ANSWER, said("user", "more")],
    "a result of another call": [USER, calling("a")[0], said("tool", "r", tool_call_id="x"), ANSWER],
    "more results than calls": [USER, *calling("a"), said("tool", "r", tool_call_id="x"), ANSWER],
    "no result": [USER, calling("a")[0], said("user", "more")],
    "rows": [USER, said("user", "more"), ANSWER, said("assistant", "again"), said("user", "end")],
    "names": [said("user", "ask", name="Ann"), said("assistant", "answer", name="Bob"), said("user", "end")],
}  # fmt: skip


def texts_of(messages: list[Message]) -> list[str]:
    """Return the texts that a prompt must have."""
    found = [text for one in messages for text in (one.get("content"), one.get("refusal")) if text]
    calls = [call for one in messages for call in one.get("tool_calls", ())]
    return found + [call["function"]["arguments"].split('"')[3] for call in calls]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_reaches_the_prompt(name: str, shape: str) -> None:
    prompt = template(name).prompt(SHAPES[shape])
    for text in texts_of(SHAPES[shape]):
        assert text in prompt, prompt


_WORDS = st.integers(10**8, 10**9).map(str)
_ROLES = st.sampled_from(["system", "developer", "user", "assistant"])
_TURNS = st.one_of(
    st.builds(lambda role, text: [said(role, text)], _ROLES, _WORDS),
    st.just([said("assistant", None)]),
    st.builds(lambda text: [said("tool", text, tool_call_id="another")], _WORDS),
    st.builds(lambda texts, content: calling(*texts, content=content), st.lists(_WORDS, min_size=1, max_size=3),
              st.none() | _WORDS),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(_TURNS, max_size=6))
def test_any_conversation_that_a_user_begins_is_rendered(name: str, turns: list[list[Message]]) -> None:
    """With all of its texts, whatever the order of its messages."""
    messages = [USER, *(one for turn in turns for one in turn)]
    prompt = template(name).prompt(messages)
    for text in texts_of(messages):
        assert text in prompt, prompt


# Families whose templates of the fixtures take these shapes, apart from the text beside a call.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_families_take_them_too(family: str, shape: str, tmp_path: Path) -> None:
    loaded = ChatTemplate.load(FAMILIES[family](tmp_path))
    assert loaded is not None
    prompt = loaded.prompt(SHAPES[shape])
    for text in texts_of(SHAPES[shape]):
        assert text in prompt, prompt


def test_what_a_template_takes_stays_as_it_is() -> None:
    """A conversation that the template writes is not moved."""
    whole = template("everything")
    for messages in (
        SHAPES["several of the operator"],
        SHAPES["rows"],
        SHAPES["long ids"],
        SHAPES["text beside calls"],
    ):
        assert whole.prompt(messages) == whole.render(messages).replace("<assistant><", "<assistant>None<")


def test_each_move_puts_its_message_where_the_template_has_room() -> None:
    """One example of each move."""
    first = template("one system message, first").prompt(SHAPES["several of the operator"])
    assert first == "<system>one\n\ntwo\n\nthree\n\nfour<user>ask<assistant>answer<user>more>"
    turns = template("user and assistant in turns")
    assert turns.prompt([said("system", "one"), USER]) == "<user>one\n\nask>"
    assert turns.prompt([USER, *calling("a")]) == (
        '<user>ask<assistant>{"name": "f", "arguments": {"x": "a"}}<user>result of a>'
    )
    single = template("one call").prompt([USER, *calling("a", "b", content="so")])
    assert single == (
        '<user>ask<assistant>so[f{"x": "a"}abcdefgh0]<tool>result of a<assistant>[f{"x": "b"}abcdefgh1]'
        "<tool>result of b>"
    )
    assert template("text or calls").prompt([USER, *calling("a", content="so")]) == (
        '<user>ask<assistant>so[f{"x": "a"}abcdefgh0]<tool>result of a>'
    )
    thoughts = [said("assistant", text, reasoning_content=f"why {text}") for text in ("one", "two")]
    reasons = ChatTemplate({"default": TEMPLATES["user and assistant in turns"].replace(
        "{{ m.content }}", "({{ m.reasoning_content }}){{ m.content }}"
    )}, {})  # fmt: skip
    assert reasons.prompt([USER, *thoughts]) == "<user>()ask<assistant>(why one\n\nwhy two)one\n\ntwo>"
    other = template("results of calls").prompt(SHAPES["a result of another call"])
    assert other == '<user>ask<assistant>[f{"x": "a"}abcdefgh0]<tool>r<assistant>answer'
    more = template("results of calls").prompt(SHAPES["more results than calls"])
    assert more == '<user>ask<assistant>[f{"x": "a"}abcdefgh0]<tool>result of a<user>r<assistant>answer'
    assert template("answers with content").prompt([USER, said("assistant", ""), USER]) == (
        "<user>ask<assistant> <user>ask>"
    )


def test_a_template_that_tells_nothing_gets_what_came() -> None:
    """One that writes no message, or needs variables that the probes do not have."""
    count = ChatTemplate({"default": "{{ messages | length }}"}, {})
    assert count.prompt(SHAPES["rows"]) == "5"
    needs = ChatTemplate({"default": "{{ mood + '' }}" + each("{{ m.role }};")}, {})
    assert needs.prompt(SHAPES["a developer"], mood="!") == "!developer;user;>"


def test_what_has_no_place_is_refused() -> None:
    """By the template's own reason."""
    with pytest.raises(InvalidPrompt, match="refused"):
        template("user and assistant in turns").prompt([ANSWER, USER])


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for what a conversation needs."""
    seen: list[Any] = []
    written = chat_template_utils.render_jinja_template

    def counting(conversations: Any, **more: Any) -> Any:
        seen.extend(conversations)
        return written(conversations=conversations, **more)

    monkeypatch.setattr(chat_template_utils, "render_jinja_template", counting)
    one = ChatTemplate({"default": TEMPLATES["text only"]}, {})
    one.prompt([USER])
    assert len(seen) == 1
    one.prompt([said("system", "s"), USER])
    one.prompt([said("system", "s"), USER])
    assert seen[1:] == [PROBES["system"], seen[2], seen[3]]

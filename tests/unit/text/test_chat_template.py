"""Chat templates: read from a checkpoint's files and rendered in a sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest

from jswa.errors import CheckpointError, ConfigError, InvalidPrompt
from jswa.text.chat_template import ChatTemplate, require_template
from jswa.text.history.probes import PROBE_TOOL

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n<assistant>{% endif %}{% if mood %}[{{ mood }}]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def folder(path: Path, template: object, *, own_file: bool = False, **files: object) -> Path:
    """Write a checkpoint folder with a chat template and further JSON `files` by name."""
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if own_file:
        (path / "chat_template.jinja").write_text(str(template))
    elif template is not None:
        config["chat_template"] = template
    for name, content in {"tokenizer_config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def load(path: Path) -> ChatTemplate:
    """Load the template of a folder that has one."""
    template = ChatTemplate.load(path)
    assert template is not None
    return template


@pytest.mark.parametrize("own_file", [False, True])
def test_a_template_is_found_in_either_file(tmp_path: Path, own_file: bool) -> None:
    """In chat_template.jinja or in tokenizer_config.json; special tokens may be objects."""
    template = load(folder(tmp_path, TEMPLATE, own_file=own_file))
    assert template.render(MESSAGES[:1]) == "<s><user>Hi<assistant>"
    assert template.render(MESSAGES[:1], add_generation_prompt=False) == "<s><user>Hi"
    assert template.render(MESSAGES[:1], mood="calm") == "<s><user>Hi<assistant>[calm]"


def test_the_jinja_file_overrides_the_json_files(tmp_path: Path) -> None:
    """The order is chat_template.jinja, tokenizer_config.json, chat_template.json of old processors."""
    folder(tmp_path, None, chat_template={"chat_template": "processor"})
    assert load(tmp_path).render(MESSAGES) == "processor"
    folder(tmp_path, "config", chat_template={"chat_template": "processor"})
    assert load(tmp_path).render(MESSAGES) == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load(tmp_path).render(MESSAGES) == "file"


def test_a_checkpoint_may_have_several_named_templates(tmp_path: Path) -> None:
    """`default` is used without tools, `tool_use` with tools, and any template by its name."""
    templates = [
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
        {"name": "default", "template": TEMPLATE},
        {"name": "rag", "template": "{{ documents[0].text }}"},
    ]
    template = load(folder(tmp_path, templates))
    assert template.render(MESSAGES[:1], add_generation_prompt=False) == "<s><user>Hi"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "1 tools"
    assert template.render(MESSAGES, chat_template="rag", documents=[{"text": "x"}]) == "x"
    assert template.render(MESSAGES, chat_template="{{ eos_token }}") == "</s>"


def test_additional_templates_are_read_from_a_folder(tmp_path: Path) -> None:
    """additional_chat_templates/NAME.jinja adds to the config's templates or overrides them."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools!")
    template = load(folder(tmp_path, {"default": "plain", "tool_use": "old"}))
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[]) == "tools!"
    with pytest.raises(InvalidPrompt, match=r"chat_template = None.*templates tool_use"):
        load(folder(tmp_path, None)).render(MESSAGES)


def test_the_last_message_can_be_continued(tmp_path: Path) -> None:
    """The prompt ends with the message itself."""
    text = load(folder(tmp_path, TEMPLATE)).render(MESSAGES, continue_final_message=True)
    assert text.endswith("<assistant>Hello")


def test_a_checkpoint_may_have_no_template(tmp_path: Path) -> None:
    """No default replaces it, but the caller may pass one."""
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate({}, {}).render(MESSAGES, chat_template="{{ messages | length }}") == "2"
    with pytest.raises(InvalidPrompt, match="no template"):
        ChatTemplate({}, {}).render(MESSAGES)
    with pytest.raises(ConfigError, match="no chat template: `jswa generate` continues a text, and `jswa serve --chat"):
        require_template(None)


def test_a_template_tells_which_conversations_it_refuses_whatever_they_say() -> None:
    """A default template is missing, or has no place for tools; `tool_use` is for conversations with tools."""
    assert ChatTemplate({"default": "{{ tools }}"}, {}).refusal() is None
    assert ChatTemplate({"default": "{{ tools }}"}, {}).refusal([PROBE_TOOL]) is None
    assert "no place for tools" in str(ChatTemplate({"default": ""}, {}).refusal([PROBE_TOOL]))
    assert ChatTemplate({"default": "", "tool_use": "{{ tools }}"}, {}).refusal([PROBE_TOOL]) is None
    assert "the checkpoint has the templates other" in str(ChatTemplate({"other": ""}, {}).refusal())


def test_keys_that_are_null_count_as_absent(tmp_path: Path) -> None:
    """Clients send `content: null` with tool calls, and templates test whether the key is defined."""
    text = "{% for m in messages %}{{ 'none' if m.content is undefined else m.content }};{% endfor %}"
    assert load(folder(tmp_path, text)).render([{**MESSAGES[0], "content": None}, MESSAGES[1]]) == "none;Hello;"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_gpt_oss_takes_a_commentary_before_a_call(tmp_path: Path, name: str) -> None:
    """Its template refuses reasoning and content with a call; they are rendered as the model wrote them."""
    start = "<|start|>assistant<|channel|>"
    template = load(folder(tmp_path, (
        "{% for message in messages %}{% if message.tool_calls %}{% if message.content and message.thinking %}"
        "{{ raise_exception('both') }}{% elif message.thinking %}"
        + start + "analysis<|message|>{{ message.thinking }}<|end|>{% endif %}call{% else %}{{ message.content }}"
        "{% endif %}{% endfor %}"
    )))  # fmt: skip
    message = {"role": "assistant", "content": "I look.", name: "Hm.", "tool_calls": [{"function": {"name": "f"}}]}
    wanted = f"{start}analysis<|message|>Hm.<|end|>{start}commentary<|message|>I look.<|end|>call"
    assert template.render([message], add_generation_prompt=False) == wanted
    without = {key: value for key, value in message.items() if key != "tool_calls"}
    assert template.render([without], add_generation_prompt=False) == "I look."


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"a": "x"}', '{"a": "x"}'), ("", "{}"), ({"a": 1}, '{"a": 1}'), ('{"a": ', '{"_raw": "{\\"a\\": "}')],
)
def test_arguments_of_calls_are_objects(tmp_path: Path, arguments: object, rendered: str) -> None:
    """In answers they are JSON in a string, which may be broken."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert load(folder(tmp_path, source)).render([message]) == rendered
    assert call["function"]["arguments"] == arguments  # type: ignore[index]


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], ["text"], "text"])
def test_malformed_messages_are_refused(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    """InvalidPrompt names the field."""
    with pytest.raises(InvalidPrompt, match="messages"):
        load(folder(tmp_path, TEMPLATE)).render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(messages[0]) }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_makes_an_invalid_prompt(tmp_path: Path, template: str) -> None:
    """No escape from the sandbox, and no crash."""
    with pytest.raises(InvalidPrompt, match="messages"):
        load(folder(tmp_path, template)).render(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''['__class__'] | attr('__mro__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages | map(attribute='__class__') | join }}",
    ],
)
def test_attributes_outside_the_sandbox_are_empty(tmp_path: Path, template: str) -> None:
    """If jinja2 does not refuse the access, the result is empty."""
    assert load(folder(tmp_path, template)).render(MESSAGES) == ""


def test_a_syntax_error_blames_the_checkpoint_or_the_caller(tmp_path: Path) -> None:
    """CheckpointError for the checkpoint's template, InvalidPrompt for the caller's; both name the line."""
    template = load(folder(tmp_path, "\n\n{% x"))
    with pytest.raises(CheckpointError, match="line 3"):
        template.render(MESSAGES)
    with pytest.raises(InvalidPrompt, match=r"chat_template = '\{\{'.*line 1"):
        template.render(MESSAGES, chat_template="{{")


def test_tools_must_be_schemas(tmp_path: Path) -> None:
    """InvalidPrompt names the field."""
    with pytest.raises(InvalidPrompt, match="tools"):
        load(folder(tmp_path, TEMPLATE)).render(MESSAGES, tools=["f"])  # type: ignore[list-item]


@pytest.mark.parametrize("template", [5, [{"name": "default"}], ["text"], {"default": None}])
def test_malformed_templates_are_refused(tmp_path: Path, template: object) -> None:
    """CheckpointError, at load, names the file."""
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.load(folder(tmp_path, template))


def test_a_corrupt_tokenizer_config_is_refused(tmp_path: Path) -> None:
    """CheckpointError, at load."""
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)

"""Chat templates: read from where checkpoints keep them, rendered in a sandbox."""

import json
from pathlib import Path

import pytest

from jswa.chat import ChatTemplate
from jswa.errors import CheckpointError, InvalidPrompt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n<assistant>{% endif %}{% if mood %}[{{ mood }}]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def folder(path: Path, template: object, *, own_file: bool = False) -> Path:
    """A checkpoint folder with a chat template."""
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if own_file:
        (path / "chat_template.jinja").write_text(str(template))
    else:
        config["chat_template"] = template  # type: ignore[assignment]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def load(path: Path) -> ChatTemplate:
    """The template of a folder that has one."""
    template = ChatTemplate.load(path)
    assert template is not None
    return template


@pytest.mark.parametrize("own_file", [False, True])
def test_a_template_is_found_where_checkpoints_keep_it(tmp_path: Path, own_file: bool) -> None:
    """In a file of its own, or in tokenizer_config.json; special tokens may be objects."""
    template = load(folder(tmp_path, TEMPLATE, own_file=own_file))
    assert template.render(MESSAGES[:1]) == "<s><user>Hi<assistant>"
    assert template.render(MESSAGES[:1], add_generation_prompt=False) == "<s><user>Hi"
    assert template.render(MESSAGES[:1], mood="calm") == "<s><user>Hi<assistant>[calm]"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    """Some checkpoints ship a list by name."""
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    assert load(folder(tmp_path, templates)).render(MESSAGES[:1], add_generation_prompt=False) == "<s><user>Hi"


def test_the_last_message_can_be_continued(tmp_path: Path) -> None:
    """The prompt ends with the message itself."""
    text = load(folder(tmp_path, TEMPLATE)).render(MESSAGES, continue_final_message=True)
    assert text.endswith("<assistant>Hello")


def test_a_checkpoint_without_template_has_none(tmp_path: Path) -> None:
    """Nothing is made up in its place."""
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], ["text"], "text"])
def test_messages_of_another_shape_are_refused(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    """InvalidPrompt names the field."""
    with pytest.raises(InvalidPrompt, match="messages"):
        load(folder(tmp_path, TEMPLATE)).render(messages)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{% x"]
)
def test_what_the_sandbox_or_the_template_refuses_is_a_bad_prompt(tmp_path: Path, template: str) -> None:
    """No way out of the sandbox, and no crash."""
    with pytest.raises(InvalidPrompt, match="messages"):
        load(folder(tmp_path, template)).render(MESSAGES)


def test_a_corrupt_tokenizer_config_is_refused(tmp_path: Path) -> None:
    """CheckpointError, at load."""
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError):
        ChatTemplate.load(tmp_path)

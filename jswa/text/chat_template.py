"""Chat messages to prompts, by the checkpoint's own template, in transformers' sandboxed jinja2 (extra `chat`).

A template is code of whoever made the checkpoint. The sandbox keeps it from everything but its variables, and bounds no
time or memory: a server must render in a process that it can end, or serve only checkpoints that it trusts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jswa.errors import CheckpointError, ConfigError, InvalidPrompt
from jswa.text.special_tokens import CONFIG, SpecialTokens, read_optional

Message = Mapping[str, Any]
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


@dataclass(frozen=True)
class ChatTemplate:
    """jinja2 templates by name, and the special tokens by the names that they may use."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @staticmethod
    def load(folder: Path) -> "ChatTemplate | None":
        """The templates of a checkpoint; None where there is none. Raises CheckpointError.

        Of each name, the first of: chat_template.jinja (`default`) and additional_chat_templates/*.jinja;
        tokenizer_config.json; chat_template.json, as old multimodal checkpoints have it.
        """
        sources = _named(read_optional(folder / "chat_template.json"), folder / "chat_template.json")
        sources |= _named(read_optional(folder / CONFIG), folder / CONFIG)
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").exists():
            files[_DEFAULT] = folder / "chat_template.jinja"
        for name, path in files.items():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return ChatTemplate(sources, SpecialTokens.load(folder).named) if sources else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of one conversation, with all special tokens in it.

        Args:
            messages: objects with a role; keys whose value is None count as absent.
            tools: what the model may call, as JSON schemas.
            chat_template: name of one of the checkpoint's templates, or a template itself. None: `tool_use` where there
                are tools and such a template, or else `default`.
            variables: more variables of the template; they come before special tokens of their name.

        Raises InvalidPrompt where the template refuses, CheckpointError where it is none, ConfigError without jinja2.
        """
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise InvalidPrompt("messages", messages, "must be a list of objects with a role and a content")
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidPrompt("tools", tools, "must be a list of JSON schemas")
        source = self._choose(chat_template, tools)
        try:
            from jinja2 import TemplateSyntaxError
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ConfigError("chat", str(error), "needs `pip install jswa[chat]`") from error
        try:
            rendered: Any = render_jinja_template(
                conversations=[[{k: v for k, v in one.items() if v is not None} for one in messages]],
                tools=None if tools is None else list(map(dict, tools)),
                chat_template=source,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **{**self.special_tokens, **variables},
            )
        except ImportError as error:  # of a jinja2 whose sandbox is known to leak
            raise ConfigError("chat", str(error), "needs `pip install jswa[chat]`") from error
        except TemplateSyntaxError as error:
            reason = f"is no jinja2 template, line {error.lineno}: {error}"
            if source in self.sources.values():
                raise CheckpointError(f"the checkpoint's chat template {reason}") from error
            raise InvalidPrompt("chat_template", chat_template, reason) from error
        except Exception as error:  # a template can divide by zero, recurse, run out of memory …
            reason = f"{type(error).__name__}: {error}"
            raise InvalidPrompt("messages", messages, f"the chat template refuses them: {reason:.1000}") from error
        return str(rendered[0][0])

    def _choose(self, wanted: str | None, tools: object) -> str:
        if wanted is not None:
            return self.sources.get(wanted, wanted)
        if tools is not None and _WITH_TOOLS in self.sources:
            return self.sources[_WITH_TOOLS]
        if _DEFAULT not in self.sources:
            has = f"templates {', '.join(sorted(self.sources))}" if self.sources else "no template"
            raise InvalidPrompt("chat_template", wanted, f"must name or be a template: the checkpoint has {has}")
        return self.sources[_DEFAULT]


def _named(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """`chat_template` of a JSON file by name: one text, a list of names and texts, or an object."""
    found = config.get("chat_template")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {one.get("name"): one.get("template") for one in found}
    templates = {_DEFAULT: found} if isinstance(found, str) else {} if found is None else found
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise CheckpointError(f"{path}: chat_template must be a text, or a list of objects with a name and a template")
    return templates

"""Chat messages to prompts, by the checkpoint's own template, in transformers' sandboxed jinja2 (extra `chat`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jswa.errors import CheckpointError, ConfigError, InvalidPrompt

Message = Mapping[str, Any]
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 template, and the special tokens by the names that it may use."""

    source: str
    special_tokens: Mapping[str, str]

    @staticmethod
    def load(folder: Path) -> "ChatTemplate | None":
        """chat_template.jinja, or tokenizer_config.json's chat_template; None where there is neither."""
        path = folder / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            own = folder / "chat_template.jinja"
            source = own.read_text(encoding="utf-8") if own.exists() else config.get("chat_template")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the chat template of {folder} cannot be read: {error}") from error
        if isinstance(source, list):  # several by name
            source = next((one.get("template") for one in source if one.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        tokens = {name: config.get(name) for name in _SPECIAL}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
        return ChatTemplate(source, {name: text for name, text in texts.items() if isinstance(text, str)})

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of one conversation. Raises InvalidPrompt where the template refuses, ConfigError without it."""
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise InvalidPrompt("messages", messages, "must be a list of objects with a role and a content")
        try:
            from jinja2 import TemplateError
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ConfigError("chat", str(error), "needs `pip install jswa[chat]`") from error
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(map(dict, messages))],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **{**self.special_tokens, **variables},
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidPrompt("messages", messages, f"the chat template refuses them: {error}") from error
        return str(rendered[0][0])

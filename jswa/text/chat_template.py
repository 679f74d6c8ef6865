"""Render chat messages into a prompt with the checkpoint's chat template: `LLM.chat`, `jswa chat` and `jswa eval`.

Templates run in transformers' sandboxed jinja2 (extra `chat`). A template is untrusted code from the checkpoint: the
sandbox restricts what it can reach, but not the time and memory that it takes. The server therefore renders in worker
processes that it can kill (server/text/templates.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jswa.env import without_advice
from jswa.errors import CheckpointError, ConfigError, InvalidPrompt, install
from jswa.storage.checkpoint_files import is_there, read_file
from jswa.storage.json_object import read_optional
from jswa.text.history.arguments import call_arguments
from jswa.text.history.moves import fitted
from jswa.text.history.probes import PROBE_TOOL, PROBES, writes_all
from jswa.text.shipped import REPLACES, instead_of, shipped_template
from jswa.text.special_tokens import CONFIG, SpecialTokens

Message = Mapping[str, Any]
MAX_CHARS = 2**20  # of all templates of a checkpoint; the longest known ones have some ten thousand
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ONE_OF_BOTH = "message.content and message.thinking"  # stands in templates that refuse messages with both
_MOST_SHOWN = 256  # answers about templates that are kept: a caller may bring a new one with each conversation
_COMMENTARY = "<|end|><|start|>assistant<|channel|>commentary<|message|>"


NO_TEMPLATE = "the checkpoint has no chat template"


@dataclass(frozen=True)
class ChatTemplate:
    """The jinja2 templates of a checkpoint by name, and its special tokens by the names that templates use."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    _shown: dict[tuple[str, bool, str], bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def load(folder: Path) -> "ChatTemplate | None":
        """Load the templates of a checkpoint; None if it has none. Raises CheckpointError.

        If several files have a template of the same name, the first in this order wins: chat_template.jinja (`default`)
        and additional_chat_templates/*.jinja, tokenizer_config.json, chat_template.json (old multimodal checkpoints).
        """
        sources = _named(read_optional(folder / "chat_template.json"), folder / "chat_template.json")
        sources |= _named(read_optional(folder / CONFIG), folder / CONFIG)
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if is_there(folder / "chat_template.jinja"):
            files[_DEFAULT] = folder / "chat_template.jinja"
        sources |= {name: _source(path, folder) for name, path in files.items()}
        if (size := sum(map(len, sources.values()))) > MAX_CHARS:
            raise CheckpointError(f"{folder}: its chat templates have {size} characters: must have at most {MAX_CHARS}")
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
        """Return the text that the template writes of one conversation, special tokens included.

        Args:
            messages: objects with a role; a key whose value is None counts as absent.
            tools: JSON schemas of the tools that the model may call.
            chat_template: the name of one of the checkpoint's templates or of one that ships with jswa, or the source
                of a template. None: `tool_use` if there are tools and the checkpoint has that template, otherwise
                `default`.
            variables: additional variables of the template; they override special tokens of the same name.

        Raises InvalidPrompt if the template refuses the messages, CheckpointError if the checkpoint's template is not
        valid jinja2, and ConfigError if jinja2 or transformers is not installed.
        """
        source = self._checked(messages, tools, chat_template)
        turn = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._written(source, self._shaped(messages, source), tools, turn | variables)

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt of one conversation: as `render`, but no message is left out.

        What the template leaves out or refuses goes to where it has a place: `jswa.text.history.moves.fitted`. What has
        no place is refused. Raises as `render`.
        """
        source = self._checked(messages, tools, chat_template)
        moved = fitted(self._shaped(messages, source), lambda probe: self._shows(probe, source, bool(tools)))
        return self._written(source, moved, tools, variables)

    def refusal(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """Return why conversations with these tools are refused, whatever they say; None if they are not."""
        try:
            self._checked([{"role": "user"}], tools, None)
        except InvalidPrompt as error:
            return error.limit
        return None

    def only(self, wanted: str | None) -> "ChatTemplate":
        """Return the one template that a chat is rendered by which asks for it; of all if it asks for none."""
        return self if wanted is None else ChatTemplate({_DEFAULT: self._choose(wanted, None)}, self.special_tokens)

    def _checked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, wanted: str | None
    ) -> str:
        """Return the source of the template for a conversation. Raises InvalidPrompt if it is none."""
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise InvalidPrompt("messages", messages, "must be a list of objects with a role and a content")
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidPrompt("tools", tools, "must be a list of JSON schemas")
        source = self._choose(wanted, tools)
        if tools and "tools" not in source:
            other = instead_of(source)
            hint = "" if other is None else f"; --chat-template {other} has one"
            reason = f"cannot be shown to the model: its chat template has no place for tools{hint}"
            raise InvalidPrompt("tools", tools, reason)
        return source

    def _shaped(self, messages: Sequence[Message], source: str) -> list[dict[str, Any]]:
        try:
            return [_shaped(one, source) for one in messages]
        except RecursionError as error:
            raise InvalidPrompt("messages", messages, "are nested too deeply") from error

    def _shows(self, probe: str, source: str, tools: bool) -> bool:
        """Return whether a template writes all texts of a probe.

        One that does not even write a single message of a user, or needs variables that only the caller knows, tells
        nothing: it counts as one that writes everything, so that nothing is moved.
        """
        return self._writes(probe, source, tools) or not self._writes("plain", source, tools)

    def _writes(self, probe: str, source: str, tools: bool) -> bool:
        key = (source, tools, probe)
        if key not in self._shown:
            if len(self._shown) > _MOST_SHOWN:
                self._shown.clear()
            offered = [PROBE_TOOL] if tools else None
            try:
                text = self._written(source, PROBES[probe], offered, {"add_generation_prompt": False})
                self._shown[key] = writes_all(text, PROBES[probe])
            except InvalidPrompt:
                self._shown[key] = False
        return self._shown[key]

    def _written(
        self,
        source: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return what a template writes of messages. Raises as `render`."""
        try:
            from jinja2 import TemplateSyntaxError

            with without_advice():
                from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ConfigError("chat", str(error), f"needs the packages for chats: {install('chat')}") from error
        goes_on = variables.get("continue_final_message", False)
        turn = {"add_generation_prompt": variables.get("add_generation_prompt", True) and not goes_on}
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(map(dict, messages))],
                tools=None if tools is None else list(map(dict, tools)),
                chat_template=source,
                **{**self.special_tokens, "continue_final_message": goes_on, **variables, **turn},
            )
        except ImportError as error:  # transformers refuses versions of jinja2 whose sandbox leaks
            raise ConfigError("chat", str(error), f"needs the packages for chats: {install('chat')}") from error
        except TemplateSyntaxError as error:
            reason = f"is not a valid jinja2 template; line {error.lineno}: {error!s:.1000}"
            if source in self.sources.values():
                raise CheckpointError(f"the checkpoint's chat template {reason}") from error
            raise InvalidPrompt("chat_template", source, reason) from error
        except Exception as error:  # a template can raise anything: division by zero, recursion, no memory …
            reason = f"{type(error).__name__}: {error}"
            raise InvalidPrompt("messages", messages, f"the chat template fails on them: {reason:.1000}") from error
        return str(rendered[0][0])

    def _choose(self, wanted: str | None, tools: object) -> str:
        if wanted in REPLACES and wanted not in self.sources:
            return shipped_template(wanted)
        if wanted is not None:
            return self.sources.get(wanted, wanted)
        if tools is not None and _WITH_TOOLS in self.sources:
            return self.sources[_WITH_TOOLS]
        if _DEFAULT not in self.sources:
            has = f"the templates {', '.join(sorted(self.sources))}" if self.sources else "no template"
            raise InvalidPrompt(
                "chat_template", wanted, f"must be a template or the name of one; the checkpoint has {has}"
            )
        return self.sources[_DEFAULT]


def require_template(template: ChatTemplate | None) -> None:
    """Raise ConfigError if a model has no chat template: `jswa chat` could ask it nothing."""
    if template is None:
        limit = f"{NO_TEMPLATE}: `jswa generate` continues a text, and `jswa serve --chat-template FILE` brings one"
        raise ConfigError("chat_template", None, limit)


def _shaped(message: Message, source: str) -> dict[str, Any]:
    """Return a message as a template takes it: the arguments of its tool calls are objects.

    gpt-oss's template refuses a message that has reasoning, content and a call, although the model writes such answers:
    the content is a commentary between the two others. There it is written into the reasoning, as the model wrote it.
    """
    shaped = {key: value for key, value in message.items() if value is not None}
    if shaped.get("tool_calls"):
        shaped["tool_calls"] = [_shaped_call(call) for call in shaped["tool_calls"]]
    reasoning = next((shaped[name] for name in _REASONING if shaped.get(name)), None)
    if _ONE_OF_BOTH in source and shaped.get("tool_calls") and shaped.get("content") and reasoning is not None:
        shaped = {key: value for key, value in shaped.items() if key not in (*_REASONING, "content")}
        shaped["thinking"] = f"{reasoning}{_COMMENTARY}{message['content']}"
    return shaped


def _shaped_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, which are JSON in a string in an answer."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": call_arguments(function.get("arguments"))}}


def _source(path: Path, folder: Path) -> str:
    """Return the template in a file. Raises CheckpointError."""
    try:
        source = read_file(path, MAX_CHARS, folder).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not source:
        raise CheckpointError(f"{path} is empty: must be a template")
    return source


def _named(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the templates by name from `chat_template` of a JSON file: a string, a named list, or an object."""
    found = config.get("chat_template")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {one.get("name"): one.get("template") for one in found}
    templates = {_DEFAULT: found} if isinstance(found, str) else {} if found is None else found
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise CheckpointError(
            f"{path}: chat_template must be a string, or a list of objects with a name and a template"
        )
    return templates

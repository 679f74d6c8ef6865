"""Response templates: which delimiters a model writes around its reasoning and its tool calls.

The format is that of transformers (https://huggingface.co/docs/transformers/main/chat_response_parsing). A template
comes from the checkpoint, from a file, or from `jswa/assets/response_templates`. There, a family's template is chosen
by the delimiters that the chat template writes, since fine-tuned models keep those.

In an `AnswerTemplate` each delimiter that is a token of its own stands behind a MARK, as in the text of an `Assembler`.
So a delimiter that the model spells with ordinary tokens is text.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jswa.env import without_advice
from jswa.errors import CheckpointError, ConfigError, JswaError
from jswa.storage.json_object import read_object, read_optional
from jswa.text.assembler import MARK
from jswa.text.special_tokens import CONFIG
from jswa.text.tokenizer import Tokenizer

from .forms.contents import field_reader
from .forms.tags import Tags
from .lenient import LENIENT
from .regions import Delimiter, Regions, automaton_of, delimiter
from .writes import REASONING as REASONING
from .writes import Writes, read_writes

_OURS = ("order", "chat_template_has", "writes", "guarded", "lenient")  # what transformers' format does not have
_CONTENTS = ("pythonic", "parameters", "texts")  # which transformers' format does not have either
SHIPPED = Path(__file__).parents[2] / "assets" / "response_templates"
NONE = "none"  # the name that turns parsing off
CALLS = "tool_calls"
_MOST_BYTES = 2**16  # of a template
_MOST_DELIMITERS = 4096  # characters of all tokens that are delimiters
_MOST_FIELDS = 32
_WRONG = (ValueError, TypeError, AttributeError, KeyError, RecursionError)  # what a wrong template raises


@dataclass(frozen=True)
class CallForm:
    """How a region of tool calls is read.

    Attributes:
        kind: "arguments" if the region is the JSON of the arguments, "dialect" if it is that in a dialect of JSON,
            "parameters" if each argument stands between tags, "objects" if the region is JSON objects, each a call,
            "pythonic" if it is Python calls, or "whole" if it is read at its end in another way.
        name: the key of the function's name in an object, or the capture of the opening delimiter.
        arguments: the key of the arguments in an object.
        quotes: of a dialect, each with the one that ends its string.
        typed: all arguments of the dialect are texts, whose types the tool's schema has.
        tags: around each parameter.
    """

    kind: str
    name: str = "name"
    arguments: str = "arguments"
    quotes: Mapping[str, str] = field(default_factory=dict)
    typed: bool = False
    tags: Tags | None = None


@dataclass(frozen=True)
class Field:
    """One field of a template.

    Attributes:
        strip: white space around its text is dropped.
        join: stands between two regions.
        form: how calls are read; None for text.
        value_of: reads the text of a region of the form "whole", with what the opening delimiter's named groups have
            found. Raises ValueError or RecursionError.
        guarded: its regions may be content: they are calls only of known tools with arguments that fit.
    """

    name: str
    strip: bool
    join: str
    form: CallForm | None = None
    value_of: Callable[[str, Mapping[str, str]], Any] | None = None
    guarded: bool = False


@dataclass(frozen=True)
class AnswerTemplate:
    """A response template for the tokens of one tokenizer.

    Attributes:
        delimiters: texts of the tokens that the template's delimiters consist of, by token id.
        hidden: ids of the tokenizer's special tokens.
        with_calls, lenient, without_calls: the regions of answers in which tool calls are read, of those in which
            other forms of calls are read too, and of those without calls, which may have none.
        fields: the template's fields by name.
        anchor: ends where answers begin in a prompt.
        unmarked: finds the texts of delimiters that are tokens.
        writes: how answers are written.
        name: a shipped template's, or the file that it is from.
        without_guess: the template without calls, if it was chosen by its delimiters, which families share: then
            `jswa.text.answers.probe` finds out whether its calls are right.
    """

    delimiters: Mapping[int, str]
    hidden: frozenset[int]
    with_calls: Regions
    lenient: Regions
    without_calls: Regions | None
    fields: Mapping[str, Field]
    anchor: Delimiter
    unmarked: re.Pattern[str]
    writes: Writes
    name: str = ""
    without_guess: "AnswerTemplate | None" = None

    @property
    def reads_calls(self) -> bool:
        """Whether the form of the model's calls is known."""
        return any(field.form is not None for field in self.fields.values())

    def prefix(self, prompt: str) -> str:
        """Return the part of a rendered prompt that belongs to the answer, with its delimiters marked.

        Families that share delimiters may have other headers. Without the anchor, it is the reasoning that the end of
        the prompt begins, or leaves out.
        """
        begin = self.anchor.last_end(prompt) or self._thought(prompt)
        return self.marked(prompt[begin:]) if begin else ""

    def _thought(self, prompt: str) -> int:
        """Return where the reasoning begins that the end of a prompt opens, or leaves out; 0 if there is none."""
        region = self.writes.reasoning
        mark = "" if region is None else region.begin.strip()
        begin = prompt.rfind(mark) if mark else -1
        if region is None or begin < 0:
            return 0
        rest = prompt[begin + len(mark) :]
        return begin if rest.strip() in ("", region.end.replace("{space}", "").strip()) else 0

    def marked(self, text: str) -> str:
        """Return a rendered text with a MARK before each delimiter."""
        return self.unmarked.sub(lambda found: MARK + found.group(), text)


def find_template(
    folder: Path, tokenizer: Tokenizer, chat_template: str, wanted: str | None = None
) -> AnswerTemplate | None:
    """Return the response template of a checkpoint, or the `wanted` one; None if there is none.

    Args:
        chat_template: the source of the chat template.
        wanted: a JSON file, the name of a template that ships with jswa, or "none".

    Raises ConfigError for a `wanted` template that cannot be used, CheckpointError for one of the checkpoint.
    """
    if wanted == NONE or (wanted is None and find_spec("transformers") is None):
        return None  # without transformers (extra `chat`), nothing can chat
    if wanted is not None:
        try:
            return compile_template(_read(wanted), tokenizer, wanted)
        except (JswaError, *_WRONG) as error:
            raise ConfigError("response_template", wanted, f"cannot be used: {error}") from error
    own = read_optional(folder / CONFIG).get("response_template")
    if own is not None:
        try:
            return compile_template(own, tokenizer, CONFIG)
        except _WRONG as error:
            reason = f"response_template cannot be used: {error}; --response-template names another one"
            raise CheckpointError(f"{folder / CONFIG}: {reason}") from error
    name = shipped_for(chat_template)
    return None if name is None else guessed_template(name, tokenizer)


def guessed_template(name: str, tokenizer: Tokenizer) -> AnswerTemplate:
    """Return a template that ships with jswa, and how much of it holds if its calls are another family's."""
    spec = shipped()[name]
    rest = {
        **{key: value for key, value in spec.items() if key not in ("guarded", "lenient")},
        "fields": {key: value for key, value in spec["fields"].items() if not _has_calls(key)},
        "writes": {key: value for key, value in spec["writes"].items() if key != "calls"},
    }
    return replace(compile_template(spec, tokenizer, name), without_guess=compile_template(rest, tokenizer, name))


def shipped_for(chat_template: str) -> str | None:
    """Return the name of the shipped template whose delimiters a chat template writes; None if there is none."""
    for name, template in shipped().items():
        if any(all(mark in chat_template for mark in marks) for marks in template["chat_template_has"]):
            return name
    return None


@lru_cache(maxsize=1)
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return the templates that ship with jswa by name; one whose delimiters include another's comes first."""
    found = {path.stem: read_object(path) for path in sorted(SHIPPED.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda one: one[1]["order"]))


def compile_template(spec: Mapping[str, Any], tokenizer: Tokenizer, name: str = "") -> AnswerTemplate:
    """Return a response template for the tokens of a tokenizer. `name`: what the log calls it.

    Raises ValueError, TypeError, AttributeError or KeyError if it is not valid, or if its patterns cannot be found in
    one pass.
    """
    with without_advice():
        from transformers.utils.chat_parsing.response_templates import load_response_template

    if not isinstance(spec, Mapping):
        raise TypeError(f"must be an object, not {type(spec).__name__}")
    writes = read_writes(spec)
    said = {key: spec.get(key) or () for key in ("guarded", "lenient")}
    lenient = spec.get("lenient") is not False
    spec = {key: value for key, value in spec.items() if key not in _OURS}
    added = tokenizer.backend.get_added_tokens_decoder()
    written = "\n".join([*_strings(spec), *_strings(said["lenient"])])
    tokens = {
        token: text.content
        for token, text in added.items()
        if not re.fullmatch(r"[\w\s▁]*", text.content)
        and (text.content in written or re.escape(text.content) in written)
    }
    if sum(map(len, tokens.values())) > _MOST_DELIMITERS:
        raise ValueError(f"its delimiters must have at most {_MOST_DELIMITERS} characters together")
    plain = _delimiters(spec)  # before transformers looks at them, whose time for a pattern has no bound
    load_response_template(_known(spec))  # checks it as it was written
    marks = _alternatives(form for text in tokens.values() for form in {text, re.escape(text)})
    marked = _marked(spec, marks)
    fields = marked["fields"]
    others = _lenient(fields, _marked(said["lenient"], marks)) if lenient and any(map(_has_calls, fields)) else {}
    guarded = {*said["guarded"], *others} & {*others, *fields}
    unnamed = {name: field for name, field in fields.items() if not _has_calls(name) or _is_marked(field)}
    anchor = delimiter(spec, "start_anchor")
    assert anchor is not None
    return AnswerTemplate(
        delimiters=tokens,
        hidden=frozenset(
            token
            for token, text in added.items()
            if text.special and (token in tokens or not any(one.touches(text.content) for one in plain))
        ),
        with_calls=Regions.of(fields, guarded & fields.keys()),
        lenient=Regions.of({**others, **fields}, guarded),
        without_calls=Regions.of(unnamed) if unnamed else None,
        fields={name: _field(name, field, guarded=name in guarded) for name, field in {**others, **fields}.items()},
        anchor=anchor,
        unmarked=_alternatives(tokens.values()),
        writes=writes,
        name=name,
    )


def _has_calls(name: str) -> bool:
    return name.startswith(CALLS)


def _lenient(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of other forms of calls: `own` of a template, and those of all templates.

    Objects without an opening delimiter may have the closing one of the family.
    """
    ends = [
        said.get("close_pattern") or "|".join(map(re.escape, _strings(said.get("close"))))
        for name, said in fields.items()
        if _has_calls(name)
    ]
    bare = dict(LENIENT["tool_calls_bare"])
    if any(ends):
        bare["close_pattern"] = "|".join(end for end in ends if end)
    return {**LENIENT, "tool_calls_bare": bare, **dict(own)}


def _delimiters(spec: Mapping[str, Any]) -> list[Delimiter]:
    """Return the delimiters of all fields, and check all delimiters of a template. Raises ValueError or TypeError."""
    fields = spec.get("fields")
    said = [field for field in fields.values() if isinstance(field, Mapping)] if isinstance(fields, Mapping) else []
    if len(said) > _MOST_FIELDS:
        raise ValueError(f"must have at most {_MOST_FIELDS} fields")
    found = [one for field in said for name in ("open", "close") if (one := delimiter(field, name)) is not None]
    for one in (*found, delimiter(spec, "start_anchor")):
        if one is not None:
            automaton_of(one)
    return found


def _read(wanted: str) -> dict[str, Any]:
    if wanted in shipped():
        return dict(shipped()[wanted])
    path = Path(wanted)
    if not path.is_file():
        raise ConfigError("response_template", wanted, f"must be a JSON file or one of {', '.join([*shipped(), NONE])}")
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError("response_template", wanted, f"must have at most {_MOST_BYTES} bytes")
    return read_object(path.resolve())  # the operator has named it, so it may be a link to anywhere


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _strings(one)]


def _alternatives(texts: Any) -> re.Pattern[str]:
    """Return a pattern that finds any of the texts, the longest first; it finds nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _marked(value: Any, delimiters: re.Pattern[str], key: str = "") -> Any:
    """Return a part of a template with a MARK before each delimiter. The anchor is for prompts, and stays as it is."""
    if isinstance(value, str):
        return delimiters.sub(lambda found: MARK + found.group(), value)
    if isinstance(value, Mapping):
        return {k: v if k.startswith("start_anchor") else _marked(v, delimiters, k) for k, v in value.items()}
    return [_marked(one, delimiters) for one in value] if isinstance(value, list) else value


def _is_marked(field: Mapping[str, Any]) -> bool:
    return any(MARK in text for key in ("open", "open_pattern") for text in _strings(field.get(key)))


def _known(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template in which the content that only jswa reads is text."""
    known = copy.deepcopy(dict(spec))
    for one in known["fields"].values() if isinstance(known.get("fields"), dict) else ():
        if isinstance(one, dict) and one.get("content") in _CONTENTS:
            one["content"] = "text"
            one.pop("content_args", None)
    return known


def _field(name: str, field: Mapping[str, Any], *, guarded: bool) -> Field:
    arguments = field.get("content_args", {})
    strip = field.get("content", "text") == "text" and bool(arguments.get("strip", True))
    form = _form(field) if _has_calls(name) else None
    value_of = field_reader(field) if form is not None and form.kind == "whole" else None
    return Field(name, strip, field.get("join") or "", form, value_of, guarded)


def _form(field: Mapping[str, Any]) -> CallForm:
    """Return how calls are read: as they stream where the syntax is plain JSON with a name and arguments."""
    content, arguments = field.get("content"), field.get("content_args") or {}
    function = (field.get("transform") or {}).get("function")
    if content == "pythonic":
        return CallForm("pythonic")
    if content == "json" and not arguments.keys() - {"allow_non_json"}:
        return _json_form(field, function)
    named = _placeholder(function, "name") if _placeholder(function, "arguments") == "content" else None
    if content == "parameters":
        return CallForm("parameters", named or "name", tags=Tags.of(arguments))
    if content not in ("json", "texts") or named is None or "." in named or field.get("transform_each"):
        return CallForm("whole")
    return CallForm("dialect", named, quotes=dict(arguments.get("string_delims", ())), typed=content == "texts")


def _json_form(field: Mapping[str, Any], function: Any) -> CallForm:
    """Return how calls are read whose syntax is plain JSON."""
    if function == "{content}":
        return CallForm("objects")
    name, arguments = (_placeholder(function, key) for key in ("name", "arguments"))
    if name is None or arguments is None:
        return CallForm("whole")
    if field.get("transform_each"):
        return CallForm("objects", name, arguments)
    if arguments == "content" and "." not in name:
        return CallForm("arguments", name)
    if name.startswith("content.") and arguments.startswith("content."):
        return CallForm("objects", name.removeprefix("content."), arguments.removeprefix("content."))
    return CallForm("whole")


def _placeholder(function: Any, key: str) -> str | None:
    """Return NAME if the value of a key in a transform is the placeholder "{NAME}"."""
    text = function.get(key) if isinstance(function, Mapping) else None
    found = re.fullmatch(r"\{([\w.]+)\}", text) if isinstance(text, str) else None
    return None if found is None else found[1]

"""Turn generated text into answer events: reasoning, content and tool calls.

transformers' `ResponseParser` cuts the text into the regions of a response template; this module reads the regions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from jswa.text.assembler import MARK, Assembler
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import AnswerEvent, SamplingParams

from .calls import Piece, Reader, reader
from .plain import patterns_of, plain_texts
from .template import REASONING, AnswerTemplate, CallForm, Field


@dataclass(frozen=True)
class Answering:
    """How the texts of a chat are read as answers.

    Attributes:
        template: None if all text is content.
        tools: the tools that the model may call, in OpenAI's form; without any, calls are content.
        parallel: whether an answer may have several tool calls.
    """

    template: AnswerTemplate | None
    tools: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True

    def prefix(self, prompt: str | None) -> str:
        """Return the part of a rendered prompt that belongs to the answer. The time grows with the prompt's length."""
        return "" if self.template is None or prompt is None else self.template.prefix(prompt)


def assemblers(
    answering: Answering | None,
    tokenizer: Tokenizer | None,
    prefix: str,
    ids: Int[np.ndarray, " P"],
    params: SamplingParams,
    stops: StopTable,
) -> tuple[Assembler, "AnswerParser | None"]:
    """Return the assembler of a text behind a prompt, and the parser of the answer that it is, if it is one.

    Args:
        prefix: of the prompt, as `Answering` gives it.
    """
    if answering is None:
        return Assembler(tokenizer, ids, params, stops), None
    template = answering.template
    parser = AnswerParser(template, prefix, answering.tools, parallel=answering.parallel)
    if template is None:
        return Assembler(tokenizer, ids, params, stops), parser
    delimiters, hidden = template.delimiters, template.hidden
    return Assembler(tokenizer, ids, params, stops, delimiters=delimiters, hidden=hidden), parser


def reasoning_behind(template: AnswerTemplate | None, prefix: str) -> Literal["may", "open", "done"]:
    """Return whether an answer behind a prompt may begin to reason, is reasoning already, or has done so.

    Args:
        prefix: of the prompt, as `Answering` gives it.
    """
    parser = AnswerParser(template, prefix)
    parser.feed("x")  # a delimiter may end in white space, whose end the prompt does not have
    return "open" if parser.in_reasoning else "done" if parser.has_reasoned else "may"


_LOOK_BACK = 256  # characters behind which no delimiter looks back


class AnswerParser:
    """The parser of one answer, whose text comes from an `Assembler`.

    An answer that does not keep to the template never raises: text that cannot be read as a call is content.

    Attributes:
        calls: tool calls that have begun.
        done: the answer is complete, although the model has not ended it: it has the one call that it may have.
    """

    def __init__(
        self,
        template: AnswerTemplate | None,
        prefix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        parallel: bool = True,
    ) -> None:
        """Begin behind a prompt.

        Args:
            template: None if all text is content.
            prefix: the part of the rendered prompt that belongs to the answer.
            tools: the tools that the model may call, in OpenAI's form; without any, calls are content.
            parallel: whether the answer may have several tool calls.
        """
        self.calls = 0
        self.done = False
        self._parallel = parallel
        self._template = template
        self._field: Field | None = None
        self._reader: Reader | None = None
        self._spaces: str | None = None  # white space that is dropped if the region ends behind it; None at its begin
        self._opened: set[str] = set()
        self._before = ""  # the prompt's last characters, if they may begin a delimiter
        self._first: list[AnswerEvent] = []
        self._parser: Any = None
        self._plain: Callable[[str], bool] | None = None  # tells which texts no parser needs to look at
        self._mark = _NOTHING
        if template is not None:
            self._mark = re.compile(MARK + f"({template.unmarked.pattern})")
            self._special = {template.delimiters[token] for token in template.delimiters.keys() & template.hidden}
            self._begin(template, prefix, tools)

    def _begin(self, template: AnswerTemplate, prefix: str, tools: Sequence[Mapping[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        compiled = template.with_calls if tools else template.without_calls
        if compiled is None:
            return
        self._reads_calls = bool(tools)
        self._plain = plain_texts(patterns_of(compiled))
        self._parser = ResponseParser(compiled, prefix="", tools=[_typed(tool) for tool in tools])
        # Text that the chat template has written belongs to the prompt, except for the name of a call that goes on.
        before = list(self._read(prefix))
        names = {event.call: event for event in before if event.kind == "call"}
        ended = {event.call for event in before if event.kind == "end"}
        self._first = [event for call, event in names.items() if call not in ended]
        self._before = "" if self._parser is None else self._parser._buffer[self._parser._pos :]

    @property
    def in_reasoning(self) -> bool:
        """Whether the model is reasoning: the last text was, and its end has not come."""
        return self._field is not None and self._field.name in REASONING

    @property
    def has_reasoned(self) -> bool:
        """Whether reasoning has begun."""
        return not self._opened.isdisjoint(REASONING)

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events of new text."""
        if text and self._plain is not None and not self._first and self._plain(text) and self._goes_on:
            self._skip(text)
            shown = self._shown(self.clean(text))
            found = [AnswerEvent(self._kind, shown)] if shown else []
            return found if self._parallel else self._limited(found)
        if self._template is None:
            return [AnswerEvent("content", shown)] if (shown := self.clean(text)) else []
        events, self._first = self._first, []
        return self._limited([*events, *self._read(text)]) if text else events

    @property
    def _goes_on(self) -> bool:
        """Whether a region of text is open, and nothing that was read may begin a delimiter."""
        parser = self._parser
        if self._field is None or self._reader is not None or self._before or not parser._opened:
            return False
        return bool(parser._pos == len(parser._buffer))

    def _skip(self, text: str) -> None:
        """Let text count as read by transformers' parser, which may look back at it."""
        parser = self._parser
        parser._buffer += text
        parser._pos += len(text)
        if parser._pos > 2 * _LOOK_BACK:
            self._forget()

    def finish(self) -> list[AnswerEvent]:
        """Return the last events, at the end of the text."""
        if self._parser is None:
            return []
        try:
            _, found = self._parser.finalize()
        except Exception:  # a template can be wrong in many ways
            return self._limited(self._broken(""))
        return self._limited(list(self._events(found)))

    def _read(self, text: str) -> Iterator[AnswerEvent]:
        if self._parser is None:
            if shown := self.clean(text):
                yield AnswerEvent("content", shown)
            return
        self._forget()
        try:
            found = self._parser.feed(text)
        except Exception:
            yield from self._broken(text)
            return
        if self._before and found:
            found = _without(found, self._before)
            self._before = ""
        yield from self._events(found)

    def _forget(self) -> None:
        """Drop the text that transformers' parser has read. It would keep all of it, and copy it with every token."""
        parser, field = self._parser, self._field
        # The value of a whole region is made of its text.
        whole = self._reader is not None and field is not None and field.form == CallForm("whole")
        read = parser._pos - _LOOK_BACK
        if read > _LOOK_BACK and not whole:
            parser._buffer, parser._pos = parser._buffer[read:], _LOOK_BACK
            parser._body = ""

    def _events(self, found: Sequence[Mapping[str, Any]]) -> Iterator[AnswerEvent]:
        """Read events of transformers' parser."""
        for index, one in enumerate(found):
            # What named groups of an opening delimiter have found is told at the region's end; until then the parser
            # keeps it.
            ends = (later["value"] for later in found[index:] if later["type"] == "region_close")
            yield from self._event(one, next(ends, self._parser._captures))

    def _event(self, event: Mapping[str, Any], captures: Any) -> Iterator[AnswerEvent]:
        kind, name = event["type"], event["field"]
        if kind == "region_open":
            assert self._template is not None
            self._field = field = self._template.fields[name]
            self._spaces = None
            if field.form is not None and self._reads_calls:
                self._reader = reader(field.form, captures)
                yield from self._pieces(self._reader.feed(""))
            elif name in self._opened and field.join:
                yield AnswerEvent(self._kind, field.join)
            self._opened.add(name)
        elif kind == "region_chunk":
            yield from self._chunk(self.clean(event["text"]))
        elif kind == "region_close":
            if self._reader is not None:
                yield from self._pieces(self._reader.finish(event["value"]))
            self._field = self._reader = None

    def _chunk(self, text: str) -> Iterator[AnswerEvent]:
        assert self._field is not None
        if self._reader is not None:
            yield from self._pieces(self._reader.feed(text))
            return
        if shown := self._shown(text):
            yield AnswerEvent(self._kind, shown)

    def _shown(self, text: str) -> str:
        """Return text of the open region, and hold back white space that is dropped if the region ends behind it."""
        assert self._field is not None
        if not self._field.strip:
            return text
        text = text.lstrip() if self._spaces is None else self._spaces + text
        if not text:
            return ""
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        return shown

    @property
    def _kind(self) -> Literal["reasoning", "content"]:
        """The kind of the open region's text."""
        return "reasoning" if self.in_reasoning else "content"

    def _pieces(self, pieces: Iterator[Piece]) -> Iterator[AnswerEvent]:
        for kind, text in pieces:
            if kind == "content":
                yield AnswerEvent("content", text)
                continue
            self.calls += kind == "call"
            yield AnswerEvent(kind, text, self.calls - 1)

    def _broken(self, text: str) -> list[AnswerEvent]:
        """Give up: the template cannot read the answer. Return its text that was held back; what follows is content."""
        events = [] if self._reader is None else list(self._pieces(self._reader.finish(None)))
        self._parser = self._field = self._reader = None
        return [*events, *([AnswerEvent("content", shown)] if (shown := self.clean(text)) else [])]

    def _limited(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Return the events up to the end of the first call, if there may be only one."""
        if self._parallel:
            return events
        for index, event in enumerate(events):
            if self.done:
                return events[:index]
            self.done = event.kind == "end"
        return events

    def clean(self, text: str) -> str:
        """Return text without marks, and without special tokens that delimit nothing where they stand."""
        if MARK not in text:
            return text
        return self._mark.sub(lambda found: "" if found[1] in self._special else found[1], text)


def _without(events: list[dict[str, Any]], before: str) -> list[dict[str, Any]]:
    """Return the parser's events without the prompt's last characters, which were text after all, if they were."""
    for index, event in enumerate(events):
        if event["type"] == "region_chunk":
            cut = {**event, "text": event["text"].removeprefix(before)}
            return [*events[:index], cut, *events[index + 1 :]]
        if event["type"] == "region_close":
            break
    return events


def _typed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose arguments have schemas of their own: transformers follows no references to their types."""
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    arguments = parameters.get("properties")
    if not isinstance(arguments, dict):
        return dict(tool)
    typed = {name: _followed(schema, parameters) for name, schema in arguments.items()}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": typed}}}


def _followed(schema: Any, root: Any) -> Any:
    """Return the schema that a reference leads to, or one that is no reference; of a circle, a part of it."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not (isinstance(reference, str) and reference.startswith("#/")):
            break
        found = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        schema = found
    return schema


_NOTHING = re.compile(r"(?!)")

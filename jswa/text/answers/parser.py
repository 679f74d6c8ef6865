"""Turn generated text into answer events: reasoning, content and tool calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jswa.text.assembler import MARK
from jswa.types import AnswerEvent, StructuredOutputsParams

from .calls import TextReader, reader
from .forms.casts import Casts
from .forms.pieces import Piece, Reader, Trimmed
from .regions import Cut, Cutter
from .template import REASONING, AnswerTemplate, Field


@dataclass(frozen=True)
class Answering:
    """How the texts of a chat are read as answers.

    Attributes:
        template: None if all text is content.
        tools: the tools that the model may call, in OpenAI's form; without any, calls are content.
        parallel: whether an answer may have several tool calls.
        form: what was asked of the content. With one, only the family's own form of calls is read.
    """

    template: AnswerTemplate | None
    tools: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True
    form: StructuredOutputsParams | None = None

    def prefix(self, prompt: str | None) -> str:
        """Return the part of a rendered prompt that belongs to the answer. The time grows with the prompt's length."""
        return "" if self.template is None or prompt is None else self.template.prefix(prompt)


def reasoning_behind(template: AnswerTemplate | None, prefix: str) -> Literal["may", "open", "done"]:
    """Return whether an answer behind a prompt may begin to reason, is reasoning already, or has done so.

    Args:
        prefix: of the prompt, as `Answering` gives it.
    """
    parser = AnswerParser(template, prefix)
    parser.feed("x")  # a delimiter may end in white space, whose end the prompt does not have
    return "open" if parser.in_reasoning else "done" if parser.has_reasoned else "may"


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
        form: StructuredOutputsParams | None = None,
    ) -> None:
        """Begin behind a prompt.

        Args:
            template: None if all text is content.
            prefix: the part of the rendered prompt that belongs to the answer.
            tools: the tools that the model may call, in OpenAI's form; without any, calls are content.
            parallel: whether the answer may have several tool calls.
            form: what was asked of the content.
        """
        self.calls = 0
        self.done = False
        self._parallel = parallel
        self._template = template
        self._field: Field | None = None
        self._kind: Literal["reasoning", "content"] = "content"  # of the open region's text
        self._reader: Reader | None = None
        self._raw = False  # the reader takes text with marks
        self._trimmed: Trimmed | None = None  # of a region whose white space at both ends is dropped
        self._opened: set[str] = set()
        self._first: list[AnswerEvent] = []
        self._cutter: Cutter | None = None
        self._mark = _NOTHING
        if template is not None:
            self._mark = re.compile(MARK + f"({template.unmarked.pattern})")
            self._special = {template.delimiters[token] for token in template.delimiters.keys() & template.hidden}
            self._reads_calls = bool(tools)
            self._form = form
            regions = template.without_calls
            if tools:
                regions = template.lenient if form is None else template.with_calls
            if regions is not None:
                self._casts = Casts(tools)
                self._cutter = Cutter(regions, self._mark, len(prefix), self._holds)
                # Text that the chat template has written belongs to the prompt, except for the name of a call that
                # goes on.
                before = self._read(prefix) if prefix else []
                names = {event.call: event for event in before if event.kind == "call"}
                ended = {event.call for event in before if event.kind == "end"}
                self._first = [event._replace(call=0) for call, event in names.items() if call not in ended]
                self.calls = len(self._first)  # one at most: only the last call may go on

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
        if not text and self._template is not None:
            events, self._first = self._first, []
            return events
        passed = None if self._cutter is None else self._cutter.passing(text)
        if passed is None:
            events = self._read(text)
        elif not passed:
            events = []
        elif self._reader is not None:
            self._pieces(self._reader.feed(passed if self._raw else self.clean(passed)), events := [])
        else:
            events = [AnswerEvent(self._kind, shown)] if (shown := self._shown(passed)) else []
        if self._first:
            events, self._first = [*self._first, *events], []
        return events if self._parallel else self._limited(events)

    def finish(self) -> list[AnswerEvent]:
        """Return the last events, at the end of the text."""
        events, self._first = self._first, []
        return self._limited([*events, *(self._read("", last=True) if self._cutter is not None else ())])

    def _read(self, text: str, *, last: bool = False) -> list[AnswerEvent]:
        cutter = self._cutter
        if cutter is None:
            return [AnswerEvent("content", shown)] if (shown := self.clean(text)) else []
        events: list[AnswerEvent] = []
        for cut in cutter.feed(text, last=last):
            if cut.kind == "new" and self._reader is None:
                if shown := self._shown(cut.text or ""):
                    events.append(AnswerEvent(self._kind, shown))
            else:
                self._cut(cut, events)
        return events

    def _cut(self, cut: Cut, events: list[AnswerEvent]) -> None:
        """Add the events of a part of the answer."""
        text = cut.text or ""
        if cut.kind == "open":
            self._open(cut, events)
        elif cut.kind == "close":
            if self._reader is not None:
                self._pieces(self._reader.finish(cut.text), events)
            self._field = self._reader = None
        elif cut.kind == "rest":  # which is content
            self._cutter = None
            if shown := self.clean(text):
                events.append(AnswerEvent("content", shown))
        elif self._reader is not None:
            begin = len(events)
            self._pieces(self._reader.feed(text if self._raw else self.clean(text)), events)
            if cut.kind == "old":  # of what the prompt has, only the call is told
                events[begin:] = [event for event in events[begin:] if event.kind in ("call", "end")]
        else:
            self._shown(text)
            if self._trimmed is not None:
                self._trimmed.forget()

    def _open(self, cut: Cut, events: list[AnswerEvent]) -> None:
        assert self._template is not None
        self._field = field = self._template.fields[cut.field]
        self._kind = "reasoning" if self.in_reasoning else "content"
        if field.form is not None:
            self._raw = field.form.kind in ("dialect", "parameters", "whole")
            if self._reads_calls:
                self._reader = reader(field, cut.names, cut.text or "", self._casts, self._form)
            else:
                named = field.form.kind == "arguments"  # of a message's header, only the name is content
                self._reader = TextReader(cut.names.get(field.form.name, "") if named else cut.text or "")
            self._pieces(self._reader.feed(""), events)
        else:
            self._trimmed = Trimmed() if field.strip else None
            if cut.field in self._opened and field.join:
                events.append(AnswerEvent(self._kind, field.join))
        self._opened.add(cut.field)

    def _holds(self, closing: str) -> bool:
        return self._reader is not None and self._reader.holds(closing)

    def _shown(self, text: str) -> str:
        """Return text of the open region, and hold back white space that is dropped if the region ends after it."""
        if MARK in text:
            text = self.clean(text)
        return text if self._trimmed is None else self._trimmed.add(text)

    def _pieces(self, pieces: Sequence[Piece], events: list[AnswerEvent]) -> None:
        """Add the events of what a reader has found."""
        for kind, text in pieces:
            if MARK in text:  # in a region that is read with its marks, or in a name that an opening delimiter has
                text = self.clean(text)
            if kind == "content":
                if text:
                    events.append(AnswerEvent("content", text))
                continue
            self.calls += kind == "call"
            events.append(AnswerEvent(kind, text, self.calls - 1))

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
        shown = self._mark.sub(lambda found: "" if found[1] in self._special else found[1], text)
        return shown.replace(MARK, "")


_NOTHING = re.compile(r"(?!)")

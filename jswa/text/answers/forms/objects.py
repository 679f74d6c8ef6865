"""Read tool calls that are JSON objects, as their text streams."""

import json
import re
from collections.abc import Sequence

from .pieces import NO_ARGUMENTS, Piece
from .texts import HALVES

# What makes no difference as far as one text has it as a whole: in a value that is inside of another, in another value,
# before what may be an object that streams, and between members, with a key and without. A string is no key if another
# one or a comma follows.
_FLAT = r'\{[^{}\[\]"]*+\}|\[[^{}\[\]"]*+\]'  # brackets in pairs, without others or strings inside
_WHOLE = r'"(?:[^"\\]|\\.)*+"'
_DEEP = re.compile(rf'(?:[^{{}}\[\]"]++|{_FLAT}|{_WHOLE})*+', re.DOTALL)
_VALUE = re.compile(rf'(?:[^{{}}\[\]",]++|{_FLAT}|{_WHOLE})*+', re.DOTALL)
_BEGIN = re.compile(r'[^{}\[\]",]*+')
_KEYED = re.compile(rf'(?:[^{{}}\[\]":,]++|{_FLAT})*+')
_KEYS = re.compile(rf'(?:[^{{}}\[\]":]++|{_FLAT}|{_WHOLE}(?=\s*+[",]))*+', re.DOTALL)
_MARK = re.compile(r"[{\[]++|[}\]]++|.", re.DOTALL)
# Objects without a quote, which have no name.
_NAMELESS = re.compile(r'\{[^{}\[\]"]*+\}(?:[^{}"]*+\{[^{}\[\]"]*+\})*+')
_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)  # the inside of a string, up to its end or to half an escape
_BETWEEN = re.compile(r"[\s,;\[\]{}]*+")  # what may stand around objects
_OTHERS = {'"id"', '"type"', '"index"', '"tool_call_id"'}  # keys that calls may have besides


class ObjectsReader:
    """A region with JSON objects, or a list of them; each object is a call.

    Its arguments stream once its name is known. What is no call is content, as it was written: an object without a
    name, or with a name and without arguments but with other members, and text around objects.

    Attributes:
        doubtful: a call had no arguments, or members that calls do not have.
    """

    def __init__(self, names: Sequence[str], arguments: str, opening: str) -> None:
        """Begin a region.

        Args:
            names: keys that the function's name may have.
            arguments: the key of the arguments.
            opening: the delimiter before the region.
        """
        self.doubtful = False
        # Models mix up the two names that families have for the arguments.
        self._roles = {json.dumps(key): "arguments" for key in (arguments, "arguments", "parameters")}
        self._roles |= {json.dumps(name): "name" for name in names}
        self._opening = opening
        self._calls = 0
        self._pending: list[str] = []  # text that belongs to no call, or may belong to none
        self._found: list[Piece] = []  # that were not returned yet
        self._depth = 0
        self._begin()

    def _begin(self) -> None:
        """Begin an object."""
        self._quoted = self._escaped = self._broken = False
        self._object: list[str] | None = []  # its text, until it is known to be a call
        self._key = ""  # the key of the open member, as it is written
        self._key_at = slice(0)  # its place in `_extra`
        self._string: list[str] | None = None  # the text of a string that may be a key
        self._value: list[str] | None = None  # the value that is not passed on; None outside of values
        self._awaits = False  # the value will be passed on if it is an object
        self._streams = False  # the value is passed on
        self._passed = False  # it was passed on up to its end
        self._name: str | None = None
        self._late: str | None = None  # arguments that could not stream
        self._complete = False  # the arguments are known, or pass; later ones of the same object are ignored
        self._others = False  # it has members that calls do not have
        self._extra: list[str] = []  # text of such members, and between members

    def holds(self, closing: str) -> bool:
        """Return whether a delimiter here is text: inside of a string, unless that has a line end, as none in JSON."""
        return self._depth > 0 and self._quoted and not self._broken

    def feed(self, text: str) -> list[Piece]:
        """Read the next text of the region."""
        if self._depth > 1 and not self._escaped and (_STRING if self._quoted else _DEEP).fullmatch(text):
            self._broken |= self._quoted and "\n" in text
            self._pass(text)
            return self._told()
        at = 0
        while at < len(text):
            if self._depth:
                at = self._inside(text, at)
                continue
            inner = text.find("{", at)
            inner = len(text) if inner < 0 else inner
            if found := _NAMELESS.match(text, inner):
                inner = found.end()
            self._pending.append(text[at:inner])
            if not found and inner < len(text):
                self._begin()
                self._depth, inner = 1, inner + 1
                self._take("{")
            at = inner
        return self._told()

    def finish(self, closing: str | None) -> list[Piece]:
        """End the object that is open. `closing`: the delimiter after the region; None if the answer ends in it."""
        if self._depth:
            self._end(whole=False)
        if not self._calls:
            self._pending = [self._opening, *self._pending, closing or ""]
        self._tell()
        return self._told()

    def _told(self) -> list[Piece]:
        """Return what was found since the last time."""
        found, self._found = self._found, []
        return found

    def _tell(self) -> None:
        """Pass on the text that belongs to no call, unless it only separates calls."""
        text = "".join(self._pending)
        if not _BETWEEN.fullmatch(text) or not self._calls:
            self._found.append(("content", text))
        self._pending = []

    def _recognise(self) -> None:
        """Begin the call that the open object is."""
        assert self._name is not None
        self._object = None
        self._calls += 1
        self._tell()
        self._found.append(("call", self._name))

    def _inside(self, text: str, at: int) -> int:
        """Read an object from a place on, up to its end or to that of the text; return the place."""
        begin = at  # of the text that was not taken
        while at < len(text):
            if self._quoted:
                at = self._in_string(text, at)
                if self._string is not None and not self._quoted:  # a key, maybe
                    self._pass(text[begin:at])
                    self._key, self._string, begin = "".join(self._string), None, at
                    self._key_at = slice(self._key_at.start, len(self._extra))
                continue
            skipped = self._same().match(text, at)
            assert skipped is not None
            start = skipped.end()
            found = _MARK.match(text, start)
            if found is None:
                break
            mark, at = found.group(), found.end()
            if mark == '"':
                self._quoted, self._broken = True, False
                if self._depth == 1 and self._value is None:
                    self._pass(text[begin:start])
                    begin, self._string = start, []
                    self._key_at = slice(len(self._extra), None)
            elif mark[0] in "{[":
                self._depth += len(mark)
            elif mark[0] in "}]":
                at = start + self._close(len(mark))
                begin = self._closed(text, begin, at)
                if not self._depth:
                    return at
            else:
                self._pass(text[begin:start])
                self._between(mark)
                begin = at
        self._pass(text[begin:])
        return len(text)

    def _same(self) -> re.Pattern[str]:
        """Return what makes no difference at this place."""
        if self._depth > 1:
            return _DEEP
        if self._value is None:
            return _KEYED if self._key else _KEYS
        return _BEGIN if self._awaits else _VALUE

    def _close(self, count: int) -> int:
        """Close some brackets, those of the object last and alone; return how many were closed."""
        closed = min(count, max(self._depth - 1, 1))
        self._depth -= closed
        return closed

    def _closed(self, text: str, begin: int, at: int) -> int:
        """End what was closed before a place in the text; return up to where the text was taken."""
        if self._depth > 1:
            return begin
        if self._depth == 1:
            self._pass(text[begin:at])
            self._streams, self._passed = False, self._passed or self._streams
        else:
            self._pass(text[begin : at - 1])
            self._member()
            self._take(text[at - 1])
            self._end(whole=True)
        return at

    def _between(self, mark: str) -> None:
        """Read what stands before a value, or after it."""
        if mark == ":":
            self._value = []
            if self._is_other():
                self._others = True
                self._extra.append(mark)
            else:
                del self._extra[self._key_at]
            waits = self._name is not None and not self._complete
            self._awaits = waits and self._roles.get(self._key) == "arguments"
        else:
            if self._value is None:
                self._extra.append(mark)
            self._member()
        self._take(mark)

    def _in_string(self, text: str, at: int) -> int:
        """Return the place behind the end of the open string, or of the text."""
        begin = at
        if self._escaped:
            self._escaped, at = False, at + 1
        found = _STRING.match(text, at)
        assert found is not None
        at = found.end()
        self._broken |= "\n" in text[begin:at]
        if at < len(text):
            self._quoted = self._escaped = text[at] == "\\"
            at += 1
        return at

    def _take(self, text: str) -> None:
        """Keep text that may turn out to be no call, and that of a key."""
        if self._object is not None:
            self._object.append(text)
        if self._string is not None:
            self._string.append(text)

    def _pass(self, text: str) -> None:
        """Take text that may belong to a value, and pass it on if it is that of the arguments."""
        if self._value is None or not text:
            self._take(text)
            self._extra.append(text)
            return
        if self._awaits and (begins := text.lstrip()):
            self._awaits = False
            if begins[0] == "{":
                self._streams = self._complete = True
                self._recognise()
                text = begins
        self._take(text)
        if self._streams:
            self._found.append(("arguments", text))
        elif self._is_other() or self._passed:
            self._extra.append(text)
        elif self._key in self._roles and (self._value or not text.isspace()):
            self._value.append(text)

    def _is_other(self) -> bool:
        """Return whether the open member is none that calls have."""
        return self._key not in self._roles and self._key not in _OTHERS

    def _member(self) -> None:
        """Read a key with its value, whose end was found."""
        role = self._roles.get(self._key)
        if self._value and role is not None:
            written = "".join(self._value).strip()
            if role == "arguments" and not self._complete:
                text = _string(written)
                self._late = written if text is None else text
                self._complete = True
            elif role == "name" and self._name is None:
                self._name = _string(written)
        self._key, self._value, self._streams, self._passed, self._awaits = "", None, False, False, False

    def _end(self, *, whole: bool) -> None:
        shown = self._object is None
        if not shown and self._name is not None and (self._complete or not self._others):
            self._recognise()
            if whole or self._late is not None:
                late = NO_ARGUMENTS if self._late in (None, "", "null") else self._late
                self._found.append(("arguments", late))
        if self._object is None:
            self._found.append(("end", ""))
            self.doubtful |= self._others or not self._complete
            if not _BETWEEN.fullmatch(extra := "".join(self._extra)):
                self._pending.append(extra)
        else:
            self._pending += self._object
        self._depth = 0


def _string(written: str) -> str | None:
    """Return the value of a JSON string; None if it is anything else."""
    if not written.startswith('"'):
        return None
    try:
        value = json.loads(written)
    except ValueError:
        return None
    if not isinstance(value, str) or HALVES.search(value):
        return None
    return value

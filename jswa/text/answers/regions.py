"""Cut an answer into the regions of a response template.

A region begins at the opening delimiter of a field, and only its own closing delimiter ends it. Text outside belongs to
the field without an opening delimiter, if there is one.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from jswa.text.patterns.automaton import Automaton
from jswa.text.patterns.search import Match, Search, matches
from jswa.text.patterns.syntax import Node, literals, parse

_LONGEST = 256  # characters of a delimiter that is a text
_MOST = 32  # texts of a delimiter
_SHORT = 64  # characters that are read twice if they do not pass
_MOST_REGIONS = 1_024  # that are cut; no answer means more, and each costs as much as a thousand characters


@dataclass(frozen=True)
class Delimiter:
    """A delimiter: one of some texts, or what a pattern matches."""

    texts: tuple[str, ...] = ()
    pattern: str = ""

    def tree(self) -> Node:
        """Return what matches the delimiter. Raises ValueError."""
        return literals(self.texts) if self.texts else parse(self.pattern)

    def last_end(self, text: str) -> int:
        """Return where the last one in a text ends, as far as that can be told; 0 if there is none."""
        if self.texts:
            return max(text.rfind(one) + len(one) if one in text else 0 for one in self.texts)
        end = 0
        with suppress(ValueError):  # the text is too ambiguous from there on
            for match in matches(automaton_of(self), text):
                end = match.end
        return end

    def touches(self, text: str) -> bool:
        """Return whether more than one character of a text is, or begins, such a delimiter."""
        search = Search(automaton_of(self))
        _, match = search.scan(text)
        while match is not None:
            if match.end - match.start > 1:
                return True
            _, match = search.scan()
        return len(search.rest) > 1


def delimiter(said: Mapping[str, Any], name: str) -> Delimiter | None:
    """Return the delimiter that a part of a response template has under a name. Raises ValueError or TypeError."""
    if f"{name}_pattern" in said:
        return Delimiter(pattern=said[f"{name}_pattern"])
    if name not in said:
        return None
    texts = (said[name],) if isinstance(said[name], str) else tuple(said[name])
    if len(texts) > _MOST or max(map(len, texts)) > _LONGEST:
        raise ValueError(f"{name} must have at most {_MOST} texts of at most {_LONGEST} characters")
    return Delimiter(texts)


@lru_cache(maxsize=256)
def automaton_of(*delimiters: Delimiter) -> Automaton:
    """Return the automaton that finds some delimiters. Raises ValueError."""
    return Automaton([one.tree() for one in delimiters])


@dataclass(frozen=True)
class Regions:
    """The regions of a response template.

    Attributes:
        outside: finds what opens a region, and what closes the field without an opening delimiter.
        opened: the field that each delimiter of `outside` opens; None for the one that closes.
        closes: finds the closing delimiter of each field that has an opening one.
        implicit: the field without an opening delimiter; None if there is none.
    """

    outside: Automaton
    opened: tuple[str | None, ...]
    closes: Mapping[str, Automaton]
    implicit: str | None

    @classmethod
    def of(cls, fields: Mapping[str, Mapping[str, Any]]) -> "Regions":
        """Return the regions of a template's fields. Raises ValueError."""
        opens = {name: one for name in sorted(fields) if (one := delimiter(fields[name], "open")) is not None}
        implicit = next((name for name in fields if name not in opens), None)
        close = None if implicit is None else delimiter(fields[implicit], "close")
        ends = {name: delimiter(fields[name], "close") for name in opens}
        return cls(
            outside=automaton_of(*opens.values(), *([] if close is None else [close])),
            opened=(*opens, *([] if close is None else [None])),
            closes={name: automaton_of() if end is None else automaton_of(end) for name, end in ends.items()},
            implicit=implicit,
        )


class Cut(NamedTuple):
    """The begin or the end of a region, or text in it: "old" for text of the prompt, "new" for the model's.

    `names`: what the named groups of the opening delimiter have found. The last cut may be the "rest" of the text, if
    the delimiters are too ambiguous to find more of them, or there were too many.
    """

    kind: Literal["open", "old", "new", "close", "rest"]
    field: str
    text: str = ""
    names: Mapping[str, str] = {}


class Cutter:
    """An answer as it is cut, in a time proportional to its length.

    Attributes:
        field: the open region, also if it is the field without an opening delimiter; None if none is open.
    """

    def __init__(self, regions: Regions, whole: re.Pattern[str], prompted: int) -> None:
        """Begin an answer.

        Args:
            whole: texts that are not cut.
            prompted: characters of the answer that stand in the prompt.
        """
        self.field: str | None = None
        self._regions = regions
        self._search = Search(regions.outside, whole)
        self._prompted = prompted
        self._at = 0
        self._ended = 0  # regions with an opening delimiter

    def passing(self, text: str) -> str | None:
        """Read the next text, if the open region goes on in all of it; return what is known to belong to the region."""
        if self.field is None or self._at < self._prompted or len(text) > _SHORT:
            return None
        passed = self._search.passing(text)
        if passed:
            self._at += len(passed)
        return passed

    def feed(self, text: str, *, last: bool = False) -> list[Cut]:
        """Return what more text tells.

        Args:
            last: the answer ends there.
        """
        cuts: list[Cut] = []
        search = self._search
        match: Match | None
        try:
            before, match = search.scan(text, last=last)
            if before:
                self._text(before, cuts)
            while match is not None:
                self._at = match.end
                self._delimited(match, cuts)
                before, match = search.scan(last=last)
                if before:
                    self._text(before, cuts)
        except ValueError:
            if self.field is not None:
                cuts.append(self._close())
            return [*cuts, Cut("rest", "", search.rest[max(self._prompted - self._at, 0) :])]
        if last and self.field is not None:
            cuts.append(self._close())
        return cuts

    def _text(self, text: str, cuts: list[Cut]) -> None:
        if self.field is None:
            if self._regions.implicit is None:
                self._at += len(text)
                return  # the template has no place for it
            self.field = self._regions.implicit
            cuts.append(Cut("open", self.field))
        if self._at < self._prompted:
            old = self._prompted - self._at
            cuts.append(Cut("old", self.field, text[:old]))
            self._at, text = self._at + min(old, len(text)), text[old:]
        if text:
            self._at += len(text)
            cuts.append(Cut("new", self.field, text))

    def _delimited(self, match: Match, cuts: list[Cut]) -> None:
        regions, search = self._regions, self._search
        inside = self.field is not None and self.field != regions.implicit
        if self.field is not None:
            cuts.append(self._close())
        opened = None if inside else regions.opened[match.number]
        if inside:
            search.automaton = regions.outside
            self._ended += 1
            if self._ended == _MOST_REGIONS:
                raise ValueError("the answer has too many regions")
        elif opened is not None:
            self.field = opened
            search.automaton = regions.closes[opened]
            cuts.append(Cut("open", opened, "", match.names))
        elif match.start == match.end:
            search.block()  # otherwise it would be found there again

    def _close(self) -> Cut:
        assert self.field is not None
        field, self.field = self.field, None
        return Cut("close", field)

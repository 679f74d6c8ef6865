"""Cut an answer into the regions of a response template.

A region begins at the opening delimiter of a field, and only its own closing delimiter ends it. Text outside belongs to
the field without an opening delimiter, if there is one.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from jswa.text.patterns.automaton import Automaton
from jswa.text.patterns.search import Match, Search, matches
from jswa.text.patterns.syntax import Ahead, Choice, Node, Sequence, literals, parse

from .writes import REASONING

_LONGEST = 256  # characters of a delimiter that is a text
_MOST = 32  # texts of a delimiter
_SHORT = 64  # characters that are read twice if they do not pass
_MOST_REGIONS = 1_024  # that are cut; no answer means more, and each costs as much as a thousand characters


@dataclass(frozen=True)
class Delimiter:
    """A delimiter: one of some texts, or what a pattern matches. `ahead`: it belongs to what follows."""

    texts: tuple[str, ...] = ()
    pattern: str = ""
    ahead: bool = False

    def tree(self) -> Node:
        """Return what matches the delimiter. Raises ValueError."""
        tree = literals(self.texts) if self.texts else parse(self.pattern)
        return Ahead(_within(tree)) if self.ahead else tree

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


def _within(tree: Node) -> Node:
    """Return a tree for the inside of a lookahead: its own lookaheads become part of its matches."""
    match tree:
        case Sequence(parts=(*before, last)):
            return Sequence((*before, _within(last)))
        case Choice(parts=parts):
            return Choice(tuple(map(_within, parts)))
        case Ahead(part=part):
            return part
    return tree


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
    def of(cls, fields: Mapping[str, Mapping[str, Any]], guarded: Collection[str] = ()) -> "Regions":
        """Return the regions of a template's fields. Raises ValueError.

        Args:
            guarded: fields whose regions may turn out to be content, and so end where any other field begins.
        """
        opens = {name: one for name in sorted(fields) if (one := delimiter(fields[name], "open")) is not None}
        implicit = next((name for name in fields if name not in opens), None)
        close = None if implicit is None else delimiter(fields[implicit], "close")
        begins = [replace(one, ahead=True) for name, one in opens.items() if name not in guarded]
        ends = {name: [] if (end := delimiter(fields[name], "close")) is None else [end] for name in opens}
        for name in guarded:
            ends[name] += begins
        return cls(
            outside=automaton_of(*opens.values(), *([] if close is None else [close])),
            opened=(*opens, *([] if close is None else [None])),
            closes={name: automaton_of(*some) for name, some in ends.items()},
            implicit=implicit,
        )


class Cut(NamedTuple):
    """The begin or the end of a region, or text in it: "old" for text of the prompt, "new" for the model's.

    `text`: of "open" and "close" it is the delimiter; the end of the answer closes a region with None. `names`: what
    the named groups of the opening delimiter have found. The last cut may be the "rest" of the text, if the delimiters
    are too ambiguous to find more of them, or there were too many.
    """

    kind: Literal["open", "old", "new", "close", "rest"]
    field: str
    text: str | None = ""
    names: Mapping[str, str] = {}


class Cutter:
    """An answer as it is cut, in a time proportional to its length.

    Attributes:
        field: the open region, also if it is the field without an opening delimiter; None if none is open.
    """

    def __init__(self, regions: Regions, whole: re.Pattern[str], prompted: int, holds: Callable[[str], bool]) -> None:
        """Begin an answer.

        Args:
            whole: texts that are not cut.
            prompted: characters of the answer that stand in the prompt.
            holds: tells of a closing delimiter that follows the text so far whether it is text of the open region.
        """
        self.field: str | None = None
        self._regions = regions
        self._search = Search(regions.outside, whole)
        self._prompted = prompted
        self._holds = holds
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

    def feed(self, text: str, *, last: bool = False) -> Iterator[Cut]:
        """Yield what more text tells. Each cut is to be read before the next one is asked for.

        Args:
            last: the answer ends there.
        """
        search = self._search
        match: Match | None
        try:
            before, match = search.scan(text, last=last)
            if before:
                yield from self._text(before)
            while match is not None:
                yield from self._delimited(match)
                before, match = search.scan(last=last)
                if before:
                    yield from self._text(before)
        except ValueError:
            if self.field is not None:
                yield self._close(None)
            yield Cut("rest", "", search.rest[max(self._prompted - self._at, 0) :])
            return
        if last and self.field is not None:
            yield self._close(None)

    def _text(self, text: str) -> Iterator[Cut]:
        if self.field is None:
            if self._regions.implicit is None:
                self._at += len(text)
                return  # the template has no place for it
            self.field = self._regions.implicit
            yield Cut("open", self.field)
        if self._at < self._prompted:
            old = self._prompted - self._at
            yield Cut("old", self.field, text[:old])
            self._at, text = self._at + min(old, len(text)), text[old:]
        if text:
            self._at += len(text)
            yield Cut("new", self.field, text)

    def _delimited(self, match: Match) -> Iterator[Cut]:
        regions, search = self._regions, self._search
        inside = self.field is not None and self.field != regions.implicit
        empty = match.start == match.end
        if inside and self._holds(match.text):
            if empty:
                search.block()
            yield from self._text(match.text)
            return
        self._at = match.end
        field = self.field
        if field is not None:
            yield self._close(match.text if inside else "")
        opened = None if inside else regions.opened[match.number]
        if inside:
            search.automaton = regions.outside
            if field in REASONING:
                search.begin()
            self._ended += 1
            if self._ended == _MOST_REGIONS:
                raise ValueError("the answer has too many regions")
        elif opened is not None:
            self.field = opened
            search.automaton = regions.closes[opened]
            yield Cut("open", opened, match.text, match.names)
        elif empty:
            search.block()  # otherwise it would be found there again

    def _close(self, delimiter: str | None) -> Cut:
        assert self.field is not None
        field, self.field = self.field, None
        return Cut("close", field, delimiter)

"""Read a regular expression of Python as a tree.

Constructs that no automaton can match (backreferences, lookbehind, …) are refused. `.` is any character, as with the
flag DOTALL.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_NESTED = 50
_MOST_TIMES = 1000
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_FUZZY = re.compile(r"\{\s*(?:\d+\s*<=?\s*)?[eids]\s*(?:[<=,+:][^{}]*)?\}")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]*\}|.)", re.DOTALL)
_SET = re.compile(r"\[(?!:)\^?\]?(?:\\.|[^\]\\[]|\[(?!:))*+\]", re.DOTALL)  # "[:alpha:]" is none
_BRACKET = re.compile(r"(\\.)|\[", re.DOTALL)
_GROUP = re.compile(r"\(\?P?<(\w+)>")
_ANY = re.compile(r".", re.DOTALL)
_CONTROLS = {"\\n": "\n", "\\t": "\t", "\\r": "\r"}
_FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")


@dataclass(frozen=True)
class One:
    """One character: `source` if it is `literal`, otherwise one of the set that the expression `source` describes."""

    source: str
    literal: bool = True
    any_case: bool = False


@dataclass(frozen=True)
class Sequence:
    """Parts that follow each other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """One of several parts, the first that matches."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """A part several times, as often as possible if it is `greedy`. `most`: None without a bound."""

    part: "Node"
    least: int
    most: int | None
    greedy: bool


@dataclass(frozen=True)
class Named:
    """A part whose text has a name."""

    part: "Node"
    name: str


@dataclass(frozen=True)
class Ahead:
    """A part that must follow, and does not belong to the match. Only a match's end may be one."""

    part: "Node"


@dataclass(frozen=True)
class Edge:
    """The begin of the text, or its end."""

    begin: bool


Node = One | Sequence | Choice | Repeat | Named | Ahead | Edge
_LINE_END = Ahead(Sequence((Repeat(One("\n"), 0, 1, greedy=True), Edge(begin=False))))
_EDGES: dict[str, Node] = {"^": Edge(begin=True), "\\A": Edge(begin=True), "\\Z": Edge(begin=False), "$": _LINE_END}


def literals(texts: Iterable[str]) -> Node:
    """Return the tree of a choice of texts; the longest are tried first."""
    ordered = sorted(texts, key=len, reverse=True)
    return Choice(tuple(Sequence(tuple(One(character) for character in text)) for text in ordered))


def parse(source: str) -> Node:
    """Return the tree of an expression. Raises ValueError for one that is wrong, or that no automaton matches."""
    reading = _Reading(source)
    tree = reading.choice(0)
    if reading.at < len(source):
        raise reading.refused("an unbalanced parenthesis")
    return tree


class _Reading:
    def __init__(self, source: str) -> None:
        self.at = 0
        self._source = source
        self._any_case = False

    def choice(self, depth: int) -> Node:
        """Read alternatives up to a closing parenthesis."""
        if depth > _MOST_NESTED:
            raise self.refused(f"more than {_MOST_NESTED} groups in each other")
        parts = [self._sequence(depth)]
        while self._skip("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self._source) and self._source[self.at] not in "|)":
            part = self._part(depth)
            if part is not None:
                parts.append(self._repeated(part))
        return Sequence(tuple(parts))

    def _part(self, depth: int) -> Node | None:
        """Read one part; None if it is a flag."""
        source, at = self._source, self.at
        if source[at] == "(":
            return self._group(depth)
        if source[at] in "*+?":
            raise self.refused("nothing to repeat")
        found = {"[": _SET, "\\": _ESCAPE}.get(source[at], _ANY).match(source, at)
        if found is None:
            raise self.refused("an unfinished set or escape")
        self.at = found.end()
        if found.group() in _EDGES:
            return _EDGES[found.group()]
        if source[at] == "\\" and re.fullmatch(r"\\(?:[0-9]|[^\W\dNxuUdDwWsSntrfva_])", found.group()):
            self.at = at
            raise self.refused(f"{found.group()} cannot be matched in one pass")
        return self._one(found.group())

    def _one(self, source: str) -> One:
        literal = _CONTROLS.get(source, source[1:] if source[0] == "\\" and not source[1].isalpha() else source)
        if len(literal) == 1 and source != ".":
            return One(re.escape(literal), literal=False, any_case=True) if self._any_case else One(literal)
        if source[0] == "[":  # a bracket in it is a character
            source = "[" + _BRACKET.sub(lambda found: found[1] or r"\[", source[1:-1]) + "]"
        try:
            re.compile(source, re.DOTALL)
        except re.error as error:
            raise self.refused(str(error)) from error
        return One(source, literal=False, any_case=self._any_case)

    def _group(self, depth: int) -> Node | None:
        source = self._source
        if flags := _FLAGS.match(source, self.at):
            if set(flags[1]) - set("is"):
                raise self.refused(f"the flags {flags[1]}")
            self._any_case |= "i" in flags[1]
            self.at = flags.end()
            return None
        name = _GROUP.match(source, self.at)
        opening = name.group() if name else next((o for o in ("(?:", "(?=") if source.startswith(o, self.at)), "(")
        if opening == "(" and source.startswith("(?", self.at):
            raise self.refused(f"{source[self.at : self.at + 4]}… cannot be matched in one pass")
        self.at += len(opening)
        part = self.choice(depth + 1)
        if not self._skip(")"):
            raise self.refused("a group without its end")
        return Named(part, name[1]) if name else Ahead(part) if opening == "(?=" else part

    def _repeated(self, part: Node) -> Node:
        """Read what tells how often a part comes."""
        source = self._source
        counts: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        most: int | None
        if self.at < len(source) and source[self.at] in counts:
            least, most = counts[source[self.at]]
            self.at += 1
        elif (found := _COUNT.match(source, self.at)) and (found[1] or found[3]):
            least = int(found[1] or 0)
            most = int(found[3]) if found[3] else None if found[2] else least
            self.at = found.end()
        elif _FUZZY.match(source, self.at):
            raise self.refused("fuzzy matches")
        else:
            return part
        if max(least, most or 0) > _MOST_TIMES or (most is not None and most < least):
            raise self.refused(f"repeats must be in order, and at most {_MOST_TIMES}")
        greedy = not self._skip("?")
        if self._skip("+"):
            raise self.refused("possessive repeats cannot be matched in one pass")
        if self.at < len(source) and source[self.at] in "*+?":
            raise self.refused("a repeat of a repeat")
        return Repeat(part, least, most, greedy)

    def _skip(self, text: str) -> bool:
        found = self._source.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def refused(self, reason: str) -> ValueError:
        return ValueError(f"pattern {self._source!r}, at {self.at}: {reason}")

"""Programs of several regular expressions, and the threads that run them one character at a time.

A thread is the place of an operation that waits for a character. Threads of one expression stand in the order in which
a backtracking engine would try them, so the match that is found is the one that such an engine finds.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .syntax import Ahead, Choice, Edge, Named, Node, One, Repeat
from .syntax import Sequence as Parts

_MOST_OPERATIONS = 2000
_MOST_WORK = 100_000  # operations that all steps together may touch: some tenths of a second
_MOST_KEPT = 128  # characters whose steps a state keeps
_MOST_KNOWN = 2**16  # characters whose class is kept
_END = ""  # the mark of a match's end, where it looks ahead


class _Wait(NamedTuple):
    """Wait for a character of a set, or for the end of the text (None); then go on."""

    one: One | None
    then: int


class _Fork(NamedTuple):
    """Go on at several places, the best first."""

    places: tuple[int, ...]


class _Mark(NamedTuple):
    """Note the place in the text, which is the begin or the end of what has a name."""

    mark: tuple[str, bool]
    then: int


class _Begin(NamedTuple):
    """Go on at the begin of the text only."""

    then: int


class _Found(NamedTuple):
    """The expression matches."""


_Operation = _Wait | _Fork | _Mark | _Begin | _Found
Kind = tuple[str, tuple[bool, ...]]
Origin = tuple[int, tuple[tuple[str, bool], ...]]  # the thread before, and the marks on the way from it


class Step(dict[str, "Step"]):
    """The threads after a character, and the steps that follow with each next one.

    Attributes:
        threads: places of the threads.
        origins: of each thread.
        found: the origin of the match of each expression that ends here, in their order.
    """

    def __init__(
        self, program: "Program", threads: tuple[int, ...], origins: tuple[Origin, ...], found: Mapping[int, Origin]
    ) -> None:
        super().__init__()
        self.threads = threads
        self.origins = origins
        self.found = found
        self._program = program

    def __missing__(self, character: str) -> "Step":
        step = self._program.step(self.threads, self._program.kind(character))
        if len(self) < _MOST_KEPT:
            self[character] = step
        return step


class TooMuchWorkError(ValueError):
    """Expressions need too many states."""

    def __init__(self) -> None:
        super().__init__("patterns are too ambiguous to be matched in one pass")


class Program:
    """The program of some expressions, which are numbered in the order of their trees.

    Attributes:
        begin, later: the threads of a match that begins at the begin of the text, and elsewhere.
        marked: of each expression, whether the end of a match, or texts with names, are known to `match` only.
    """

    def __init__(self, trees: Sequence[Node]) -> None:
        """Compile. Raises ValueError for expressions that no automaton can match, or that match the empty text."""
        self._operations: list[_Operation] = []
        self._owners: list[int] = []  # the expression of each operation
        self._steps: dict[tuple[tuple[int, ...], Kind], Step] = {}
        self._kinds: dict[str, Kind] = {}
        self._work = 0
        starts = []
        for number, tree in enumerate(trees):
            self._owner = number
            starts.append(self._build(tree, self._add(_Found())))
        marks = {owner for owner, one in zip(self._owners, self._operations, strict=True) if isinstance(one, _Mark)}
        self.marked = [number in marks for number in range(len(trees))]
        ones = {one.one for one in self._operations if isinstance(one, _Wait) and one.one is not None}
        self._literals = {one.source: one for one in ones if one.literal}
        self._sets = {
            one: re.compile(one.source, re.DOTALL | (re.IGNORECASE if one.any_case else 0))
            for one in ones
            if not one.literal
        }
        self.begin, self.later = (self._close([(place, -1) for place in starts], begin=b) for b in (True, False))
        if self.later.found:
            raise ValueError("a pattern matches the empty text")

    @property
    def examples(self) -> set[str]:
        """Characters of which some have each kind that the expressions were written for."""
        written = {character for one in self._sets for character in one.source} | set(self._literals)
        around = {chr(ord(one) + by) for one in written for by in (-1, 1) if 0 <= ord(one) + by < 0x110000}
        return written | around | set(_EXAMPLES)

    def kind(self, character: str) -> Kind:
        """Return what distinguishes a character: the literal that it is, and which of the sets have it."""
        kind = self._kinds.get(character)
        if kind is None:
            literal = character if character in self._literals else ""
            kind = literal, tuple(pattern.match(character) is not None for pattern in self._sets.values())
            if len(self._kinds) < _MOST_KNOWN:
                self._kinds[character] = kind
        return kind

    def literals(self, threads: tuple[int, ...]) -> set[str]:
        """Return the characters that some of the threads wait for."""
        waits = (self._operations[place] for place in threads)
        ones = (one.one for one in waits if isinstance(one, _Wait))
        return {one.source for one in ones if one is not None and one.literal}

    def step(self, threads: tuple[int, ...], kind: Kind) -> Step:
        """Return the threads after a character of a kind. Raises TooMuchWorkError."""
        step = self._steps.get((threads, kind))
        if step is None:
            literal, sets = kind
            matching = {one for one, has in zip(self._sets, sets, strict=True) if has}
            if literal:
                matching.add(self._literals[literal])
            waits = [(index, self._operations[place]) for index, place in enumerate(threads)]
            self.count(len(threads))
            step = self._steps[threads, kind] = self._close(
                [(one.then, index) for index, one in waits if isinstance(one, _Wait) and one.one in matching]
            )
        return step

    def end(self, threads: tuple[int, ...]) -> Step:
        """Return the step after the end of the text."""
        waits = [(index, self._operations[place]) for index, place in enumerate(threads)]
        ended = [(one.then, index) for index, one in waits if isinstance(one, _Wait) and one.one is None]
        return self._close(ended, end=True)

    def count(self, work: int) -> None:
        """Count operations of steps that are made for the first time. Raises TooMuchWorkError."""
        self._work += work
        if self._work > _MOST_WORK:
            raise TooMuchWorkError

    def match(self, text: str, number: int, *, begin: bool, end: bool) -> tuple[int, dict[str, str]]:
        """Return the end of a match and the texts of its names.

        Args:
            text: from the match's begin to where it was found.
            number: of the expression.
            begin, end: the match begins at the text's begin, or was found at its end.
        """
        path = list(accumulate(text, Step.__getitem__, initial=self.begin if begin else self.later))
        if end:
            path.append(self.end(path[-1].threads))
        index, marks = path.pop().found[number]
        places = dict.fromkeys(marks, len(text))
        for place, step in zip(range(len(path) - 1, -1, -1), reversed(path), strict=True):
            index, marks = step.origins[index]
            if marks:
                places = dict.fromkeys(marks, place) | places  # the last place of each mark counts
        names = [name for name, is_end in places if is_end and name]
        texts = {name: text[places[name, False] : places[name, True]] for name in names}
        return places.get((_END, True), len(text)), texts

    def _close(self, places: Iterable[tuple[int, int]], *, begin: bool = False, end: bool = False) -> Step:
        """Return the threads at some places, each with the index of the thread that came to it, the best first."""
        threads: list[int] = []
        origins: list[Origin] = []
        found: dict[int, Origin] = {}
        seen: set[int] = set()
        for start, parent in places:
            stack: list[tuple[int, tuple[tuple[str, bool], ...]]] = [(start, ())]
            while stack:
                place, marks = stack.pop()
                # A better thread of the same expression was here, or has found its match.
                if place in seen or self._owners[place] in found:
                    continue
                seen.add(place)
                match self._operations[place]:
                    case _Found():
                        found[self._owners[place]] = parent, marks
                    case _Fork(places=ways):
                        stack += [(way, marks) for way in reversed(ways)]
                    case _Mark(mark=mark, then=then):
                        stack.append((then, (*marks, mark)))
                    case _Begin(then=then) if begin:
                        stack.append((then, marks))
                    case _Wait(one=None, then=then) if end:
                        stack.append((then, marks))
                    case _Wait() if not end:
                        threads.append(place)
                        origins.append((parent, marks))
        self.count(len(seen))
        return Step(self, tuple(threads), tuple(origins), dict(sorted(found.items())))

    def _add(self, operation: _Operation) -> int:
        if len(self._operations) >= _MOST_OPERATIONS:
            raise ValueError(f"patterns must have at most {_MOST_OPERATIONS} operations")
        self._operations.append(operation)
        self._owners.append(self._owner)
        return len(self._operations) - 1

    def _build(self, node: Node, then: int) -> int:
        """Add the operations of a tree, which go on at `then`; return the place of the first."""
        match node:
            case One():
                return self._add(_Wait(node, then))
            case Edge(begin=begin):
                return self._add(_Begin(then) if begin else _Wait(None, then))
            case Parts(parts=parts):
                for part in reversed(parts):
                    then = self._build(part, then)
                return then
            case Choice(parts=parts):
                return self._add(_Fork(tuple(self._build(part, then) for part in parts)))
            case Named(part=part, name=name):
                inner = self._build(part, self._add(_Mark((name, True), then)))
                return self._add(_Mark((name, False), inner))
            case Ahead(part=part):
                if not isinstance(self._operations[then], _Found):
                    raise ValueError("a pattern may look ahead at its end only")
                return self._add(_Mark((_END, True), self._build(part, then)))
            case Repeat():
                return self._repeat(node, then)

    def _repeat(self, node: Repeat, then: int) -> int:
        start = then
        if node.most is None:
            start = self._add(_Fork((then,)))
            again = self._build(node.part, start)
            self._operations[start] = _Fork((again, then) if node.greedy else (then, again))
        for _ in range((node.most or node.least) - node.least):
            again = self._build(node.part, start)
            start = self._add(_Fork((again, then) if node.greedy else (then, again)))
        for _ in range(node.least):
            start = self._build(node.part, start)
        return start


def _examples() -> str:
    """Return ASCII, and a character of each of Unicode's categories."""
    first: dict[str, str] = {}
    for code in range(0x80, 0x3100):
        first.setdefault(unicodedata.category(chr(code)), chr(code))
    return "".join(map(chr, range(0x80))) + "".join(first.values())


_EXAMPLES = _examples()

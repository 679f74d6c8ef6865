"""Search streamed text for one match after another."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from .automaton import Automaton, State

_PIECE = 512  # characters that are copied at once, so that many matches in one text do not copy its rest each
_LONGEST = 256  # characters of a text that is given out whole
# Characters that may be read again, after a match whose end was known only later: in all, and for each one of the text.
_AGAIN, _AGAIN_EACH = 4096, 8


class Match(NamedTuple):
    """A match of the expression `number` from `start` to `end`, which are places in the whole text.

    `names`: the texts of its named groups.
    """

    number: int
    names: dict[str, str]
    start: int
    end: int
    text: str


class AmbiguousTextError(ValueError):
    """A text would have to be read again and again to find its matches."""

    def __init__(self) -> None:
        super().__init__("the ends of matches are too ambiguous")


class Search:
    """A search in one text. Its time is proportional to the text's length, whatever the expressions and the pieces.

    After a match its reader may change the `automaton`, and let no match begin there (`block`).
    """

    def __init__(self, automaton: Automaton, whole: re.Pattern[str] | None = None) -> None:
        """Begin a text.

        Args:
            whole: texts that are not given out in parts, if they have come in one piece; none of them is in ASCII.
        """
        self.automaton = automaton
        self._whole = whole
        self._given = 0  # characters that were given out
        self._held: list[str] = []  # the pieces after them up to the last one that was read
        self._left: tuple[str, int] | None = None  # a text, and its place, of which a part was not read
        self._again = 0  # characters that are read again, and matches
        self._farthest = 0
        self._blocked = False
        self._begin = 0  # the place at which the text begins, for patterns that ask
        self._read = 0  # characters that were read
        self._state: State = automaton.first
        self._starts: list[int] = []  # of the matches that have begun
        # The expression of the match that the last of them has, and the place at which it was found; and whether that
        # is the text's end.
        self._best, self._at_end = (0, 0), False
        self._restart(0)

    @property
    def rest(self) -> str:
        """The text that was not given out."""
        text, origin = self._left or ("", self._given)
        return "".join([*self._held, text[max(self._given - origin, 0) :]])

    def begin(self) -> None:
        r"""Let the text begin where the last match has ended, for patterns with `\A`."""
        self._begin = self._given

    def block(self) -> None:
        """Let no match begin where the last one has ended."""
        self._blocked = True

    def passing(self, piece: str) -> str | None:
        """Read the next text, and return what belongs to no match; None if a match is found, and nothing was read."""
        state, starts, read = self._state, self._starts, self._read
        for at, character in enumerate(piece, read):
            state = state[character]
            if state.moved is not None:
                if state.found is not None or state.decided:
                    return None
                starts = [at] if state.begun else state.starts(starts, at)
        self._state, self._starts, self._read = state, starts, read + len(piece)
        if not starts and not self._held:
            self._given = self._read
            return piece
        return self._give(piece, read, starts[0] if starts else self._read)

    def scan(self, piece: str = "", *, last: bool = False) -> tuple[str, Match | None]:
        """Read up to the next match; return it with the text before it.

        After a match the piece must be read on, without a new one. At its end there is no match, and the text is that
        which belongs to none.

        Args:
            piece: the next text.
            last: the text ends after the piece.

        Raises AmbiguousTextError or TooMuchWorkError, which are ValueErrors; then `rest` was not given out.
        """
        text, origin = piece, self._read
        if self._left is not None:
            text, origin = self._left
            self._left = None
            self._restart(self._given)
        try:
            found = self._advance(text, origin)
        except ValueError:
            self._left = text, origin
            raise
        if found or (last and self._end()):
            return self._match(text, origin)
        hold = self._starts[0] if self._starts else self._read
        if hold == self._read and origin == self._given:
            self._given = hold
            return text, None
        return self._give(text, origin, hold), None

    def _match(self, text: str, origin: int) -> tuple[str, Match]:
        """Return the first match that has begun with the text before it. `origin`: the place of a text."""
        if self._held:
            text, origin = "".join([*self._held, text]), self._given
            self._held = []
        self._left = text, origin
        start, (number, end) = self._starts[0], self._best
        program, names = self.automaton.program, dict[str, str]()
        if program.marked[number]:
            found = text[start - origin : end - origin]
            length, names = program.match(found, number, begin=start == self._begin, end=self._at_end)
            end = start + length
        self._farthest = max(self._farthest, self._read)
        self._again += self._read - end + 1
        if self._again > _AGAIN + _AGAIN_EACH * self._farthest:
            raise AmbiguousTextError
        before, self._given = text[self._given - origin : start - origin], end
        return before, Match(number, names, start, end, text[start - origin : end - origin])

    def _give(self, text: str, origin: int, hold: int) -> str:
        """Return the text up to a place, and hold back the rest."""
        if self._held:
            if hold <= self._given:
                self._held.append(text)
                return ""
            text, origin = "".join([*self._held, text]), self._given
        if self._whole is not None and hold < self._read and not text.isascii():
            begin, end = max(self._given, hold - _LONGEST) - origin, hold - origin + _LONGEST
            for one in self._whole.finditer(text, begin, end):
                if one.start() < hold - origin < one.end():
                    hold = one.start() + origin
        shown, rest = text[self._given - origin : hold - origin], text[hold - origin :]
        self._held, self._given = [rest] if rest else [], hold
        return shown

    def _restart(self, at: int) -> None:
        """Search from a place on."""
        automaton, self._read, self._at_end = self.automaton, at, False
        self._state = automaton.blocked if self._blocked else automaton.first if at == self._begin else automaton.later
        self._blocked = False
        self._starts = [at] * len(self._state.groups)
        self._best = (self._state.found or 0, at)

    def _advance(self, text: str, origin: int) -> bool:
        """Read a text to its end, or until the next match is decided; return whether it is. `origin`: its place."""
        state, starts, at = self._state, self._starts, self._read - origin
        decided = state.decided
        while at < len(text) and not decided:
            if state.same is not None and (skipped := state.same.match(text, at)):
                at = max(at, skipped.end() - 1)  # the last one tells where matches have begun
            piece = text[at : at + _PIECE]
            for place, character in enumerate(piece, at + 1):  # the place after the character
                state = state[character]
                if state.moved is not None:
                    begin = origin + place - 1
                    starts = [begin] if state.begun else state.starts(starts, begin)
                    if state.found is not None:
                        self._best = state.found, origin + place
                    if decided := state.decided:
                        break
            at = place
        self._state, self._starts, self._read = state, starts, origin + at
        return decided

    def _end(self) -> bool:
        """Decide at the text's end which match is next, and put it first; return whether there is one."""
        for start, group in zip(self._starts, self._state.groups, strict=True):
            found = self.automaton.program.end(group.threads).found
            if found:
                self._best, self._at_end = (next(iter(found)), self._read), True
            if found or group.found:
                self._starts = [start]
                return True
        self._starts = []
        return False


def matches(automaton: Automaton, text: str) -> Iterator[Match]:
    """Yield the matches in a whole text. Raises AmbiguousTextError or TooMuchWorkError."""
    search = Search(automaton)
    _, match = search.scan(text, last=True)
    while match is not None:
        yield match
        if match.start == match.end:
            search.block()
        _, match = search.scan(last=True)

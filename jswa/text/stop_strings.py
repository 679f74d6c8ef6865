"""Find stop strings in streamed text, and hold back text that may still become a stop string."""

from collections import deque


class StopTable:
    """An Aho-Corasick automaton of stop strings. It never changes, so sequences with the same stop strings share it.

    A state is the number of a prefix of a stop string; 0 is the empty prefix. After a text, the automaton is in the
    state of the longest prefix with which the text ends.

    Attributes:
        length: characters of each state's prefix.
        found: the longest stop string with which each state's prefix ends, or None.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.length = [0]
        self.found: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        for stop in stops:
            self._add(stop)
        self._shorter = [0] * len(self._next)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self.length.append(depth)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Find each state's longest proper suffix that is a state too, shorter prefixes first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self.step(self._shorter[state], character)
                if self.found[following] is None:
                    self.found[following] = self.found[self._shorter[following]]
                states.append(following)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character. The time is O(1) per character, averaged over a text."""
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return following


class StopStrings:
    """The text of one sequence, cut at the first complete stop string. `stopped`: that string, None if none so far."""

    def __init__(self, table: StopTable, *, include: bool) -> None:
        self.stopped: str | None = None
        self._table = table
        self._include = include
        self._state = 0
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece of text, and return the text that is safe to show; the empty string after a stop string."""
        if self.stopped is not None:
            return ""
        table, state = self._table, self._state
        if len(table.length) == 1:
            return piece  # there are no stop strings
        text, start = self._held + piece, len(self._held)
        for at, character in enumerate(piece, start=start):
            state = table.step(state, character)
            # The stop string that ends first wins; of two that end together, the longer one.
            if table.found[state] is not None:
                self.stopped, self._held = table.found[state], ""
                return text[: at + 1] if self._include else text[: at + 1 - len(self.stopped or "")]
        self._state = state
        shown = len(text) - table.length[state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        held, self._held, self._state = self._held, "", 0
        return held

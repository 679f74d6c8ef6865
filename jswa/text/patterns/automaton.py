"""A deterministic automaton that finds the first match of several expressions in a text.

Matches that may have begun at one place of the text are a group of threads; groups stand in the order of their places.
A thread of a later group never stays where one of an earlier group is, which wins; and no group begins after one that
has a match. So a state knows the threads of all groups, but not their places, and there are few states.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from .program import Kind, Program
from .syntax import Node


class Group(NamedTuple):
    """The threads that may still make a match from one place. `found`: one was found, which is shorter."""

    threads: tuple[int, ...]
    found: bool


class State(dict[str, "State"]):
    """A state, and the states that follow with each next character.

    Attributes:
        groups: matches that have begun, the earliest first.
        begins: matches may begin here; `first`: it is the begin of the text.
        moved: None if all groups are those of the state before, and no match is found or decided; otherwise the number
            that each had there, or -1 if it has just begun.
        begun: one match has just begun, and there is no other.
        found: the expression of which the last group has a match that ends here; None if it has none.
        decided: the match that the last group has is the next one.
    """

    def __init__(self, automaton: "Automaton", key: "Key", *, first: bool = False, begins: bool = True) -> None:
        super().__init__()
        self.groups, self.moved, self.found = key
        self.begins = begins and not (self.groups and self.groups[-1].found)
        self.first = first
        self.decided = bool(self.groups) and self.groups[0] == ((), True)
        self.begun = self.moved == (-1,)
        self._automaton = automaton
        self._literals = automaton.literals(self)  # that make a difference here
        self._kinds: dict[Kind, State] = {}

    def starts(self, before: list[int], at: int) -> list[int]:
        """Return the places where the matches of the groups have begun, if the state has `moved`.

        Args:
            before: those of the state before.
            at: the place of the character between them.
        """
        assert self.moved is not None
        return [before[group] if group >= 0 else at for group in self.moved]

    def __missing__(self, character: str) -> "State":
        state = self._after(character)
        if len(self) < _MOST_KEPT:
            self[character] = state
        return state

    @cached_property
    def same(self) -> re.Pattern[str] | None:
        """Finds characters that lead from this state to itself, if several tell no more than the last of them."""
        if self.moved is not None and any(before not in (-1, group) for group, before in enumerate(self.moved)):
            return None
        same = [character for character in map(chr, range(0x80)) if self._after(character) is self]
        return re.compile(f"[{re.escape(''.join(same))}]*+") if same else None

    def _after(self, character: str) -> "State":
        kind = self._automaton.program.kind(character)
        if kind[0] not in self._literals:
            kind = "", kind[1]
        state = self._kinds.get(kind)
        if state is None:
            state = self._kinds[kind] = self._automaton.after(self, kind)
        return state


Key = tuple[tuple[Group, ...], tuple[int, ...] | None, int | None]
_MOST_KEPT = 128  # characters whose states a state keeps


class Automaton:
    """The automaton of some expressions.

    Attributes:
        program: of the expressions, the first of which wins where two match the same text.
        first, later: the states at the begin of the text, and elsewhere.
        blocked: the state at a place at which no match may begin.
    """

    def __init__(self, trees: Sequence[Node]) -> None:
        """Make all states. Raises ValueError for expressions that no automaton can match, or that need too many."""
        self.program = Program(trees)
        self._states: dict[Key, State] = {}
        self.later = self._state(((), None, None))
        self.blocked = State(self, ((), None, None), begins=False)
        found = next(iter(self.program.begin.found), None)  # an expression may match the begin of the text
        groups = () if found is None else (Group(self.program.begin.threads, found=True),)
        self.first = State(self, (groups, None, found), first=True)
        self._make()

    def _make(self) -> None:
        examples = {self.program.kind(character): character for character in sorted(self.program.examples)}
        left, seen = [self.first, self.later, self.blocked], set[int]()
        while left:
            state = left.pop()
            if id(state) not in seen and not state.decided:
                seen.add(id(state))
                left += [state[character] for character in examples.values()]

    def literals(self, state: State) -> frozenset[str]:
        """Return the characters that some thread of a state waits for."""
        found = [self.program.literals(group.threads) for group in state.groups]
        return frozenset().union(*found, self.program.literals(self._beginning(state)))

    def _beginning(self, state: State) -> tuple[int, ...]:
        """Return the threads of a match that begins in a state."""
        return () if not state.begins else (self.program.begin if state.first else self.program.later).threads

    def after(self, state: State, kind: Kind) -> State:
        """Return the state after a character of a kind. Raises TooMuchWorkError."""
        program = self.program
        sources = list(enumerate(state.groups))
        if state.begins:
            sources.append((-1, Group(self._beginning(state), found=False)))
        groups, moved, taken, found = list[Group](), list[int](), set[int](), None
        for number, group in sources:
            step = program.step(group.threads, kind)
            threads = tuple(thread for thread in step.threads if thread not in taken)
            taken.update(threads)
            found = next(iter(step.found), None)
            has = group.found or found is not None
            if threads or has:
                groups.append(Group(threads, has))
                moved.append(number)
            if has:
                break
        program.count(1 + len(groups))
        decided = bool(groups) and groups[0] == ((), True)
        same = found is None and not decided and moved == list(range(len(state.groups)))
        return self._state((tuple(groups), None if same else tuple(moved), found))

    def _state(self, key: Key) -> State:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = State(self, key)
        return state

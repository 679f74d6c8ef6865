"""Random words for a load, and conversations whose requests repeat all that was said. No HTTP, and no clock."""

import math
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


class Lengths(NamedTuple):
    """The sizes of a load; see the options of the same names.

    Attributes:
        sub_question: None: as `input_words`.
        min_rounds: None: as `rounds`.
    """

    prefix_words: int
    input_words: int
    output_tokens: int
    rounds: int = 1
    sub_question: int | None = None
    min_rounds: int | None = None
    range_ratio: float = 1.0


REQUESTS = Lengths(prefix_words=0, input_words=100, output_tokens=64)
CHATS = Lengths(prefix_words=0, input_words=300, output_tokens=300, rounds=10)
AGENTS = Lengths(
    prefix_words=8000, input_words=500, output_tokens=200, rounds=200, sub_question=120, min_rounds=20, range_ratio=0.5
)


class Turn(NamedTuple):
    """What a client says in a round, and the tokens that it asks for."""

    message: str
    output_tokens: int


class Conversation:
    """What one client and the server have said, and what the client will say.

    Attributes:
        number: the client's.
        turns: one for each round.
        messages: all that was said, as chat messages; the shared prefix is the system's.
        rounds: the number of answers so far.
        limit: most tokens of a request with its answer, if they are known.
    """

    def __init__(self, number: int, prefix: str, turns: Sequence[Turn]) -> None:
        self.number = number
        self.turns = turns
        self.messages = [{"role": "system", "content": prefix}] if prefix else []
        self.rounds = 0
        self.limit: int | None = None
        self._prefix_words = len(prefix.split())
        self._tokens = 0  # of all that was said
        self._rate = 1.0  # the most tokens that a word has had; a word has at least one

    @property
    def ended(self) -> bool:
        """Whether all turns have their answers, or the next one might exceed the limit."""
        return self.rounds == len(self.turns) or self.full

    @property
    def full(self) -> bool:
        """Whether there is a next turn, and its request might exceed the limit."""
        return self.limit is not None and self.rounds < len(self.turns) and self.next_tokens > self.limit

    @property
    def next_tokens(self) -> int:
        """About how many tokens the next request has, with its answer. Before the first answer: at least how many."""
        added = math.ceil(self._rate * self._words(self.rounds))
        return self._tokens + added + self.turns[self.rounds].output_tokens

    def ask(self, endpoint: Literal["completions", "chat"]) -> dict[str, Any]:
        """Say the next message. Return the fields of the request: the whole conversation, and its `max_tokens`."""
        assert not self.messages or self.messages[-1]["role"] != "user", "the last message has no answer yet"
        turn = self.turns[self.rounds]
        self.messages.append({"role": "user", "content": turn.message})
        said = {"messages": [*self.messages]} if endpoint == "chat" else {"prompt": text_of(self.messages)}
        return {**said, "max_tokens": turn.output_tokens}

    def answer(self, text: str) -> None:
        """Add the server's answer to the last message."""
        assert self.messages[-1]["role"] == "user", "nothing was asked"
        self.messages.append({"role": "assistant", "content": text})
        self.rounds += 1

    def count(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Take the server's counts of the last request and of its answer, for the size of the next one.

        What a template adds to a message counts as part of its words.
        """
        self._rate = max(self._rate, (prompt_tokens - self._tokens) / self._words(self.rounds - 1))
        self._tokens = prompt_tokens + answer_tokens

    def _words(self, number: int) -> int:
        """Return the words that a turn adds; the first one adds the prefix, too."""
        return len(self.turns[number].message.split()) + (0 if number else self._prefix_words)


def words(chance: random.Random, count: int) -> str:
    """Return random words, which most tokenizers take for one token each."""
    return " ".join(chance.choices(_WORDS, k=count))


def text_of(messages: Sequence[dict[str, str]]) -> str:
    """Return a conversation as one text: an answer continues what is before it, all else begins a line."""
    return "".join(("" if m["role"] == "assistant" else "\n") + m["content"] for m in messages).removeprefix("\n")


def conversations(clients: int, lengths: Lengths, seed: int | str) -> list[Conversation]:
    """Return a conversation for each client. They share their prefix and nothing else.

    Numbers of words, tokens and rounds are drawn evenly between their least and their most.
    """
    chance = random.Random(seed)
    prefix = words(chance, lengths.prefix_words)

    def drawn(most: int) -> int:
        return chance.randint(max(1, round(lengths.range_ratio * most)), most)

    def turn(number: int) -> Turn:
        most = lengths.input_words if number == 0 else lengths.sub_question or lengths.input_words
        return Turn(words(chance, drawn(most)), drawn(lengths.output_tokens))

    fewest = lengths.min_rounds or lengths.rounds
    return [
        Conversation(number, prefix, [turn(index) for index in range(chance.randint(fewest, lengths.rounds))])
        for number in range(clients)
    ]

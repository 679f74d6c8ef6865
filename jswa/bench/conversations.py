"""Random words for a load, and conversations whose requests repeat all that was said. No HTTP, and no clock."""

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
    """

    def __init__(self, number: int, prefix: str, turns: Sequence[Turn]) -> None:
        self.number = number
        self.turns = turns
        self.messages = [{"role": "system", "content": prefix}] if prefix else []
        self.rounds = 0

    @property
    def ended(self) -> bool:
        """Whether all turns have their answers."""
        return self.rounds == len(self.turns)

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

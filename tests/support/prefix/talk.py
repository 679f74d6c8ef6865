"""Random conversations that run side by side on one engine.

Turns continue each other, are edited, branch off, are generated again and are aborted.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import Request, TokenEvent
from jswa.types import PrefixHit, SamplingParams

WORDS = (
    *("the", "a", "small", "big", "old", "red", "happy", "sad", "cat", "dog", "bird", "girl", "boy", "Tom", "Mia"),
    *("house", "tree", "garden", "went", "saw", "said", "found", "ran", "wanted", "to", "into", "with", "and", "but"),
)

LONGEST = 450  # tokens of a prompt
AT_ONCE = 6  # conversations that run side by side


@dataclass
class Turn:
    """One request and its results. `written`: for each token of the prompt, whether an earlier turn generated it."""

    prompt: list[int]
    written: list[bool]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefix: PrefixHit | None = None
    aborted: bool = False

    @property
    def hit(self) -> int:
        """Number of prompt tokens that were not computed."""
        return 0 if self.prefix is None else self.prefix.cached_tokens


@dataclass
class Conversation:
    """The text so far; `written`: which tokens the model generated; `last`: length of the last answered prompt."""

    remaining: int
    tokens: list[int]
    written: list[bool]
    last: int = 0


class Talk:
    """Random conversations that run side by side on one engine. `sampling`: parameters of all turns."""

    def __init__(self, llm: LLM, seed: int, count: int, **sampling: Any) -> None:
        self.turns: list[Turn] = []
        self._llm = llm
        self._sampling = sampling
        self._choose = random.Random(seed)
        systems = [self._say(length) for length in (5, 60, 200, 300)]
        starts = [self._choose.choice(systems) + self._say(30) for _ in range(count)]
        self._idle: list[Conversation] = []
        self._waiting = [Conversation(self._choose.randint(2, 3), s, [False] * len(s)) for s in starts]
        self._open: dict[str, Conversation] = {}

    def run(self) -> list[Turn]:
        """Run all conversations to their end; return their turns."""
        engine, choose = self._llm.engine, self._choose
        steps = 0
        while self._waiting or self._idle or engine.has_work():
            while self._waiting and len(self._idle) + len(self._open) < AT_ONCE:
                self._idle.append(self._waiting.pop())
            if self._idle and choose.random() < 0.6:
                self._ask(self._idle.pop(choose.randrange(len(self._idle))))
            if choose.random() < 0.03:
                self._interfere()
            for event in engine.step():
                self._take(event)
            steps += 1
            if steps % 20 == 0:
                engine.check()
        return self.turns

    def _interfere(self) -> None:
        """Abort a turn, or preempt a running row."""
        scheduler, choose = self._llm.engine.scheduler, self._choose
        if scheduler.running and choose.random() < 0.6:
            scheduler.preempt(choose.choice(scheduler.running).request.request_id)
        elif self._open:
            name = choose.choice(list(self._open))
            assert self._llm.engine.abort(name) is not None
            self.turns[int(name)].aborted = True
            self._close(name)

    def _take(self, event: TokenEvent) -> None:
        turn = self.turns[int(event.request_id)]
        turn.prefix = event.prefix or turn.prefix
        if event.token is not None:
            turn.tokens.append(event.token)
        if event.logprobs is not None:
            turn.logprobs.append(event.logprobs.logprob)
        if event.finish_reason is not None:
            assert event.finish_reason == "length", event
            self._close(event.request_id)

    def _ask(self, conversation: Conversation) -> None:
        """Begin the next turn: new text, the last prompt again, or an edit anywhere in the text so far."""
        choose, number = self._choose, len(self.turns)
        kind = choose.choice(["new", "new", "again", "edit"]) if conversation.last else "first"
        length = conversation.last if kind == "again" else len(conversation.tokens)
        if kind == "edit" or length > LONGEST:
            length = choose.randint(1, min(length, LONGEST - 60))
        del conversation.tokens[length:], conversation.written[length:]
        said = self._say(choose.choice([1, 4, 40])) if kind in ("new", "edit") else []
        conversation.tokens += said
        conversation.written += [False] * len(said)
        conversation.last = len(conversation.tokens)
        params = SamplingParams(
            temperature=choose.choice([0.0, 0.9]),
            seed=number,
            max_tokens=choose.choice([1, 4, 8, 32]),
            ignore_eos=True,
            repetition_penalty=choose.choice([1.0, 1.0, 1.3]),
            **self._sampling,
        )
        self.turns.append(Turn(conversation.tokens[:], conversation.written[:], params))
        self._open[str(number)] = conversation
        self._llm.engine.add(make_request(self._llm.engine, str(number), self.turns[-1]))

    def _close(self, name: str) -> None:
        """End a turn: its answer becomes part of the conversation."""
        conversation, turn = self._open.pop(name), self.turns[int(name)]
        conversation.tokens += turn.tokens
        conversation.written += [True] * len(turn.tokens)
        conversation.remaining -= 1
        if conversation.remaining:
            self._idle.append(conversation)

    def _say(self, length: int) -> list[int]:
        """Return random text of `length` tokens."""
        return ids_of(self._llm, " ".join(self._choose.choice(WORDS) for _ in range(length)) + " ", length)


def make_request(engine: Engine, name: str, turn: Turn) -> Request:
    """Return the request of a turn."""
    return engine.request(name, np.array(turn.prompt, np.int32), turn.params)


def ids_of(llm: LLM, text: str, length: int) -> list[int]:
    """Return the first `length` tokens of a text that is repeated."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text * length, add_special_tokens=False)[:length]
    assert len(ids) == length
    return [int(token) for token in ids]

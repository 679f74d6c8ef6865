"""Weights that change under load, again and again: each token is what the weights of its version give, to the bit.

Threads ask while the weights change in all three ways, and while the engine pauses and sleeps. Then each text is made
once more, alone, with the same changes behind the same tokens: the engine is deterministic, so tokens and log
probabilities must have the same bits. KV of other weights, stale or of a prefix, would change them.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import jswa
from jswa.frontend.outputs import Receiver
from jswa.plan import TokenEvent
from jswa.rl.score import score
from jswa.types import SamplingParams

CHANGES = 40
ASKING = 6  # threads; four rows run at a time
STEMS = [[1, 300, 301, 302, 303, 304, 305, 306], [1, 400, 401, 402, 403], [1, 500]]
NAMES = itertools.count()


@dataclass
class Change:
    """New weights (their number, or None), with or without a sleep of some level around them."""

    weights: int | None
    level: int = 0


@dataclass
class Asked:
    """A request, and what came of it.

    Attributes:
        known: what the changes were that found it running, with the number of tokens that it had.
        mixed: a change came in the middle of its prompt.
    """

    prompt: list[int]
    params: SamplingParams
    version: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    known: list[tuple[int, Change]] = field(default_factory=list)
    mixed: bool = False
    reason: str | None = None

    def take(self, event: TokenEvent) -> None:
        """Add an event."""
        self.version = self.version if event.version is None else event.version
        self.reason = event.finish_reason or self.reason
        if event.token is not None:
            assert event.logprobs is not None
            self.tokens.append(event.token)
            self.logprobs.append(event.logprobs.logprob)
            self.versions.append(self.version)


class Changing:
    """An LLM whose weights change, and who runs in it."""

    def __init__(self, llm: jswa.LLM, weights: list[Any]) -> None:
        self.llm = llm
        self.staged = [llm.engine.stager.stage(one) for one in weights]
        self.numbers: dict[int, int] = {}  # of the weights, by version
        self.asked: dict[str, Asked] = {}

    def ask(self, asked: Asked) -> str:
        """Queue a request; return its name."""
        driver, name = self.llm.driver, f"fuzz {next(NAMES)}"
        request = self.llm.engine.request(name, np.array(asked.prompt, np.int32), asked.params)
        asked.version, self.asked[name] = request.version, asked
        driver.add(request, Receiver(lambda token: 1 / 0, asked.take))
        return name

    def finish(self, name: str) -> Asked:
        """Run steps until a request has ended."""
        asked = self.asked[name]
        while asked.reason is None:
            self.llm.driver.advance()
        self.llm.driver.abort(name)
        return asked

    def change(self, change: Change, in_flight: Any = "continue") -> None:
        """Change the weights, or sleep, between two steps; note whom that finds running."""
        turnover, scheduler = self.llm.engine.turnover, self.llm.engine.scheduler

        def between() -> int:
            if change.level:
                turnover.sleep(change.level)
            wanted = turnover.version
            if change.weights is not None:
                wanted = turnover.update(self.staged[change.weights], in_flight)
                self.numbers[wanted] = change.weights
            for name, sequence in scheduler.sequences.items() if wanted == turnover.version else ():
                asked, prompt = self.asked[name], len(sequence.request.prompt)
                known = sequence.num_known - prompt
                asked.mixed |= not change.level and sequence.launched not in {0, prompt + known - 1}
                asked.known += [(known, change)] if known else []
            if change.level:
                turnover.wake()
            return wanted

        wanted = self.llm.driver.between(between)
        while turnover.version < wanted:
            self.llm.driver.advance()

    def again(self, text: Asked) -> Asked:
        """Make a text once more, with the same changes behind the same tokens."""
        first = self.numbers[text.versions[0]]
        self.change(Change(first))
        once, engine = Asked(text.prompt, text.params), self.llm.engine
        name, had = self.ask(once), 0
        sequence, prompt = engine.scheduler.sequences[name], len(text.prompt)
        for known, change in text.known:
            while known > had and sequence.launched != prompt + known - 1:
                self.llm.driver.advance()
            had = known
            self.change(change)
        while once.reason is None and len(once.tokens) < len(text.tokens):
            self.llm.driver.advance()
        self.llm.driver.abort(name)
        return once


def load(changing: Changing, chance: random.Random, stop: Callable[[], bool]) -> None:
    """Ask one text after the other."""
    while not stop():
        prompt = [*chance.choice(STEMS), *chance.choices(range(600, 604), k=chance.randint(0, 3))]
        params = SamplingParams(
            max_tokens=chance.choice((1, 6, 20, 40)), seed=chance.randrange(1_000), logprobs=0, ignore_eos=True
        )
        changing.finish(changing.ask(Asked(prompt, params)))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_each_token_is_of_the_weights_that_its_version_names(
    seed: int, llm: jswa.LLM, weights: list[dict[str, Any]]
) -> None:
    changing, chance = Changing(llm, weights), random.Random(seed)
    changing.change(Change(0))
    over = threading.Event()
    threads = [
        threading.Thread(target=load, args=(changing, random.Random(f"{seed} {n}"), over.is_set)) for n in range(ASKING)
    ]
    for thread in threads:
        thread.start()
    for _ in range(CHANGES):
        time.sleep(chance.choice((0.0, 0.02, 0.1)))
        kind, number = (
            chance.choice(("continue",) * 3 + ("finish", "abort", "nap", "freed", "wait")),
            chance.randrange(3),
        )
        if kind == "wait":
            llm.pause("wait")
            llm.resume()
        elif kind in {"nap", "freed"}:
            changing.change(Change(number, 2) if kind == "freed" else Change(None, 1))
        else:
            changing.change(Change(number), kind)
    over.set()
    for thread in threads:
        thread.join()
    llm.engine.check()
    texts = [text for text in changing.asked.values() if text.tokens and not text.mixed]
    assert len(texts) > 0.8 * len(changing.asked) > CHANGES
    assert sum(len(set(text.versions)) > 1 for text in texts) > 10
    changing.asked.clear()
    for text in texts:
        once = changing.again(text)
        assert once.tokens[: len(text.tokens)] == text.tokens
        assert once.logprobs[: len(text.tokens)] == text.logprobs
    for number in set(changing.numbers.values()):
        whole = [text for text in texts if not text.known and changing.numbers[text.versions[0]] == number]
        changing.change(Change(number))
        scored = score(llm, [[*text.prompt, *text.tokens] for text in whole])
        for text, found in zip(whole, scored, strict=True):
            assert found[len(text.prompt) - 1 :].tolist() == text.logprobs
    llm.engine.check()

"""Speculative decoding changes no token: the same requests with and without drafts, on the real engine."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.plan import TokenEvent
from jswa.speculation import Speculation
from jswa.types import SamplingParams
from tests.support.drafts.drawn import Drawn
from tests.support.late import programs_compiled_when_run
from tests.support.nights import sample
from tests.support.oracles import small_engine_parts

DRAFTS = Speculation("suffix", 3, shortest=1, acceptance=0.8).of_length(200)
# Text that repeats itself, so that much of it is drafted; each is asked twice, so that the second answer is too.
PROMPTS = [np.array(([3, 4, 5, 6] * 8)[:length], np.int32) for length in (5, 19)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.3, "seed": 5},
    "limited": {"temperature": 0.5, "seed": 6, "top_k": 3, "top_p": 0.9},
    "log probabilities": {"temperature": 0.2, "seed": 7, "logprobs": 2},
    "penalties": {"temperature": 0.2, "seed": 8, "presence_penalty": 0.1, "frequency_penalty": 0.05},
    "repetition": {"temperature": 0.3, "seed": 15, "repetition_penalty": 1.05, "logit_bias": {3: 0.5}},
    "allowed": {"temperature": 0.5, "seed": 16, "allowed_token_ids": (3, 4, 5, 6, 7, 8)},
    "bad words": {"temperature": 0.2, "seed": 9, "bad_words": ((7, 8), (3, 4, 5))},
    "long words": {"temperature": 0.2, "seed": 17, "bad_words": ((3, 4, 5, 6, 3, 4, 5, 6, 3), (4, 5))},
    "stop tokens": {"temperature": 0.4, "seed": 10, "stop_token_ids": (11, 12, 13)},
    "no stop yet": {"temperature": 0.4, "seed": 11, "stop_token_ids": (11, 12, 13), "min_tokens": 6},
    "short": {"temperature": 0.2, "seed": 12, "max_tokens": 3},
    "prompt": {"temperature": 0.2, "seed": 13, "prompt_logprobs": 1},
    "stop strings": {"temperature": 0.2, "seed": 14, "stop": ["never"]},
}
Said = dict[str, list[TokenEvent]]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model: the second drafts."""
    model, params, layout, limits, _ = small_engine_parts()
    limits = dataclasses.replace(limits, max_model_len=200, max_rows=2, max_tokens=16, num_slabs=60)
    drafting = dataclasses.replace(limits, speculation=DRAFTS)
    with programs_compiled_when_run():
        runners = [Runner(model, params, layout, own) for own in (limits, drafting)]
        engines = [Engine(model, runner.limits, layout, runner) for runner in runners]
        for engine in engines:
            for values in ({"logprobs": 1}, {"prompt_logprobs": 1}, {"bad_words": ("a b",)}):
                engine.prepare(SamplingParams(**values))
        yield engines[0], engines[1]


def generate(engine: Engine, kinds: list[str], seed: int, *, preempt: bool = False) -> Said:
    """Ask each prompt twice in each of these ways, side by side; the lengths of drafts are drawn, if there are any."""
    chance = random.Random(seed)
    engine.scheduler.drafting.choice = Drawn(chance, engine.limits.max_rows)
    said: Said = {}
    for turn in range(2):
        for kind in kinds:
            for number, prompt in enumerate(PROMPTS):
                values = {"max_tokens": 20, "ignore_eos": True, **KINDS[kind]}
                words, name = values.pop("bad_words", ()), f"{kind} {number} {turn}"
                request = engine.request(name, prompt, SamplingParams(**values), bad_words=words)
                engine.add(request)
        while engine.has_work():
            running = engine.scheduler.running
            if preempt and running and chance.random() < 0.1:
                engine.scheduler.preempt(chance.choice(running).request.request_id)
            for event in engine.step():
                said.setdefault(event.request_id, []).append(event)
            engine.check()
    return said


def texts(said: Said) -> dict[str, tuple[list[int | None], str | None]]:
    """The tokens and the end of each request."""
    return {name: ([event.token for event in events], events[-1].finish_reason) for name, events in said.items()}


@pytest.mark.parametrize("way", sample(["undisturbed", "preempted"], 4))
def test_tokens_are_the_same_with_drafts(engines: tuple[Engine, Engine], way: str) -> None:
    """Rows with and without drafts in the same steps; log probabilities belong to each token of a step."""
    (plain, drafting), kinds = engines, list(KINDS)
    for engine in engines:
        engine.flush_cache()
    before = drafting.step_stats().drafts
    expected, found = generate(plain, kinds, 1), generate(drafting, kinds, 2, preempt=way == "preempted")
    assert texts(found) == texts(expected)
    for name, events in expected.items():
        for one, other in zip(events, found[name], strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.token == other.logprobs.token == one.token
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=2e-4)
    after = drafting.step_stats().drafts
    assert before is not None
    assert after is not None
    assert after.drafts - before.drafts > after.sums[1] - before.sums[1] > 30
    for name, events in found.items():
        drafts = events[-1].drafts
        assert drafts is not None
        by_host = name.startswith("long words")
        assert not by_host or drafts == (0, 0), "a row whose mask the host makes of its text has run drafts"
        if name.startswith("stop strings"):
            assert all(drafts >= (event.drafts or (0, 0)) for event in events)
            assert drafts == (0, 0) or any(event.drafts is not None for event in events[:-1])
    for kind in ("penalties", "repetition", "allowed", "bad words", "no stop yet"):
        right = [events[-1].drafts for name, events in found.items() if name.startswith(kind)]
        assert sum(one.accepted for one in right if one is not None) > 0, f"{kind}: no draft was right"

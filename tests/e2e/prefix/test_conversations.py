"""Random conversations on the embedded model with the prefix cache: each request gets the tokens of a cold run.

Turns continue each other, are edited, branch off, are generated again and are aborted, side by side on a pool that is
far too small for them: prefixes are found, evicted and revived, and running rows are preempted.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import StepPlan
from jswa.types import MissReason, PrefixHit, RequestOutput, SamplingParams
from tests.support.prefix.talk import Talk, Turn, ids_of, make_request
from tools.divergence import k3

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 1_800_000,
}
pytestmark = pytest.mark.optimized  # many steps of few programs: unoptimised ones take three times as long
PAGE = 16
TOLERANCE, MARGIN = 2e-4, 1e-3  # docs/numerics.md


def alone(engine: Engine, turn: Turn) -> list[int]:
    """Return the tokens that a turn gets on an engine that runs nothing else."""
    engine.add(make_request(engine, "alone", turn))
    tokens = []
    while engine.has_work():
        tokens += [event.token for event in engine.step() if event.token is not None]
    return tokens


def cold_engine(llm: LLM) -> Engine:
    """Return an engine without a prefix cache on the programs and the arena of another, which must be idle."""
    engine = llm.engine
    llm.flush_cache()
    limits = dataclasses.replace(engine.limits, prefix_cache=False)
    return Engine(engine.model, limits, engine.layout, engine.runner, seed=0)


def check_that_much_happened(llm: LLM, turns: list[Turn]) -> None:
    """Assert that there were hits of all kinds, evictions, preemptions, replays and aborts."""
    stats = llm.cache_stats()
    assert stats.cached_tokens > 0.1 * stats.prompt_tokens
    assert stats.replayed_tokens > 0
    assert stats.revived_tokens > 0, "no lost window was rebuilt"
    assert stats.evictions > 10
    assert stats.missed["evicted"] > 0
    assert llm.stats().preemptions > 3
    assert any(turn.aborted for turn in turns)
    assert any(any(turn.written[: turn.hit]) for turn in turns), "no generated text was found in the cache"
    assert any(turn.hit % PAGE for turn in turns), "no row started inside a page"


def check_deterministic(llm: LLM, *, seed: int, count: int) -> None:
    """Assert that all tokens are those of cold runs."""
    turns = Talk(llm, seed, count).run()
    check_that_much_happened(llm, turns)
    engine = cold_engine(llm)
    for turn in turns:
        tokens = alone(engine, turn)
        assert turn.tokens == tokens[: len(turn.tokens)]
        assert turn.aborted or len(turn.tokens) == len(tokens)


class Score(NamedTuple):
    """A cold run's log probabilities of a generated token and of the two most likely ones."""

    token: float
    first: float
    second: float


def cold_scores(llm: LLM, turns: list[Turn]) -> list[list[Score]]:
    """Score the generated tokens of turns by a cold run over each prompt and answer."""
    texts = [turn.prompt + turn.tokens for turn in turns]
    outputs = llm.generate(texts, temperature=0, max_tokens=1, prompt_logprobs=2, use_tqdm=False)
    scores = []
    for turn, output in zip(turns, outputs, strict=True):
        assert output.prompt_logprobs is not None
        rows = []
        for token, table in zip(turn.tokens, output.prompt_logprobs[len(turn.prompt) :], strict=True):
            assert table is not None
            first, second = sorted((entry.logprob for entry in table.values()), reverse=True)[:2]
            rows.append(Score(table[token].logprob, first, second))
        scores.append(rows)
    return scores


def divergence(turns: list[Turn], scores: list[list[Score]]) -> float:
    """Return KL(cached ‖ cold) in nats a token, estimated from the generated tokens."""
    cold = [score.token for row in scores for score in row]
    assert len(cold) > 60
    return k3([logprob for turn in turns for logprob in turn.logprobs], cold)


def check_normal(cached: LLM, cold: LLM, *, seed: int, count: int) -> None:
    """Check log probabilities, greedy tokens and divergence of conversations in steps of any shape."""
    cached.flush_cache()
    turns = [turn for turn in Talk(cached, seed, count, logprobs=0).run() if turn.tokens]
    check_that_much_happened(cached, turns)
    scores = cold_scores(cold, turns)
    ties = greedy = 0
    for turn, row in zip(turns, scores, strict=True):
        off = np.abs(np.array([score.token for score in row]) - turn.logprobs)
        assert off.max() < TOLERANCE
        if turn.params.temperature == 0 and turn.params.repetition_penalty == 1:
            greedy += len(row)
            for score in row:
                ties += score.token < score.first
                assert score.token == score.first or score.first - score.second < MARGIN
    assert ties <= 0.001 * greedy
    assert greedy > 60
    by_kind: dict[str, list[int]] = {"prompt": [], "answer": []}
    for index, turn in enumerate(turns):
        if turn.hit:
            by_kind["answer" if any(turn.written[: turn.hit]) else "prompt"].append(index)
    for chosen in by_kind.values():
        assert divergence([turns[i] for i in chosen], [scores[i] for i in chosen]) < 1e-6


@pytest.fixture(scope="module")
def same_shape() -> Iterator[LLM]:
    """Return an engine whose steps all have one shape."""
    with LLM("tiny", deterministic=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def cached() -> Iterator[LLM]:
    """Return a small engine with default options."""
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def cold() -> Iterator[LLM]:
    """Return an engine without a prefix cache."""
    with LLM("tiny", deterministic=True, prefix_cache=False, **OPTIONS) as llm:
        yield llm


def test_conversations_get_the_tokens_of_cold_runs_in_deterministic_mode(same_shape: LLM) -> None:
    """Greedy and sampled turns, with and without penalties."""
    check_deterministic(same_shape, seed=2, count=24)


@pytest.mark.nightly
def test_conversations_have_the_probabilities_of_cold_runs(cached: LLM, cold: LLM) -> None:
    """In steps of any shape: log probabilities within 2e-4, equal greedy tokens except for ties, a divergence of 0.

    The divergence is computed separately for hits that end in a prompt and for hits with generated text, whose KV was
    written by decode steps.
    """
    check_normal(cached, cold, seed=1, count=32)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_hundred_conversations_get_the_tokens_of_cold_runs(same_shape: LLM, seed: int) -> None:
    """A thousand, over all seeds and turns."""
    same_shape.flush_cache()
    check_deterministic(same_shape, seed=seed, count=100)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20, 30))
def test_a_hundred_conversations_have_the_probabilities_of_cold_runs(cached: LLM, cold: LLM, seed: int) -> None:
    """A thousand, over all seeds and turns."""
    check_normal(cached, cold, seed=seed, count=100)


def test_penalties_count_tokens_of_cached_prefixes(same_shape: LLM) -> None:
    """Tokens of a prompt, and generated tokens of a preempted row, count although their positions are not run again."""
    engine = same_shape.engine
    prompt = ids_of(same_shape, "Tom saw a big dog and the dog saw Tom. ", 90)
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    first = Turn(prompt, [], plain)
    first.tokens = alone(engine, first)
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
    ]
    turns = []
    for number, penalty in enumerate([{}, *penalties, {"temperature": 0.9, **penalties[0]}]):
        params = dataclasses.replace(plain, seed=number, **penalty)
        turn = Turn(prompt + first.tokens + prompt[: 20 + number], [], params)
        engine.add(make_request(engine, "again", turn))
        while engine.has_work():
            if len(turn.tokens) == 12 and engine.scheduler.running:
                engine.scheduler.preempt("again")
            for event in engine.step():
                turn.prefix = event.prefix or turn.prefix
                turn.tokens += [] if event.token is None else [event.token]
        assert turn.hit >= len(prompt) + len(first.tokens) - PAGE
        turns.append(turn)
    assert all(turn.tokens != turns[0].tokens for turn in turns[1:]), "a penalty that changes nothing proves nothing"
    reference = cold_engine(same_shape)
    for turn in turns:
        assert turn.tokens == alone(reference, turn)


def ask(llm: LLM, prompt: list[int], salt: str = "", **more: Any) -> RequestOutput:
    """Return a greedy answer of 12 tokens."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **more)
    (output,) = llm.generate([prompt], params, use_tqdm=False, cache_salt=salt)
    assert output.prefix is not None
    assert output.num_cached_tokens == output.prefix.cached_tokens
    return output


def test_the_prefix_hit_of_an_output_tells_how_many_tokens_were_run(
    same_shape: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn finds all tokens that the first has run: its prompt, and its answer without the last token."""
    runner: Any = same_shape.engine.runner
    launch, run = runner.launch, 0

    def count(plan: StepPlan) -> object:
        nonlocal run
        run += plan.num_tokens
        return launch(plan)

    monkeypatch.setattr(runner, "launch", count)
    for length in range(24, 24 + PAGE + 1):
        same_shape.flush_cache()
        prompt = ids_of(same_shape, "A sad bird ran into the garden. ", length)
        first = ask(same_shape, prompt)
        assert first.prefix == PrefixHit(length, 0, 0, 0, "cold")
        before = run
        again = [*prompt, *first.outputs[0].token_ids, *prompt[:5]]
        second = ask(same_shape, again)
        known = length + 11
        # One token beyond whole pages is not worth a copy of the page.
        found = known - 1 if known % PAGE == 1 else known
        assert second.prefix == PrefixHit(len(again), found, found, 0, "cold")
        assert run - before == len(again) - found + 11


def test_prefixes_that_must_not_be_used_are_not_reported_as_cached(same_shape: LLM) -> None:
    """Under another salt, with log probabilities of the prompt, on demand, and after a flush; each has its reason."""
    prompt = ids_of(same_shape, "Mia went home because it was very big. ", 70)
    text = ask(same_shape, prompt, "mine").outputs[0].token_ids
    cases: list[tuple[str, dict[str, Any], int, MissReason]] = [
        ("mine", {}, 69, "cold"),
        ("yours", {}, 0, "salt"),
        ("mine", {"prompt_logprobs": 0}, 0, "prompt logprobs"),
        ("mine", {"skip_reading_prefix_cache": True}, 0, "skipped"),
        ("mine", {}, 69, "cold"),
    ]
    for salt, more, found, reason in cases:
        output = ask(same_shape, prompt, salt, **more)
        assert output.prefix == PrefixHit(70, found, found, 0, reason)
        assert output.outputs[0].token_ids == text
    same_shape.flush_cache()
    assert ask(same_shape, prompt, "mine").prefix == PrefixHit(70, 0, 0, 0, "cold")

"""Random conversations on a device that runs late and whose free pages are poison (tests/support/late.py).

All layers local, sliding or chunked; both beside full layers. Requests continue each other, branch off, are aborted and
preempted on a pool that is too small for them. The reference is each text alone, without pages, cache and batch.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from jswa.architecture import ModelConfig, Reach
from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.model.binding import bind
from jswa.model.transformer import Params
from jswa.plan import StepPlan
from jswa.speculation import Speculation
from jswa.types import SamplingParams
from tests.support.late import LateRunner, programs_compiled_when_run
from tests.support.nights import sample
from tests.support.oracles import dense_attention, quick_compiles, random_params, small_model

PAGE, ROWS, TOKENS, LONGEST, AT_ONCE = 8, 3, 12, 96, 5
BOUND = 2.0**-16  # numbers of unit size, rounded to float32 some 256 times on the way to a log probability
SOFTCAP = 2.0
BLOCKS = {"LL": 10, "CC": 10, "LLF": 14, "CCF": 14}  # by layers; L: a window of 20, C: a chunk of 24, F: full
# Drafts of up to seven tokens from earlier texts, of which by chance some are spoiled.
DRAFTS = Speculation("suffix", 7, shortest=1, history=128, reference=64, acceptance=0.7)


@dataclass
class Device:
    """A model on a runner, and its dense forward."""

    model: ModelConfig
    params: Params
    layout: KVLayout
    limits: Limits
    runner: Runner
    dense: Callable[[Params, Int[Array, " T"]], Float[Array, "T V"]]


@dataclass
class Text:
    """The tokens of a request so far, and the log probabilities of those after its prompt."""

    tokens: list[int]
    prompt: int
    params: SamplingParams
    logprobs: list[float] = field(default_factory=list)


def make_device(pattern: str, drafts: Speculation | None) -> Device:
    """Return a small model on its runner: C for a chunked layer, L and F as in `small_model`. All have all features."""
    model, layers = small_model(pattern.replace("C", "L"), window=20), []
    for letter, layer in zip(pattern, model.layers, strict=True):
        reach = Reach(24, chunked=True) if letter == "C" else layer.attention.reach
        attention = dataclasses.replace(layer.attention, reach=reach, sinks=True, softcap=SOFTCAP)
        layers.append(dataclasses.replace(layer, attention=attention))
    model = dataclasses.replace(model, layers=tuple(layers))
    params, layout = random_params(model), KVLayout.of(model, PAGE)
    limits = Limits(LONGEST, ROWS, TOKENS, PAGE, BLOCKS[pattern], one_bucket=True, speculation=drafts)

    def dense(params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T V"]:
        decoder = bind(model, params)
        return jax.nn.log_softmax(decoder.logits(decoder(tokens, jnp.arange(LONGEST), dense_attention(model))))

    return Device(model, params, layout, limits, Runner(model, params, layout, limits), jax.jit(dense))


@pytest.fixture(
    scope="module", params=["LL", "CCF", "LLF drafts", *sample(["CC", "LLF", "LL drafts", "CCF drafts"], 4)]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Return a device for all tests of a model."""
    pattern, _, drafts = request.param.partition(" ")
    with programs_compiled_when_run():
        yield make_device(pattern, DRAFTS if drafts else None)


class Talk:
    """Runs `count` requests: fresh ones, and ones that begin with a part of an earlier text.

    `checks`: whether the laws of scheduler and cache are asserted on the way.
    """

    def __init__(self, device: Device, seed: int, count: int, *, checks: bool = True) -> None:
        self.late = LateRunner(device.runner, seed)
        self.engine = Engine(device.model, device.limits, device.layout, self.late, seed=seed)
        self.texts: dict[str, Text] = {}
        self.forced = self.aborts = 0
        self._choose = random.Random(seed)
        self._count, self._checks = count, checks
        self._vocab = device.model.vocab_size
        self._open: set[str] = set()

    def run(self) -> None:
        """Run until all requests have ended."""
        steps = 0
        while len(self.texts) < self._count or self.engine.has_work():
            if len(self.texts) < self._count and len(self._open) < AT_ONCE and self._choose.random() < 0.5:
                self._ask()
            if self._choose.random() < 0.07:
                self._interfere()
            self.late.poison_free_pages(self.engine)
            for event in self.engine.step():
                text = self.texts[event.request_id]
                assert event.token is not None, event
                assert event.logprobs is not None
                text.tokens.append(event.token)
                text.logprobs.append(event.logprobs.logprob)
                if event.finish_reason is not None:
                    self._open.remove(event.request_id)
            steps += 1
            if self._checks and steps % 8 == 0:
                self.engine.check()

    def _ask(self) -> None:
        """Add a request."""
        choose, name = self._choose, str(len(self.texts))
        begin: list[int] = []
        if self.texts and self.engine.limits.speculation is not None and choose.random() < 0.4:
            # The same question again, which is drafted from the answer of before.
            again = choose.choice(list(self.texts.values())[-4:])
            self._add(name, again.tokens[: again.prompt], again.params)
            return
        if self.texts and choose.random() < 0.7:
            earlier = choose.choice(list(self.texts.values()))
            begin = earlier.tokens[: choose.randint(1, min(len(earlier.tokens), LONGEST - 60))]
        prompt = begin + [choose.randrange(self._vocab) for _ in range(choose.choice((1, 5, 20)))]
        params = SamplingParams(
            temperature=0.8 if self.engine.limits.speculation is None else 0.05,
            seed=len(self.texts),
            max_tokens=choose.choice((1, 9, 50)),
            ignore_eos=True,
            logprobs=0,
        )
        self._add(name, prompt, params)

    def _add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.engine.add(self.engine.request(name, np.array(prompt, np.int32), params))
        self.texts[name] = Text(list(prompt), len(prompt), params)
        self._open.add(name)

    def _interfere(self) -> None:
        """Preempt a running row, or abort a request."""
        running = self.engine.scheduler.running
        if running and self._choose.random() < 0.7:
            self.engine.scheduler.preempt(self._choose.choice(running).request.request_id)
            self.forced += 1
        elif self._open:
            name = self._choose.choice(sorted(self._open))
            assert self.engine.abort(name) is not None
            self._open.remove(name)
            self.aborts += 1


def cold_logprobs(device: Device, text: Text) -> Float[np.ndarray, " n"]:
    """Return the log probability of each generated token by one forward over the whole text, without pages."""
    padded = np.zeros(LONGEST, np.int32)  # one shape; what follows a text does not change it
    padded[: len(text.tokens)] = text.tokens
    with quick_compiles():
        rows = np.asarray(device.dense(device.params, jnp.asarray(padded)))
    return rows[np.arange(text.prompt - 1, len(text.tokens) - 1), text.tokens[text.prompt :]]


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 30))])
def test_conversations_on_a_late_device_have_the_probabilities_of_cold_runs(device: Device, seed: int) -> None:
    """With hits, evictions, preemptions of both kinds, and aborts."""
    talk = Talk(device, seed, 24)
    talk.run()
    check_that_much_happened(talk)
    check_that_answers_repeat(talk)
    pairs = [(text.logprobs, cold_logprobs(device, text)) for text in talk.texts.values()]
    worst = max(np.abs(cold - found).max(initial=0) for found, cold in pairs)
    print(f"off by {worst:.2g}; {talk.forced} preempted by force, {talk.aborts} aborted")
    for found, cold in pairs:
        np.testing.assert_allclose(found, cold, rtol=0, atol=BOUND)


def check_that_much_happened(talk: Talk) -> None:
    """Assert that the host was ahead of the device, and what the pages went through.

    How often a row is preempted by force is chance: some ten times, and three times or fewer in a percent of the seeds.
    So is how many drafts there are: seed 22 has 35, of which 7 are right. Seed 18 has a single hit on local layers, all
    of which is run again.
    """
    cache, stats = talk.engine.cache_stats(), talk.engine.stats()
    assert talk.late.most_waiting == 2, "the host was never a step ahead"
    assert cache.full_hit_tokens > 0
    assert cache.evictions > 10
    assert talk.forced > 0
    assert talk.aborts > 0
    assert stats.preemptions >= talk.forced
    drafts = talk.engine.step_stats().drafts
    if drafts is not None:
        assert drafts.drafts > sum(drafts.accepted) > 0, "the drafts were all wrong, or all right"


def check_that_answers_repeat(talk: Talk) -> None:
    """Assert that the same question has the same answer, however much of either was drafted, as far as both go."""
    answers: dict[tuple[int, ...], list[int]] = {}
    for text in talk.texts.values():
        known = answers.setdefault((text.params.seed or 0, *text.tokens[: text.prompt]), text.tokens)
        shared = min(len(known), len(text.tokens))
        assert known[:shared] == text.tokens[:shared]


def slide_early(patch: pytest.MonkeyPatch, talk: Talk) -> None:
    """Local pages are freed one token before they leave the window or the chunk."""
    open_at, slide_all = CacheManager.open_at, CacheManager.slide_all

    def open_early(*arguments: Any) -> Lease | None:
        lease = open_at(*arguments)
        if lease is not None:
            lease.next_slide = 0
        return lease

    def early(cache: CacheManager, rows: Int[np.ndarray, " n"], launched: Int[np.ndarray, " n"]) -> None:
        slide_all(cache, rows, launched + 1)
        cache.table.next_slide[rows] = 0

    patch.setattr(CacheManager, "open_at", open_early)
    patch.setattr(CacheManager, "slide_all", early)


def keep_a_freed_page(patch: pytest.MonkeyPatch, talk: Talk) -> None:
    """A page table gets a page without an owner in place of the one that was handed out."""
    pool = talk.engine.scheduler.cache.pool

    def edit(plan: StepPlan) -> StepPlan:
        pages, free = plan.local_pages.copy(), np.flatnonzero(pool.local_owners[1:] == 0) + 1
        pages[:1, 2] = free[:1] if len(free) else pages[:1, 2]
        return dataclasses.replace(plan, local_pages=pages)

    talk.late.edit = edit


def lose_copies(patch: pytest.MonkeyPatch, talk: Talk) -> None:
    """Pages are not copied before the step that goes on in the copies."""
    talk.late.edit = lambda plan: dataclasses.replace(plan, moves=np.zeros((0, 3), np.int32))


@pytest.mark.parametrize("fault", [slide_early, keep_a_freed_page, lose_copies])
def test_a_stale_page_is_found(
    device: Device, fault: Callable[[pytest.MonkeyPatch, Talk], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversations of the test above, with a fault put in."""
    talk = Talk(device, 3, 24, checks=False)
    fault(monkeypatch, talk)
    with pytest.raises(AssertionError, match="read a stale page"):
        talk.run()

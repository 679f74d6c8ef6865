"""Text that was sampled after cached prefixes has the probabilities of cold runs: k3 is below 1e-6 nats a token.

This is the gate of SGLang's tests (k3, tools/divergence.py), for prefixes whose KV comes from prefill and from
decode steps, and for windows that are rebuilt by replay. Cold runs score prompt log probabilities, which never come
from the cache. Tests with faults show that the gate can fail: a page of zeros, a window that is off by one.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.architecture import Reach
from jswa.llm import LLM
from jswa.plan import RowMask, StepPlan, StepResults
from jswa.running.stepping import PendingStep, StepRunner
from jswa.storage.cache_store import PageRunner
from jswa.types import PrefixHit, RequestOutput, SamplingParams
from tests.e2e.prefix.test_revival import FIXTURES
from tests.parity.load import Fixture, load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.builders import changed
from tests.support.oracles import quick_compiles
from tools.divergence import forced, forced_logprob, k3

MOST, TOLERANCE = 1e-6, 2e-4  # docs/numerics.md
# Conversations on `tiny` pass the same gate: tests/e2e/prefix/test_conversations.py.
ALWAYS = ("gpt_oss_base",)
OTHERS = ["tiny", *(name for name in FIXTURES if name not in ALWAYS)]
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 1,  # so that few programs are compiled
    "max_num_batched_tokens": 16,
    "max_model_len": 2048,  # the arena has memory for one such row, so no text is evicted
    "kv_cache_memory_bytes": 1 << 25,
    "block_size": 4,
}
# Without this the arena would be as large as its rows need: too small for all texts to stay in the cache.
LARGER: dict[str, dict[str, Any]] = {
    "tiny": {"block_size": 16, "max_num_batched_tokens": 64, "max_model_len": 4096},
    # no full layers:
    **{name: {"max_num_seqs": 8} for name in ("mistral_w8", "phi3_base", "phimoe_base", "starcoder2_base")},
}
SAID, NEW = 22, 5  # tokens of an answer, and of the next question
Tokens = list[int]


@dataclass(frozen=True)
class Sampled:
    """A prompt, the text that was sampled after it, and its prefix hit."""

    prompt: Tokens
    said: Tokens
    logprobs: list[float]
    prefix: PrefixHit

    @property
    def text(self) -> Tokens:
        """Prompt and answer."""
        return self.prompt + self.said


@dataclass(frozen=True)
class Family:
    """An engine of a checkpoint, and a text that is longer than its windows."""

    llm: LLM
    tokens: Tokens

    def prompts(self) -> list[Tokens]:
        """Return three texts of which none is a prefix of another."""
        end = len(self.tokens) - 24
        return [self.tokens[:end], self.tokens[3:end], self.tokens[7 : end + 8]]

    def warm(self) -> list[Tokens]:
        """Fill the cache with these texts by prefill, and nothing else."""
        self.llm.flush_cache()
        with quick_compiles():
            self.llm.generate(self.prompts(), max_tokens=1, temperature=0, use_tqdm=False)
        return self.prompts()


@pytest.fixture(scope="module", params=[*ALWAYS, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    """Return one engine for all tests of a family."""
    if request.param == "tiny":
        with quick_compiles():
            llm = LLM("tiny", **OPTIONS | LARGER["tiny"])
        assert llm.tokenizer is not None
        words = np.random.default_rng(0).choice(["the", "cat", "saw", "a", "big", "dog", "and", "ran"], 330)
        tokens = llm.tokenizer.encode(" ".join(words.tolist()))[:330].tolist()
    else:
        fixture = load_fixture(request.param)
        with tempfile.TemporaryDirectory() as folder:
            llm = of_fixture(fixture, Path(folder), LARGER.get(request.param, {}))
        tokens = fixture.tokens.tolist()
    with llm:
        if llm.engine.layout.local is None:
            pytest.skip("no local layers, so no windows to lose")
        yield Family(llm, tokens)


def of_fixture(fixture: Fixture, folder: Path, options: Mapping[str, Any], **config: Any) -> LLM:
    """Return an engine of a fixture's checkpoint, with these options and changes of its config."""
    write_checkpoint(folder, {**fixture.config, **config}, fixture.tensors)
    with quick_compiles():
        return LLM(folder, **OPTIONS | dict(options))


def sample(llm: LLM, prompts: Sequence[Tokens], seed: int) -> list[Sampled]:
    """Return two answers to each prompt, sampled at temperature 1."""
    asked = [(prompt, seed + turn) for prompt in prompts for turn in range(2)]
    params = [
        SamplingParams(temperature=1.0, seed=one, max_tokens=SAID, ignore_eos=True, logprobs=0) for _, one in asked
    ]
    with quick_compiles():
        outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    return [sampled(output) for output in outputs]


def sampled(output: RequestOutput) -> Sampled:
    """Return the answer of a finished request."""
    (said,) = output.outputs
    assert said.logprobs is not None
    assert output.prefix is not None
    logprobs = [table[token].logprob for table, token in zip(said.logprobs, said.token_ids, strict=True)]
    return Sampled(output.prompt_token_ids, said.token_ids, logprobs, output.prefix)


def cold(llm: LLM, texts: Sequence[Tokens]) -> list[list[float]]:
    """Return log probabilities of all tokens of texts but the first, by runs that use no cached KV."""
    with quick_compiles():
        outputs = llm.generate(list(texts), temperature=0, max_tokens=1, prompt_logprobs=0, use_tqdm=False)
    found = []
    for text, output in zip(texts, outputs, strict=True):
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs[1:], text[1:], strict=True)
        found.append([table[token].logprob for table, token in pairs if table is not None])
    return found


def apart(llm: LLM, texts: Sequence[Sampled]) -> tuple[float, float]:
    """Return k3 of sampled text from an engine's cold runs, and the largest difference of log probabilities."""
    scores = [row[-len(one.said) :] for one, row in zip(texts, cold(llm, [t.text for t in texts]), strict=True)]
    found: Float[np.ndarray, " T"] = np.concatenate([one.logprobs for one in texts])
    expected: Float[np.ndarray, " T"] = np.concatenate(scores)
    assert len(found) >= 100
    return k3(found, expected), float(np.abs(found - expected).max())


def check(llm: LLM, texts: Sequence[Sampled]) -> None:
    """Assert that sampled text passes the gate."""
    divergence, furthest = apart(llm, texts)
    assert divergence < MOST
    assert furthest < TOLERANCE


def test_sampled_text_after_any_hit_has_the_probabilities_of_a_cold_run(family: Family) -> None:
    """Hits on prompts, hits on generated text, and hits whose windows were evicted."""
    llm, prompts = family.llm, family.warm()
    first = sample(llm, prompts, seed=0)
    assert all(one.prefix.cached_tokens > 0 for one in first)
    check(llm, first)
    follow_up = [one.text + family.tokens[:NEW] for one in first[::2]]
    second = sample(llm, follow_up, seed=10)
    for number, one in enumerate(second):
        assert one.prefix.cached_tokens > len(prompts[number // 2]), "no generated text was found in the cache"
    check(llm, second)
    if llm.engine.layout.full is None:
        return  # without full layers the texts go with their windows
    llm.engine.scheduler.cache.prefix.retention.drop_windows()
    third = sample(llm, follow_up, seed=20)
    assert all(one.prefix.full_hit_tokens > len(prompts[number // 2]) for number, one in enumerate(third))
    reach = llm.engine.layout.reach
    assert reach is not None
    assert reach == Reach(reach.size, chunked=True) or third[0].prefix.replayed_tokens > 0
    check(llm, third)


def test_a_forced_text_after_hits_has_the_probabilities_of_a_cold_run(family: Family) -> None:
    """Teacher-forced token by token: every request continues on KV that the request before has left in the cache."""
    llm, tokens = family.llm, np.array(family.tokens, np.int32)
    family.warm()
    found = []
    for at in range(len(tokens) - 24, len(tokens)):
        with quick_compiles():
            (output,) = forced(llm, [tokens], [at])
        assert output.num_cached_tokens > 0
        found.append(forced_logprob(output))
    (expected,) = cold(llm, [family.tokens])
    assert k3(found, expected[-24:]) < MOST
    assert np.abs(np.array(found) - expected[-24:]).max() < TOLERANCE


def zero_page(llm: LLM, text: Tokens) -> None:
    """Write zeros to the last but one cached local page of a text, which the next tokens still see."""
    engine = llm.engine
    runner, m = engine.runner, engine.layout.pages_per_slab
    assert isinstance(runner, PageRunner)
    tree = engine.scheduler.cache.prefix.tree
    path, length = tree.walk("", np.array(text, np.int32))
    page = (len(text) - 1) // engine.layout.page_size - 1
    slab = int(tree.pages(path, length)[1][page])
    assert slab > 0
    for first in range(slab * m, (slab + 1) * m, runner.slots_per_copy):
        slots = np.arange(first, min(first + runner.slots_per_copy, (slab + 1) * m), dtype=np.int32)
        zeros = [np.zeros_like(lane) for lane in runner.read_slots(slots)]
        runner.write_slots(slots, zeros, np.arange(len(slots), dtype=np.int32))


def test_the_gate_sees_a_page_of_zeros(family: Family) -> None:
    """One page of zeros in each window."""
    for prompt in family.warm():
        zero_page(family.llm, prompt)
    texts = sample(family.llm, family.prompts(), seed=0)
    assert all(one.prefix.cached_tokens > 0 for one in texts)
    assert apart(family.llm, texts)[0] > 10 * MOST


@dataclass(frozen=True, eq=False)
class Launched:
    """A step that ran another plan than the scheduler's."""

    plan: StepPlan
    pending: PendingStep

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Launch the second half of the step that runs."""
        self.pending.finish(masks)

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Return those of the step that ran."""
        return self.pending.tokens()

    def results(self) -> StepResults | None:
        """Return those of the step that ran."""
        return self.pending.results()


class Blind:
    """A runner whose rows see one position less of a cached window."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launch the step with the smaller window."""
        less: Int[np.ndarray, " R"] = plan.local_visible_from + (plan.local_visible_from > 0).astype(np.int32)
        return Launched(plan, self._runner.launch(changed(plan, local_visible_from=less)))


def test_the_gate_sees_a_window_that_is_one_short(family: Family) -> None:
    """Only the first step after a hit is affected: later windows do not contain the position any more."""
    engine, prompts = family.llm.engine, family.warm()
    runner = engine.runner
    engine.stepping.runner = Blind(runner)
    texts = sample(family.llm, prompts, seed=0)
    engine.stepping.runner = runner
    assert all(one.prefix.cached_tokens > 0 for one in texts)
    assert apart(family.llm, texts)[0] > MOST


@pytest.mark.nightly
def test_the_gate_sees_a_window_that_is_one_longer(tmp_path: Path) -> None:
    """A model with window W + 1, against cold runs of the same weights with window W."""
    fixture = load_fixture("gpt_oss_base")
    wrong = of_fixture(fixture, tmp_path / "wrong", {}, sliding_window=fixture.config["sliding_window"] + 1)
    right = of_fixture(fixture, tmp_path / "right", {})
    one = Family(wrong, fixture.tokens.tolist())
    texts = sample(wrong, one.warm(), seed=0)
    assert apart(right, texts)[0] > 10 * MOST

"""`deterministic=True`: tokens and log probabilities are the same bits, whatever else the engine does.

Promised for one engine, that is for one `max_num_seqs` and `max_num_batched_tokens`. Where XLA adds along rows, all its
steps have one batch shape. Where the library of CPU kernels does all of that, they have as many shapes as otherwise.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jswa.config import Limits
from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import TokenEvent
from jswa.types import SamplingParams, StructuredOutputsParams
from pallas_kernels.cpu import library
from tests.parity.load import load_fixture
from tests.parity.long.load import with_window
from tests.parity.weights import write_checkpoint
from tests.support.nights import sample
from tests.support.oracles import quick_compiles
from tests.support.tiny import SHAPES

OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "max_model_len": 512,  # the arena holds four such rows, so that no prefix is evicted
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "kv_cache_memory_bytes": 1 << 22,
}
# Full and sliding layers; sinks and experts; sliding layers only; chunks and experts; a stream of its own, shared KV;
# an embedding per layer, shared KV; attention beside the feed-forward.
MODELS = (
    *("mistral_layer_types", "gpt_oss_base", "mistral_w8", "llama4_text_every_second", "gemma3n_text_base"),
    *("gemma4_text_base", "cohere2_base"),
)
# Attention takes blocks of 128 keys. So windows span two of them, or three: wherever a block begins, it is seen.
WINDOW = 160
Bits = dict[str, list[tuple[Any, ...]]]  # of each request: tokens, and all that is said of their probabilities


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt and its parameters."""

    prompt: list[int]
    params: SamplingParams


def questions(name: str) -> dict[str, Asked]:
    """Return requests of several lengths: greedy, sampled and with penalties."""
    vocab, rng = int(load_fixture(name).tokens.max()) + 1, np.random.default_rng(3)
    prompts = [rng.integers(3, vocab, length).tolist() for length in (300, 5, 17, 150, 40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.0, "top_p": 0.8, "seed": 2, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "seed": 4},
    ]
    return {
        str(index): Asked(prompt, SamplingParams(**kind, max_tokens=12, ignore_eos=True, logprobs=2))
        for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    }


def run(engine: Engine, asked: dict[str, Asked], disturb: Callable[[Engine], None] = lambda _: None) -> Bits:
    """Run requests side by side; `disturb` is called before each step."""
    for name, one in asked.items():
        engine.add(engine.request(name, np.array(one.prompt, np.int32), one.params))
    found: Bits = {name: [] for name in asked}
    while engine.has_work():
        disturb(engine)
        for event in engine.step():
            found[event.request_id].append(seen(event))
    engine.check()
    return found


def seen(event: TokenEvent) -> tuple[Any, ...]:
    """Return all that an event says of its token."""
    assert event.token is not None
    assert event.logprobs is not None
    return event.token, event.logprobs


@contextmanager
def programs(name: str, dtype: str, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Yield a function that makes idle engines with changed limits on the same programs and arena."""
    fixture = load_fixture(name)
    write_checkpoint(folder, with_window(fixture.config, WINDOW), fixture.tensors)
    with quick_compiles(), LLM(folder, dtype=dtype, **OPTIONS) as llm:
        own = llm.engine

        def make(**changes: Any) -> Engine:
            limits: Limits = dataclasses.replace(own.limits, **changes)
            return Engine(own.model, limits, own.layout, own.runner, seed=0)

        yield make


def preempt_some(seed: int) -> Callable[[Engine], None]:
    """Return a disturbance that preempts a running row every few steps."""
    choose = random.Random(seed)

    def disturb(engine: Engine) -> None:
        running = engine.scheduler.running
        if running and choose.random() < 0.15:
            engine.scheduler.preempt(choose.choice(running).request.request_id)

    return disturb


# One in float32 with each change: bfloat16 rounds small differences away. But XLA left out roundings of Cohere 2's sums
# of parallel branches in some programs and not in others.
HALF = [name for name in MODELS if name != "cohere2_base"]
CASES = [
    *sample(MODELS, 7, "float32"),
    ("cohere2_base", "bfloat16"),
    *(pytest.param(name, "bfloat16", marks=pytest.mark.nightly) for name in HALF),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_bits_do_not_depend_on_what_else_runs(name: str, dtype: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Alone or in a batch, in chunks of any size, on cached prefixes or cold, preempted or not."""
    asked = questions(name)
    with programs(name, dtype, tmp_path) as make:
        assert make().limits.one_bucket != library.available()
        alone = {key: run(make(prefix_cache=False), {key: one})[key] for key, one in asked.items()}
        assert [len(bits) for bits in alone.values()] == [12] * len(asked)
        with subtests.test("together"):
            for order in (["3", "1", "0", "2", "4"], ["2", "0"], ["4", "1", "2"]):
                assert run(make(), {key: asked[key] for key in order}) == {key: alone[key] for key in order}
        for most, long in ((4, 1), (7, 3), (16, 16)):
            with subtests.test("in chunks", most=most):
                assert run(make(max_tokens=most, long_prefill=long, prefix_cache=False), asked) == alone
        with subtests.test("cached"):
            engine = make()
            for cut in (9, 130, 201):  # inside of pages, so that prefixes end anywhere
                run(engine, {key: dataclasses.replace(one, prompt=one.prompt[:cut]) for key, one in asked.items()})
            found = engine.cache_stats().cached_tokens
            for _ in range(2):
                assert run(engine, asked) == alone
            assert engine.cache_stats().cached_tokens > found + sum(len(one.prompt) for one in asked.values())
        with subtests.test("preempted"):
            for cache in (True, False):
                engine = make(prefix_cache=cache)
                assert run(engine, asked, preempt_some(seed=int(cache))) == alone
                assert engine.stats().preemptions > 2


TINY: dict[str, Any] = {**SHAPES, "seed": 0}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
REQUESTS = {
    "Once upon a time": SamplingParams(temperature=0.9, seed=1, max_tokens=24, logprobs=2, ignore_eos=True),
    "The dog": SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    "A list of pets: ": SamplingParams(
        temperature=0.7, top_p=0.9, seed=2, max_tokens=20, logprobs=1,
        structured_outputs=StructuredOutputsParams(regex="(cat|dog|frog)(, (cat|dog|frog))*"),
    ),
    "one two three one two three one two": SamplingParams(temperature=0, max_tokens=30, logprobs=1, ignore_eos=True),
    "Tom and Lily went to the park. " * 4: SamplingParams(
        temperature=1.0, top_k=40, min_p=0.02, seed=3, max_tokens=16, logprobs=1, presence_penalty=0.4, ignore_eos=True
    ),
}  # fmt: skip


def told(llm: LLM, prompts: list[str]) -> list[tuple[Any, ...]]:
    """Return all that is said of the texts of these prompts, which run side by side."""
    found = llm.generate(prompts, [REQUESTS[prompt] for prompt in prompts], use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in found]


@pytest.mark.nightly
def test_bits_do_not_depend_on_forms_prompts_and_drafts_of_others() -> None:
    """Of a vocabulary whose sums XLA adds otherwise for one row than for sixteen; compiled with all optimisations."""
    prompts = list(REQUESTS)
    with LLM("tiny", deterministic=True, **TINY) as llm:
        alone = {prompt: told(llm, [prompt])[0] for prompt in prompts}
        for some in (prompts, prompts[::-1], prompts[1:4], prompts[:1] + prompts[3:]):
            llm.flush_cache()
            assert told(llm, some) == [alone[prompt] for prompt in some]
    with LLM("tiny", deterministic=True, speculative_config=DRAFTS, **TINY) as llm:
        for some in (prompts, prompts[3:4], prompts[2:]):
            assert told(llm, some) == [alone[prompt] for prompt in some]
        assert llm.engine.step_stats().drafts is not None

"""The paged step against transformers: chunked, batched, preempted and compacted, for prompts and generated tokens.

Every page without an owner holds NaN (tests/support/paged.py).
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Int

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec import runner as runner_module
from jswa.exec.buckets import Bucket
from jswa.exec.runner import Runner
from jswa.model.weights.load import load_checkpoint
from jswa.plan import StepPlan
from jswa.types import SamplingParams
from tests.parity.load import Fixture, load_fixture, names
from tests.parity.weights import write_checkpoint
from tests.support.nights import sample
from tests.support.oracles import dense_logits, quick_compiles, small_engine_parts
from tests.support.paged import FLOAT32, LENGTH, TOKENS, Device, Session, Text, compare


def serve(device: Device, texts: list[Text], *, chunk: int, num_slabs: int | None = None) -> Session:
    """Run all texts in overlapped steps of at most `chunk` tokens, in an arena of `num_slabs` slabs."""
    session = Session(device, chunk=chunk, num_slabs=num_slabs)
    session.run(*texts)
    session.check_zeros()
    return session


def serve_preempted(device: Device, texts: list[Text], *, chunk: int) -> Session:
    """Run all texts, and preempt a running row every third step, a few times each; memory is never short."""
    session = Session(device, chunk=chunk)
    for text in texts:
        session.add(text)
    steps = 0
    while session.scheduler.has_work():
        if steps % 3 == 2 and steps < 60 and session.scheduler.running:
            session.scheduler.preempt(
                session.scheduler.running[steps % len(session.scheduler.running)].request.request_id
            )
        session.step()
        steps += 1
    assert session.scheduler.preemptions > 3
    return session


def _other_texts(fixture: Fixture, vocab: int) -> list[Text]:
    """Return texts that differ from the fixture's at every position, so that no row can use another's pages."""
    rng = np.random.default_rng(7)

    def tokens() -> Int[np.ndarray, " T"]:
        return np.asarray((fixture.tokens + rng.integers(1, vocab, LENGTH)) % vocab, np.int32)

    # A prompt of a single token; a text that an end token stops; a text that is nearly all prompt.
    return [
        Text("long", tokens(), 1, 45),
        Text("stopped", tokens(), 29, 37, stops=True),
        Text("short", tokens(), 49, 52),
    ]


CUTS = {  # page sizes, and whether decode steps have a bucket of their own
    "mistral_w3": (1, False),
    "mistral_layer_types": (4, True),
    "llama_gqa": (4, True),
    "mistral_w8": (16, False),
    "mistral_w1": (4, False),
    "gemma3_wrapped": (1, False),
}


@pytest.mark.parametrize("name", sample(list(CUTS), 3))
def test_chunks_batches_and_pages_do_not_change_the_logits(
    name: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Logits at every chunk end equal those of transformers."""
    page_size, decode = CUTS[name]
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, params = load_checkpoint(tmp_path, FLOAT32)
    others = _other_texts(fixture, model.vocab_size)
    with quick_compiles():
        expected = {text.name: dense_logits(model, params, text.tokens) for text in others}
    expected["main"] = fixture.sketch
    device = Device(model, params, page_size, decode=decode)
    assert all(x.attention.reach is None or len(fixture.tokens) > 2 * x.attention.reach.size for x in model.layers)
    prompt = len(fixture.prompt)
    main = Text("main", fixture.tokens, prompt)
    for chunk in (1, 3, 16, TOKENS):
        with subtests.test("alone", chunk=chunk):
            session = serve(device, [main], chunk=chunk)
            ends = {*range(chunk - 1, prompt - 1, chunk), *range(prompt - 1, len(fixture.tokens) - 1)}
            assert session.logits["main"].keys() == ends
            compare(session.logits["main"], fixture.sketch)

    crowd = [others[0], main, *others[1:]]
    for chunk in (5, TOKENS):
        with subtests.test("batched", chunk=chunk):
            for key, logits in serve(device, crowd, chunk=chunk).logits.items():
                compare(logits, expected[key])

    with subtests.test("preempted by hand"):
        for key, logits in serve_preempted(device, crowd, chunk=8).logits.items():
            compare(logits, expected[key])

    if device.layout.full is not None:  # else a row that runs never needs more memory
        with subtests.test("preempted"):
            session = serve(device, crowd, chunk=8, num_slabs=device.least_slabs(8))
            assert session.scheduler.preemptions > 0
            assert session.moves > 0 or page_size > 1, "no page was moved"
            for key, logits in session.logits.items():
                compare(logits, expected[key])


MOST_DIFFERENT = ("gpt_oss_base", "llama4_text_every_second", "gemma4_text_mix")
PAGE_SIZES = {"gemma2_base": 16, "qwen3_window_from_layer_2": 1, "gemma4_text_moe": 1}  # of others: 4
VARIANTS = ("mixtral_window", "phi3_long", *PAGE_SIZES)
OTHERS = sorted({*VARIANTS, *(name for name in names() if name.endswith("_base"))} - {*MOST_DIFFERENT})


@pytest.mark.parametrize("name", [*sample(MOST_DIFFERENT, 3), *sample(OTHERS, 20)])
def test_batched_chunks_of_every_family_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Sinks, chunked attention, softcaps and mixtures of experts in the paged step, also with preempted rows."""
    page_size = PAGE_SIZES.get(name, 4)
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, params = load_checkpoint(tmp_path, FLOAT32)
    model = model.at_length(LENGTH)
    other = _other_texts(fixture, model.vocab_size)[0]
    with quick_compiles():
        expected = {"main": fixture.sketch, other.name: dense_logits(model, params, other.tokens)}
    device = Device(model, params, page_size)
    texts = [other, Text("main", fixture.tokens, len(fixture.prompt))]
    for session in (serve(device, texts, chunk=11), serve_preempted(device, texts, chunk=11)):
        for text, logits in session.logits.items():
            compare(logits, expected[text])


def make_engine(**changes: Any) -> Engine:
    """Return an engine on the shared runner, with a smaller arena, fewer rows or shorter steps than it has."""
    model, _, layout, limits, runner = small_engine_parts()
    return Engine(model, dataclasses.replace(limits, **changes), layout, runner, seed=0)


def generate(engine: Engine, prompts: list[Int[np.ndarray, " P"]], count: int) -> list[list[int]]:
    """Return greedy tokens of prompts that arrive one step apart."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    waiting = [engine.request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0))
        for event in engine.step():
            assert event.token is not None, event
            found[event.request_id].append(event.token)
    return list(found.values())


def assert_same_text(prompt: Int[np.ndarray, " P"], alone: list[int], crowded: list[int]) -> None:
    """Assert equality up to the first tie: a choice between two tokens whose cold logits are within 1e-3."""
    assert len(alone) == len(crowded)
    model, params, *_ = small_engine_parts()
    for index, (first, second) in enumerate(zip(alone, crowded, strict=True)):
        if first != second:
            text = np.concatenate([prompt, alone[:index]]).astype(np.int32)
            best = np.sort(dense_logits(model, params, text)[-1])
            assert best[-1] - best[-2] < 1e-3, f"generated token {index} is {second}, alone it is {first}"
            return


def make_prompts(count: int, seed: int, low: int = 1, high: int = 90) -> list[Int[np.ndarray, " P"]]:
    """Return random prompts of random lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 61, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture's tokens, alone and beside others, in steps of any size; decode tokens come from the device."""
    fixture = load_fixture("mistral_layer_types")
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    model, params = load_checkpoint(tmp_path, FLOAT32)
    layout, limits = KVLayout.of(model, 4), Limits(128, 3, 16, page_size=4, num_slabs=100)
    buckets = (Bucket(3, 3, decode=True), Bucket(16, 3, decode=False))
    monkeypatch.setattr(
        runner_module, "bucket_table", lambda *_, **__: buckets
    )  # two programs compile faster than three
    with quick_compiles():
        runner = Runner(model, params, layout, limits)
    expected = fixture.tokens[len(fixture.prompt) :].tolist()
    for max_tokens in (3, 16):
        for company in ([], [fixture.prompt[:5], fixture.prompt[::-1].copy(), fixture.prompt[:33]]):
            engine = Engine(model, dataclasses.replace(limits, max_tokens=max_tokens), layout, runner, seed=0)
            assert generate(engine, [fixture.prompt, *company], len(expected))[0] == expected


@pytest.mark.parametrize("length", [400, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_a_long_text_holds_one_window_of_local_pages(length: int) -> None:
    """At most touch(W) + 1 local pages after each step of prefill and decode; the tokens are the dense model's."""
    engine = make_engine()
    model, params, layout, *_ = small_engine_parts()
    assert layout.reach == Reach(64)
    most = layout.touch(64) + 1
    prompt = make_prompts(1, seed=3, low=200, high=201)[0]
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    engine.add(engine.request("long", prompt, sampling))
    tokens: list[int] = []
    held = []
    while engine.has_work():
        tokens += [event.token for event in engine.step() if event.token is not None]
        held.append(engine.stats().local_pages)
    assert len(tokens) == length
    assert max(held) <= most
    text = np.concatenate([prompt, tokens]).astype(np.int32)
    logits = dense_logits(model, params, text, compiled=True)[len(prompt) - 1 : -1]
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (chosen > logits.max(axis=-1) - 1e-3).all(), "a token is not the most likely one"


def test_preempted_rows_get_the_tokens_that_they_get_alone() -> None:
    """In a pool that is far too small for its rows: they are preempted, and run their known tokens again."""
    prompts = make_prompts(6, seed=5)
    alone = [generate(make_engine(), [prompt], 60)[0] for prompt in prompts]
    engine = make_engine(num_slabs=14, max_model_len=160)
    crowded = generate(engine, prompts, 60)
    assert engine.stats().preemptions > 0
    for prompt, first, second in zip(prompts, alone, crowded, strict=True):
        assert_same_text(prompt, first, second)


def test_compaction_does_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tiny pool with two full pages a slab: pages of running rows are moved."""
    runner = small_engine_parts()[-1]
    moves = 0
    launch = runner.launch

    def count_moves(plan: StepPlan) -> object:
        nonlocal moves
        moves += len(plan.moves)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", count_moves)
    prompts = make_prompts(12, seed=8, high=60)
    alone = [generate(make_engine(), [prompt], 30)[0] for prompt in prompts]
    assert moves == 0, "a large arena needs no compaction"
    crowded = generate(make_engine(num_slabs=16, max_model_len=96), prompts, 30)
    assert moves > 0
    for prompt, first, second in zip(prompts, alone, crowded, strict=True):
        assert_same_text(prompt, first, second)

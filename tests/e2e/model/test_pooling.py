"""Pooled hidden states of whole engines: those behind the logits that transformers computes for the same text.

A head maps hidden states to logits, so the head's product with a pooled hidden state is compared with the sketch of
transformers' logits. Without a softcap both are linear: the mean of hidden states gives the mean of the sketches.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float

from jswa.engine import Engine
from jswa.errors import RequestError
from jswa.llm import LLM
from jswa.plan import TokenEvent
from jswa.types import RequestOutput, SamplingParams
from tests.parity.load import Fixture, load_fixture
from tests.parity.sketch import sketch
from tests.parity.weights import write_checkpoint
from tests.support.late import programs_compiled_when_run
from tests.support.nights import sample
from tests.support.oracles import quick_compiles
from tests.support.tiny import ONE_SHAPE

TOLERANCE = 2e-4  # docs/numerics.md; a column of a sketch has eight logits
LAST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling="last")
MEAN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling="mean")
SCORED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
# Windows, a mixture of experts with sinks, layers that run for the last token of a row only, and full layers.
NAMES = ("qwen3_window_from_layer_2", "gpt_oss_base", "gemma3n_text_base", "llama_gqa")
LENGTHS = (37, 1, 23, 50, 16)  # of prompts; steps have 16 tokens


def open_llm(folder: Path, **options: Any) -> LLM:
    """Return an LLM with small steps and pages."""
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4, "max_model_len": 96}
    return LLM(folder, kv_cache_memory_bytes=1 << 22, **{**sizes, **options})


@pytest.fixture(params=sample(list(NAMES), 2))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LLM, Fixture]]:
    """A fixture's checkpoint in an engine."""
    fixture = load_fixture(request.param)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    with programs_compiled_when_run(), quick_compiles(), open_llm(tmp_path) as llm:
        yield llm, fixture


def head(fixture: Fixture) -> Float[np.ndarray, "V M"]:
    """The matrix that maps hidden states to logits, in float64."""
    names = [name for name in fixture.tensors if name.endswith("lm_head.weight")]
    names += [name for name in fixture.tensors if name.endswith("embed_tokens.weight")]
    return fixture.tensors[names[0]].astype(np.float64)


def sketched(fixture: Fixture, output: RequestOutput) -> Float[np.ndarray, " C"]:
    """The sketch of the logits behind a pooled hidden state."""
    assert output.pooled is not None
    assert output.pooled.dtype == np.float32
    logits = head(fixture) @ output.pooled.astype(np.float64)
    cap = fixture.config.get("final_logit_softcapping") or fixture.config.get("text_config", {}).get(
        "final_logit_softcapping"
    )
    return sketch(logits if cap is None else cap * np.tanh(logits / cap))


def check_last(fixture: Fixture, outputs: Sequence[RequestOutput]) -> None:
    """Assert that each output has the hidden state behind the logits of its prompt's last token."""
    for output in outputs:
        np.testing.assert_allclose(
            sketched(fixture, output), fixture.sketch[len(output.prompt_token_ids) - 1], rtol=0, atol=TOLERANCE
        )


def test_pooled_hidden_states_are_those_of_transformers(served: tuple[LLM, Fixture]) -> None:
    """Cold in one batch, over the ends of chunks, after prefix hits, and beside requests for log probabilities."""
    llm, fixture = served
    text = fixture.tokens.tolist()
    prompts = [text[:length] for length in LENGTHS]
    check_last(fixture, llm.generate(prompts, LAST, use_tqdm=False))
    again = llm.generate(prompts, LAST, use_tqdm=False)
    check_last(fixture, again)
    assert again[0].num_cached_tokens > 0
    mixed = [LAST, SCORED, MEAN, SCORED, LAST]
    outputs = llm.generate(prompts, mixed, use_tqdm=False)
    check_last(fixture, [outputs[0], outputs[4]])
    for scored in (outputs[1], outputs[3]):
        assert scored.pooled is None
        assert scored.prompt_logprobs is not None
        ids = scored.prompt_token_ids
        found = [one[ids[at]].logprob for at, one in enumerate(scored.prompt_logprobs) if one is not None]
        np.testing.assert_allclose(found, fixture.log_probs[: len(ids) - 1], rtol=0, atol=TOLERANCE)
        assert scored.outputs[0].logprobs is not None
    if fixture.name != "gemma3n_text_base":  # whose softcap is not linear
        np.testing.assert_allclose(
            sketched(fixture, outputs[2]), fixture.sketch[: LENGTHS[2]].mean(axis=0), rtol=0, atol=TOLERANCE
        )
    assert outputs[2].num_cached_tokens == 0
    assert outputs[2].prefix is not None
    assert outputs[2].prefix.reason == "mean pooling"
    llm.engine.check()


def run_preempted(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> dict[str, TokenEvent]:
    """Run requests; preempt a running one before every third step, ten times in all. Return their last events."""
    for number, prompt in enumerate(prompts):
        engine.add(engine.request(str(number), np.array(prompt, np.int32), params))
    found: dict[str, TokenEvent] = {}
    steps = preempted = 0
    while engine.has_work():
        running = engine.scheduler.running
        if steps % 3 == 2 and preempted < 10 and running:
            engine.scheduler.preempt(running[steps % len(running)].request.request_id)
            preempted += 1
        found |= {event.request_id: event for event in engine.step()}
        engine.check()
        steps += 1
    assert engine.stats().preemptions >= 3
    return found


def test_preempted_rows_are_pooled_once(tmp_path: Path) -> None:
    """A row that begins anew adds up its prompt anew."""
    fixture = load_fixture("llama_gqa")
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    text = fixture.tokens.tolist()
    prompts = [text[:length] for length in LENGTHS]
    with programs_compiled_when_run(), quick_compiles(), open_llm(tmp_path, prefix_cache=False) as llm:
        for params in (LAST, MEAN):
            events = run_preempted(llm.engine, prompts, params)
            for number, prompt in enumerate(prompts):
                pooled, all_tokens = events[str(number)].pooled, fixture.sketch[: len(prompt)]
                assert pooled is not None
                found = sketch(head(fixture) @ pooled.astype(np.float64))
                expected = all_tokens[-1] if params is LAST else all_tokens.mean(axis=0)
                np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_deterministic_engine_gives_the_same_bits_alone_and_in_a_batch() -> None:
    """Of the last token; a mean, whose rounding depends on the chunks, is refused by name."""
    with LLM("tiny", **ONE_SHAPE) as llm:
        rng = np.random.default_rng(3)
        prompts = [rng.integers(3, 400, length).tolist() for length in (5, 40, 23, 1)]
        batch = llm.embed(prompts, use_tqdm=False)
        llm.flush_cache()
        for prompt, output in zip(prompts, batch, strict=True):
            (alone,) = llm.embed([prompt], use_tqdm=False)
            assert alone.outputs.embedding == output.outputs.embedding
        with pytest.raises(RequestError, match="pooling = 'mean': must be 'last' in a deterministic engine"):
            llm.embed(prompts[:1], pooling="mean", use_tqdm=False)


def test_embeddings_and_scores_of_the_python_api() -> None:
    """Embeddings have length 1 unless they are asked for as they are; scores are cosines of them."""
    with LLM("tiny", **ONE_SHAPE) as llm:
        texts = ["The cat sat on the mat.", "A dog", "The cat sat on a mat."]
        vectors = [np.array(one.outputs.embedding) for one in llm.embed(texts, use_tqdm=False)]
        raw = [np.array(one.outputs.embedding) for one in llm.embed(texts, normalize=False, use_tqdm=False)]
        for vector, other in zip(vectors, raw, strict=True):
            assert len(vector) == llm.engine.model.d_model
            np.testing.assert_allclose(np.linalg.norm(vector), 1, atol=1e-6)
            np.testing.assert_allclose(vector * np.linalg.norm(other), other, atol=1e-5)
        one_to_n = [one.outputs.score for one in llm.score(texts[0], texts, use_tqdm=False)]
        np.testing.assert_allclose(one_to_n, [vectors[0] @ vector for vector in vectors], atol=1e-6)
        assert one_to_n[0] == pytest.approx(1)
        each = [one.outputs.score for one in llm.score(texts[:2], texts[1:], use_tqdm=False)]
        np.testing.assert_allclose(each, [vectors[0] @ vectors[1], vectors[1] @ vectors[2]], atol=1e-6)
        with pytest.raises(RequestError, match="text_1 = '2 texts, and text_2 has 3': must have one text"):
            llm.score(texts[:2], texts, use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions = 8: must be left out"):
            llm.embed(texts, dimensions=8, use_tqdm=False)

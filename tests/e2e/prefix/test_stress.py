"""Random arrivals, aborts and preemptions on the real step: every request gets the tokens that it gets alone."""

import random

import pytest

import jswa
from jswa.llm import LLM
from jswa.types import SamplingParams

TEXT = "Once upon a time, there was a clever goat named Sam. She lived at the edge of a green valley. " * 2
REQUESTS = 18


@pytest.mark.nightly
def test_random_traffic_on_a_small_pool_changes_no_tokens() -> None:
    """In deterministic mode; all laws hold after every step, and no page leaks."""
    choose = random.Random(1)
    with LLM(
        "tiny",
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=200,
        kv_cache_memory_bytes=560_000,
        deterministic=True,
    ) as llm:
        engine = llm.engine
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(TEXT)
        jobs = [
            (
                ids[: choose.randint(1, 120)],
                SamplingParams(
                    temperature=choose.choice([0.0, 0.9]),
                    seed=number,
                    max_tokens=choose.randint(1, 70),
                    ignore_eos=True,
                    repetition_penalty=choose.choice([1.0, 1.3]),
                ),
            )
            for number in range(REQUESTS)
        ]
        found: dict[str, list[int]] = {}
        aborted = set()
        while len(found) < REQUESTS or engine.has_work():
            if len(found) < REQUESTS and choose.random() < 0.9:
                name = str(len(found))
                engine.add(engine.request(name, *jobs[len(found)]))
                found[name] = []
            if found and choose.random() < 0.05:
                name = choose.choice(list(found))
                if engine.abort(name) is not None:
                    aborted.add(name)
            events = engine.step()
            engine.check()
            for event in events:
                if event.token is not None:
                    found[event.request_id].append(event.token)
        stats = engine.stats()
        assert stats.preemptions > 0, "the pool is too large for this test"
        assert aborted
        assert stats.free_slots + stats.cached_slots == stats.total_slots
        for number, (prompt, params) in enumerate(jobs):
            alone: list[jswa.RequestOutput] = llm.generate(prompt.tolist(), params, use_tqdm=False)
            tokens = alone[0].outputs[0].token_ids
            got = found[str(number)]
            assert got == tokens[: len(got)]
            assert str(number) in aborted or got == tokens

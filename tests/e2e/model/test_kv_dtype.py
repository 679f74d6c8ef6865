"""KV in fp8 in the whole engine: what it costs in quality, what memory it saves, and that the cache is exact."""

from typing import Any

import numpy as np
import pytest

from jswa.commands.evaluate import evaluate
from jswa.llm import LLM
from jswa.types import SamplingParams

pytestmark = pytest.mark.optimized  # many steps of few programs: unoptimised ones take three times as long

# One bucket: only two programs are compiled for each model.
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2_000_000, "max_num_batched_tokens": 128, "deterministic": True}
PROMPTS = ["Once upon a time, there was a", "The cat", "A long time ago, in a small village", "One day, Lily"]


def scores(llm: LLM, texts: list[list[int]]) -> list[float]:
    """Return the log probability of each token after the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output, ids in zip(llm.generate(texts, params, use_tqdm=False), texts, strict=True):
        table = output.prompt_logprobs
        assert table is not None
        for entry, token in list(zip(table, ids, strict=True))[1:]:
            assert entry is not None
            found.append(entry[token].logprob)
    return found


@pytest.mark.nightly
def test_fp8_kv_holds_four_times_the_tokens_at_little_loss() -> None:
    """Four times the slabs of float32 in the same bytes; the model's own stories take at most 1 % more bits."""
    with LLM("tiny", **OPTIONS) as wide:
        slabs = wide.engine.limits.num_slabs
        written = wide.generate(PROMPTS, temperature=0.7, seed=1, max_tokens=150, use_tqdm=False)
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in written]
        plain = scores(wide, texts)
    with LLM("tiny", **OPTIONS, kv_cache_dtype="fp8") as narrow:
        assert narrow.engine.limits.num_slabs == 4 * slabs
        cold = scores(narrow, texts)
        assert np.mean(cold) > 1.01 * np.mean(plain)  # log probabilities are negative
        assert np.abs(np.subtract(cold, plain)).max() > 1e-4  # the model did run in 8 bits
        # A cached prefix holds exactly the numbers that were computed cold.
        again = narrow.generate(texts, temperature=0, max_tokens=20, use_tqdm=False)
        assert any(output.num_cached_tokens for output in again)
        narrow.flush_cache()
        anew = narrow.generate(texts, temperature=0, max_tokens=20, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in anew] == [each.outputs[0].token_ids for each in again]


@pytest.mark.nightly
def test_pass_keys_are_found_with_weights_and_kv_of_8_bits() -> None:
    """Inside the window and far before it."""
    with LLM("tiny", **{**OPTIONS, "max_num_batched_tokens": 512}, kv_cache_dtype="fp8", quantization="int8") as llm:
        rows, _ = evaluate(llm, tasks=["passkey"], limit=1)
    assert [(row.distance, row.count, row.accuracy) for row in rows] == [(n, 1, 1.0) for n in (32, 128, 512, 2048)]

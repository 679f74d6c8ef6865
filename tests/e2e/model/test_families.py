"""Families in the whole engine: greedy tokens and log probabilities of a checkpoint folder, as transformers has them.

Short texts with log probabilities of the prompt, and long ones with several windows of a real page table.
"""

from pathlib import Path

import numpy as np
import pytest

from jswa.llm import LLM
from jswa.types import SamplingParams
from tests.parity.load import load_fixture, names
from tests.parity.long import load as long
from tests.parity.weights import write_checkpoint
from tests.support.late import programs_compiled_when_run
from tests.support.nights import sample
from tests.support.oracles import quick_compiles

# With shared KV at the end: the last layers run only the last token of a prompt, or all for log probabilities.
ALWAYS = "gemma3n_text_base"
OTHERS = [name for name in names() if name.endswith("_base") and name != ALWAYS]
LONG_BOUND = 2e-4  # docs/numerics.md


@pytest.mark.parametrize("name", [ALWAYS, *sample(OTHERS, 20)])
def test_tokens_and_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Cold, beside other prompts, and again on cached prefixes."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors, shards=2)
    prompt, text = fixture.prompt.tolist(), fixture.tokens.tolist()
    with quick_compiles():
        llm = LLM(
            tmp_path,
            max_model_len=96,
            max_num_seqs=3,
            max_num_batched_tokens=16,
            block_size=4,
            kv_cache_memory_bytes=1 << 23,
            deterministic=True,  # one shape, hence a third of the programs, as XLA adds up what draws need
            kernels="sampling=xla",
        )
    with llm:
        for turn in range(2):
            prompts = [prompt, text[:50], prompt[:33]]
            outputs = llm.generate(prompts, temperature=0, max_tokens=14, ignore_eos=True, use_tqdm=False)
            assert list(outputs[0].outputs[0].token_ids) == text[40:54]
            assert list(outputs[1].outputs[0].token_ids) == text[50:]
            assert (outputs[0].num_cached_tokens > 0) == (turn > 0)
        with quick_compiles():
            (scored,) = llm.generate(text[:60], max_tokens=1, prompt_logprobs=0, temperature=0, use_tqdm=False)
    assert scored.prompt_logprobs is not None
    found = [one[text[i]].logprob for i, one in enumerate(scored.prompt_logprobs) if one is not None]
    np.testing.assert_allclose(found, fixture.log_probs[:59], atol=2e-4)


@pytest.mark.parametrize("name", sample(long.names(), 80))
def test_long_prompts_of_every_family_get_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """300 tokens in chunks beside another prompt, and 24 greedy ones; again on cached prefixes, and on lost windows.

    Each family has two draws of weights and two window sizes, 24 and 96.
    """
    text = long.load_long(name)
    write_checkpoint(tmp_path, text.config, text.tensors)
    prompt, tokens = text.tokens[: long.PROMPT].tolist(), text.tokens[long.PROMPT :].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=long.GREEDY, ignore_eos=True, logprobs=0)
    with programs_compiled_when_run(), quick_compiles():
        llm = LLM(
            tmp_path,
            max_model_len=384,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            block_size=8,
            kv_cache_memory_bytes=1 << 23,
            deterministic=True,  # one shape, hence one program, as XLA adds up what draws need
            kernels="sampling=xla",
        )
        with llm:
            for turn in ("cold", "cached", "windows lost"):
                if turn == "windows lost":
                    llm.engine.scheduler.cache.prefix.retention.drop_windows()
                beside = [prompt[:200:-1]] if turn == "cold" else []
                output = llm.generate([prompt, *beside], params, use_tqdm=False)[0]
                assert list(output.outputs[0].token_ids) == tokens, turn
                assert output.outputs[0].logprobs is not None
                found = [one[token].logprob for one, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
                assert turn != "cached" or output.num_cached_tokens > 200
                print(f"{turn}: off by {np.abs(found - text.log_probs).max():.2g}")
                np.testing.assert_allclose(found, text.log_probs, rtol=0, atol=LONG_BOUND, err_msg=turn)

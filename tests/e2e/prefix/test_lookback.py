"""Whole engines whose layers see a chunk and the one before it: cold, cached and revived texts are the reference's."""

from pathlib import Path

import numpy as np
import pytest

from jswa.llm import LLM
from jswa.types import SamplingParams
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.oracles import quick_compiles
from tests.support.text.model import first_seen

CLOSE = 2e-4  # docs/numerics.md


@pytest.mark.parametrize(
    ("name", "page"), [("rnj1_base", 4), pytest.param("rnj1_chunk3", 1, marks=pytest.mark.nightly)]
)
def test_a_prompt_gets_the_same_tokens_cold_cached_and_after_its_windows_were_lost(
    name: str, page: int, tmp_path: Path
) -> None:
    """Of five chunks, in steps that end inside chunks. Revival replays as much as the layers see through each other."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    prompt, tokens = fixture.prompt.tolist(), fixture.tokens[len(fixture.prompt) :].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True, logprobs=0)
    with quick_compiles():
        llm = LLM(
            tmp_path,
            max_model_len=96,
            max_num_seqs=2,
            max_num_batched_tokens=13,
            block_size=page,
            kv_cache_memory_bytes=1 << 22,
            deterministic=True,  # one shape, hence one program
            kernels="sampling=xla",
        )
        with llm:
            for turn in ("cold", "cached", "windows lost"):
                if turn == "windows lost":
                    llm.engine.scheduler.cache.prefix.retention.drop_windows()
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                (answer,) = output.outputs
                assert output.prefix is not None
                assert list(answer.token_ids) == tokens, turn
                assert answer.logprobs is not None
                found = [one[token].logprob for one, token in zip(answer.logprobs, tokens, strict=True)]
                np.testing.assert_allclose(found, fixture.log_probs[len(prompt) - 1 :], atol=CLOSE, err_msg=turn)
                hit, start = output.prefix.full_hit_tokens, output.prefix.full_hit_tokens
                assert hit >= (0 if turn == "cold" else len(prompt) - page)
                if turn == "windows lost":
                    layout = llm.engine.layout
                    assert layout.reach is not None
                    assert layout.local is not None
                    for _ in range(layout.local.num_layers):
                        start = first_seen(layout.reach, start)
                    assert start > 0
                assert output.prefix.replayed_tokens == hit - start, turn

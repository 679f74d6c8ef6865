"""Where an engine that is not deterministic says something else with drafts, two tokens were equally likely."""

import random
import time
from typing import Any

import pytest

from jswa.llm import LLM
from jswa.running.runners import DraftingRunner
from jswa.types import CompletionOutput
from tests.support.drafts.drawn import Drawn

pytestmark = [pytest.mark.nightly, pytest.mark.optimized]
TIE = 0.07  # in log probabilities: logits of up to 16 in bfloat16 have steps of 1/16
SHARE = 0.01  # of the tokens, at most, are the first that differ in their text
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "dtype": "bfloat16"}
LENGTHS = (1, 3)
DRAFTS = {"method": "suffix", "num_speculative_tokens": LENGTHS[-1], "prompt_lookup_min": 1}
PROMPTS = [f"Once upon a time there was a {pet} named" for pet in ("cat", "dog", "bird", "fox")]


def said(llm: LLM) -> list[CompletionOutput]:
    """Each prompt twice: the second time the first answer is drafted."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "logprobs": 5, "ignore_eos": True, "use_tqdm": False}
    return [output.outputs[0] for _ in range(2) for output in llm.generate(PROMPTS, **asked)]


def margin(output: CompletionOutput, place: int, other: int) -> float:
    """By how much the token at a place was likelier than another one, which must be among the first five."""
    assert output.logprobs is not None
    table = output.logprobs[place]
    return table[output.token_ids[place]].logprob - table[other].logprob


def test_tokens_that_differ_are_near_ties() -> None:
    """In bfloat16, where ties are many; texts are compared up to the first difference."""
    with LLM("tiny", **OPTIONS) as plain, LLM("tiny", speculative_config=DRAFTS, **OPTIONS) as drafting:
        runner = drafting.engine.runner
        assert isinstance(runner, DraftingRunner)
        while runner.lengths(len(PROMPTS), tokens=0, split=False, variant="logprobs") != LENGTHS:
            time.sleep(0.5)  # they are compiled beside the steps
        drafting.engine.scheduler.drafting.choice = Drawn(random.Random(1), 4)
        expected, found = said(plain), said(drafting)
        drafts = drafting.engine.step_stats().drafts
    margins, compared = [], 0
    for one, other in zip(expected, found, strict=True):
        places = [at for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b]
        compared += places[0] + 1 if places else len(one.token_ids)
        margins += [margin(one, places[0], other.token_ids[places[0]])] if places else []
    print(f"{len(margins)} of {compared} tokens differ, by at most {max(margins, default=0.0):.4f}; {drafts}")
    assert drafts is not None
    assert sum(drafts.accepted) > 100
    assert len(margins) <= SHARE * compared
    assert all(0 <= one < TIE for one in margins)

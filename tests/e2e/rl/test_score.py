"""Scoring gives the bits of the rollout in deterministic mode, and the trainer's log probabilities are near."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jswa
from jswa.errors import InvalidSampling
from jswa.model.hf.config import parse_config
from jswa.rl.agreement import agreement
from jswa.rl.rollout import generate
from jswa.rl.score import experts, score
from jswa.rl.trainer import logprobs, parameters, sampling_masks
from jswa.types import SamplingParams
from tests.parity.load import load_fixture, names, read_config
from tests.parity.weights import write_checkpoint

FAMILIES = list({read_config(name)["model_type"]: name for name in reversed(names())}.values())
PROMPTS = [[5, 9, 21, 40, 8, 3, 77, 31, 12, 60, 2], [7, 7, 30]]


def test_rollout_score_and_gradient_agree(llm: jswa.LLM) -> None:
    """To the bit, and to rounding."""
    rollouts = generate(llm, [[1, 300, 301, 302], [1, 400, 401]], n=2, max_tokens=12, temperature=0.8, top_p=0.9)
    found = agreement(llm, parameters(), rollouts)
    assert found.rollout_to_score == 0
    assert found.rollout_to_gradient < 1e-4


def test_the_distribution_that_a_token_was_drawn_from(llm: jswa.LLM) -> None:
    """Temperature 1 without limits is the model's own; a greedy choice has the probability 1."""
    (whole,) = generate(llm, [[1, 300, 301]], max_tokens=12, temperature=1.0, ignore_eos=True)
    own = whole.completions[0]
    np.testing.assert_allclose(own.drawn_logprobs, own.logprobs, atol=1e-5)
    (only,) = generate(llm, [[1, 300, 301]], max_tokens=12, temperature=1.0, top_k=1, ignore_eos=True)
    (greedy,) = generate(llm, [[1, 300, 301]], max_tokens=12, temperature=0.0, ignore_eos=True)
    for one in (only.completions[0], greedy.completions[0]):
        np.testing.assert_array_equal(one.drawn_logprobs, 0)
        assert (one.logprobs < 0).all()
    assert own.finish_reason == "length"
    assert own.versions.tolist() == [llm.weights_version] * 12


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 20, "top_p": 0.9}, {"top_k": 300, "min_p": 0.02}, {"top_k": 1_024, "repetition_penalty": 1.3}, {}],
    ids=lambda limits: "-".join(limits) or "greedy",
)
def test_a_trainer_finds_the_distribution_that_a_token_was_drawn_from(llm: jswa.LLM, limits: dict[str, Any]) -> None:
    """By the sampling mask: among its tokens, a token is as likely as in the rollout. A greedy token stands alone."""
    prompts = [[1, 300, 301, 302], [1, 400, 401]]
    rollouts = generate(
        llm, prompts, n=2, max_tokens=12, temperature=0.8 if limits else 0.0, return_sampling_mask=True, **limits
    )
    for rollout in rollouts:
        for completion in rollout.completions:
            masks, begin = completion.sampling_mask, len(rollout.prompt)
            assert masks is not None
            assert len(masks) == len(completion.tokens)
            assert all(token in mask for token, mask in zip(completion.tokens, masks, strict=True))
            assert all(len(mask) == len(set(mask.tolist())) for mask in masks)
            assert max(map(len, masks)) <= limits.get("top_k", 1)
            if "repetition_penalty" in limits:  # which changes logits that the trainer does not see
                continue
            text = np.concatenate([rollout.prompt, completion.tokens])
            given = sampling_masks(masks, begin, len(text))
            found = logprobs(llm.engine.model, parameters(), text[None], given[None], 0.8)[0]
            np.testing.assert_allclose(found[begin - 1 :], completion.drawn_logprobs, atol=1e-4)
            whole = logprobs(llm.engine.model, parameters(), text[None], temperature=0.8)[0]
            np.testing.assert_allclose(found[: begin - 1], whole[: begin - 1], atol=1e-5)


def test_masks_come_with_texts_of_any_step(llm: jswa.LLM) -> None:
    """Beside log probabilities, prompts that have them, and requests that ask for nothing; and not unasked."""
    prompt: Any = {"prompt_token_ids": [1, 300, 301]}
    params = [
        SamplingParams(seed=3, max_tokens=8, temperature=0.9, top_k=5, ignore_eos=True, **asked)
        for asked in (
            {"return_sampling_mask": True},
            {"return_sampling_mask": True, "logprobs": 5},
            {"prompt_logprobs": 1},
            {},
        )
    ]
    masked, both, scored, plain = (one.outputs[0] for one in llm.generate([prompt] * 4, params, use_tqdm=False))
    assert masked.token_ids == both.token_ids == scored.token_ids == plain.token_ids
    assert masked.sampling_mask is not None
    assert both.sampling_mask is not None
    assert both.logprobs is not None
    assert [mask.tolist() for mask in masked.sampling_mask] == [mask.tolist() for mask in both.sampling_mask]
    # Without penalties the five tokens that are kept are the five most likely ones.
    assert [sorted(top)[: len(top)] for top in both.logprobs] == [mask.tolist() for mask in both.sampling_mask]
    assert scored.sampling_mask is plain.sampling_mask is None


def test_a_mask_without_a_bound_is_refused(llm: jswa.LLM) -> None:
    for top_k in (0, -1, 1_025):
        with pytest.raises(InvalidSampling, match=r"top_k = .*: must be from 1 to 1,024 with return_sampling_mask"):
            generate(llm, [[1, 2]], max_tokens=1, top_k=top_k, top_p=0.9, return_sampling_mask=True)
    with pytest.raises(ValueError, match="length = 4, width = 2"):
        sampling_masks([np.arange(3)], 3, 4, 2)


@pytest.mark.optimized
@pytest.mark.nightly  # the tests above have one family
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_scores_have_the_bits_of_the_rollout(name: str, tmp_path: Path) -> None:
    """Decoded token by token, in steps with other rows; scored as prompts in chunks."""
    fixture = load_fixture(name)
    write_checkpoint(tmp_path, fixture.config, fixture.tensors)
    routed = any(layer.moe for layer in parse_config(fixture.config).layers)
    options: dict[str, Any] = {"enable_return_routed_experts": routed}
    options |= {
        "max_model_len": 48,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "deterministic": True,
        "language_model_only": True,  # of a tower, fixtures have a tensor or two
    }
    with jswa.LLM(tmp_path, dtype="float32", **options) as llm:
        rollouts = generate(llm, PROMPTS, n=2, max_tokens=16, temperature=1.0, ignore_eos=True)
        rolled = [completion for rollout in rollouts for completion in rollout.completions]
        texts = [np.concatenate([r.prompt, c.tokens]) for r in rollouts for c in r.completions]
        scored = score(llm, texts)
        chosen = experts(llm, texts) if routed else [None] * len(texts)
    for text, completion, found, routes in zip(texts, rolled, scored, chosen, strict=True):
        assert len(completion.tokens) == 16
        assert len(found) == len(text) - 1
        np.testing.assert_array_equal(found[-16:], completion.logprobs)
        assert np.isfinite(found).all()
        if routes is None:
            assert completion.experts is None
            continue
        assert len(routes) == len(text) - 1
        np.testing.assert_array_equal(routes[-16:], completion.experts)
        assert ((routes >= -1) & (routes < 128)).all()

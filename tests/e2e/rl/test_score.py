"""Scoring gives the bits of the rollout in deterministic mode, and the trainer's log probabilities are near."""

import numpy as np

import jswa
from jswa.rl.agreement import agreement
from jswa.rl.rollout import generate
from jswa.rl.trainer import parameters


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

"""Compares the log probabilities of a rollout with its scores, and with those that a trainer differentiates."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jswa.llm import LLM
from jswa.model.transformer import Params
from jswa.rl.rollout import Rollout
from jswa.rl.score import score
from jswa.rl.trainer import logprobs


class Agreement(NamedTuple):
    """The largest differences of log probabilities, in nats, over `tokens` generated tokens."""

    tokens: int
    rollout_to_score: float
    rollout_to_gradient: float

    def __str__(self) -> str:
        """Return a line to print."""
        return (
            f"{self.tokens} tokens: max |Δ| between rollout and score {self.rollout_to_score:.2g}, "
            f"between rollout and the value inside jax.grad {self.rollout_to_gradient:.2g}"
        )


def agreement(llm: LLM, params: Params, rollouts: Sequence[Rollout]) -> Agreement:
    """Compare a rollout with `score` and with `logprobs` inside `jax.grad`.

    Args:
        params: the trainer's parameters, which the engine has by `update_weights`.
    """
    texts = [np.concatenate([r.prompt, c.tokens]) for r in rollouts for c in r.completions]
    rolled = [c.logprobs for r in rollouts for c in r.completions]
    longest = max(map(len, texts))
    padded = jnp.array([np.pad(text, (0, longest - len(text))) for text in texts])

    def total(given: Params) -> tuple[jax.Array, jax.Array]:
        found = logprobs(llm.engine.model, given, padded)
        return found.sum(), found

    _, inside = jax.grad(total, has_aux=True)(params)
    scored = score(llm, texts)
    trained = [np.asarray(row)[: len(text) - 1] for row, text in zip(inside, texts, strict=True)]
    return Agreement(sum(map(len, rolled)), _largest(rolled, scored), _largest(rolled, trained))


def _largest(rolled: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the largest difference at the generated tokens, which are the last of each text."""
    pairs = zip(rolled, others, strict=True)
    return max(float(np.abs(one - other[len(other) - len(one) :]).max(initial=0.0)) for one, other in pairs)

"""Divergence of two models, or of one model in two configurations, on sampled text."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jswa.llm import LLM
from jswa.types import RequestOutput, SamplingParams

Logprobs = Sequence[float] | Float[np.ndarray, " T"]


def k3(sampled: Logprobs, reference: Logprobs) -> float:
    """Estimate KL(q ‖ p) in nats per token from tokens drawn from q: the mean of r - 1 - log r with r = p / q.

    Schulman, Approximating KL Divergence (2020). The estimator is unbiased, like the mean of -log r, but no term is
    negative, so noise does not hide small divergences. On text that was not drawn from q it estimates nothing, but it
    is still 0 only if all probabilities agree.

    Args:
        sampled: log q of each token.
        reference: log p of each token.

    Raises ValueError if there are no tokens.
    """
    log_r = np.asarray(reference, np.float64) - np.asarray(sampled, np.float64)
    if not log_r.size:
        raise ValueError("a divergence needs at least one token")
    return float(np.mean(np.expm1(log_r) - log_r))


def forced(llm: LLM, texts: Sequence[Int[np.ndarray, " T"]], at: Sequence[int]) -> list[RequestOutput]:
    """Run a request per text: its first `at` tokens are the prompt, and only the next token of the text is allowed.

    So `forced_logprob` is the log probability of a token behind a prefix that may come from the cache. Prompt log
    probabilities never come from it.
    """
    params = [
        SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, allowed_token_ids=[int(text[i])])
        for text, i in zip(texts, at, strict=True)
    ]
    prompts = [{"prompt_token_ids": text[:i]} for text, i in zip(texts, at, strict=True)]
    return llm.generate(prompts, params, use_tqdm=False)


def forced_logprob(output: RequestOutput) -> float:
    """Return the log probability of the token that a `forced` request generated."""
    (completion,) = output.outputs
    assert completion.logprobs is not None
    return completion.logprobs[0][completion.token_ids[0]].logprob

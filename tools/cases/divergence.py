"""How far two models, or one model in two configurations, are apart on sampled text."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jswa.llm import LLM
from jswa.types import RequestOutput, SamplingParams

Logprobs = Sequence[float] | Float[np.ndarray, " T"]


def k3(sampled: Logprobs, reference: Logprobs) -> float:
    """KL(q ‖ p) in nats a token, estimated from tokens drawn from q: the mean of r - 1 - log r with r = p / q.

    Schulman, Approximating KL Divergence (2020): unbiased like the mean of -log r, but no term is negative, so small
    divergences do not drown in noise. On text that was not drawn from q it estimates nothing and still is 0 only where
    all probabilities agree.

    Args:
        sampled: log q of each token.
        reference: log p of each.
    """
    log_r = np.asarray(reference, np.float64) - np.asarray(sampled, np.float64)
    if not log_r.size:
        raise ValueError("a divergence needs at least one token")
    return float(np.mean(np.expm1(log_r) - log_r))


def forced(llm: LLM, texts: Sequence[Int[np.ndarray, " T"]], at: Sequence[int]) -> list[RequestOutput]:
    """One request per text: its first `at` tokens as the prompt, and the token that follows as the only one allowed.

    So the log probability of a text's token is read behind a prefix that may come from the cache, which prompt log
    probabilities never do: `forced_logprob`.
    """
    params = [
        SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, allowed_token_ids=[int(text[i])])
        for text, i in zip(texts, at, strict=True)
    ]
    prompts = [{"prompt_token_ids": text[:i]} for text, i in zip(texts, at, strict=True)]
    return llm.generate(prompts, params, use_tqdm=False)


def forced_logprob(output: RequestOutput) -> float:
    """Log probability of the token that a `forced` request was forced to say."""
    (said,) = output.outputs
    assert said.logprobs is not None
    return said.logprobs[0][said.token_ids[0]].logprob

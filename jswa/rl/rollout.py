"""Rollouts: token ids in; token ids, log probabilities, versions of the weights and reasons to end out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.architecture import ModelConfig
from jswa.errors import GenerationError
from jswa.frontend.outputs import Receiver
from jswa.frontend.requests import make_requests
from jswa.llm import LLM
from jswa.plan import Request, TokenEvent
from jswa.text.generated import GeneratedText
from jswa.types import FinishReason, SamplingParams


class Completion(NamedTuple):
    """One text behind a prompt. All arrays have an entry for each token.

    Attributes:
        tokens: the ids; an end token is the last.
        logprobs: log probabilities of the model itself, at temperature 1 and without limits (natural logarithm).
        drawn_logprobs: those in the distribution that the token was drawn from, behind penalties, temperature and
            limits; 0 where the choice was greedy.
        versions: the version of the weights that each token was sampled with.
        finish_reason: "stop", "length", or "abort".
        experts: those that the routers chose for the token before each of the tokens, in the layers with experts; −1
            where a layer has fewer than k. None unless the engine has `enable_return_routed_experts`.
        sampling_mask: the ids of the tokens from which each token was drawn (`return_sampling_mask`); otherwise None.
    """

    tokens: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    drawn_logprobs: Float[np.ndarray, " T"]
    versions: Int[np.ndarray, " T"]
    finish_reason: FinishReason
    experts: Int[np.ndarray, "T L k"] | None = None
    sampling_mask: list[Int[np.ndarray, " n"]] | None = None


class Rollout(NamedTuple):
    """A prompt and its n completions."""

    prompt: Int[np.ndarray, " P"]
    completions: list[Completion]


@dataclass
class _Text:
    """One text and its numbers so far."""

    request: Request
    text: GeneratedText
    logprobs: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    experts: list[bytes] = field(default_factory=list)
    masks: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    error: GenerationError | None = None

    def take(self, event: TokenEvent) -> None:
        """Add the event of a token, of a version, or of the end."""
        self.text.collect(event)
        if event.token is not None:
            assert event.logprobs is not None
            assert event.logprobs.drawn is not None
            self.logprobs.append(event.logprobs.logprob)
            self.drawn.append(event.logprobs.drawn)
            if event.logprobs.experts is not None:
                self.experts.append(event.logprobs.experts)
            if event.sampling_mask is not None:
                self.masks.append(event.sampling_mask)
        if event.finish_reason is not None:
            self.text.push(event)
            self.error = event.error

    def completion(self, shape: tuple[int, int] | None) -> Completion:
        """Return the whole text; `shape`: layers, and experts of a token. Raises the text's error."""
        if self.error is not None:
            raise self.error
        assert self.text.finish_reason is not None
        tokens, versions = (np.array(one, np.int32) for one in (self.text.tokens, self.text.versions))
        logprobs, drawn = (np.array(one, np.float32) for one in (self.logprobs, self.drawn))
        experts = None
        if shape is not None:
            experts = np.frombuffer(b"".join(self.experts), np.int16).reshape(len(tokens), *shape)
        masks = self.masks if self.request.params.return_sampling_mask else None
        return Completion(tokens, logprobs, drawn, versions, self.text.finish_reason, experts, masks)


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, **sampling: Any
) -> list[Rollout]:
    """Sample `n` texts behind each prompt of token ids; return them in the order of the prompts.

    Texts of a prompt compute it once. Requests of other threads share the steps, and other threads may change the
    weights meanwhile (`LLM.update_weights`). Nothing is decoded, so stop strings are not looked for: name stop tokens.

    Args:
        params: or its fields as keywords. A rollout needs no seed: two calls draw other texts.

    Raises RequestError, GenerationError.
    """
    wanted = replace(params or SamplingParams(**sampling), logprobs=0)
    groups: list[list[_Text]] = []
    try:
        for prompt in prompts:
            ids = np.array(prompt, np.int32)
            requests = make_requests(llm.engine, llm.tokenizer, llm.driver.new_id, [ids], wanted)
            groups.append([_Text(one, GeneratedText(None, interval=None, version=one.version)) for one in requests])
            for text in groups[-1]:
                llm.driver.add(text.request, Receiver(_never, text.take))
        while any(text.text.finish_reason is None for group in groups for text in group):
            llm.driver.advance()
    finally:
        for text in (text for group in groups for text in group):
            llm.driver.abort(text.request.request_id)
    shape = experts_shape(llm.engine.model) if llm.engine.limits.routed_experts else None
    return [Rollout(group[0].request.prompt, [text.completion(shape) for text in group]) for group in groups]


def experts_shape(model: ModelConfig) -> tuple[int, int]:
    """Return the number of layers with experts, and the most experts that one of them has for a token."""
    layers = [layer.moe for layer in model.layers if layer.moe is not None]
    return len(layers), max(moe.top_k for moe in layers)


def _never(token: int) -> None:
    raise AssertionError(f"token {token} came without its log probability")

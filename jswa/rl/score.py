"""Log probabilities of given texts by the engine's own programs: the rollout's bits in a deterministic engine."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jswa.errors import GenerationError, RequestError
from jswa.frontend.outputs import Receiver
from jswa.llm import LLM
from jswa.plan import PromptLogprobs, TokenEvent
from jswa.types import SamplingParams

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)


def score(llm: LLM, texts: Sequence[Sequence[int] | Int[np.ndarray, " T"]]) -> list[Float[np.ndarray, " T1"]]:
    """Return the log probability of each token but the first, of each text, given those before it.

    They are the model's own, at temperature 1 (`Completion.logprobs`), with the weights that the engine has. An engine
    with `deterministic=True` gives the bits of the rollout. A text must be shorter than max_model_len.
    Raises RequestError, GenerationError.
    """
    return [np.concatenate([table.chosen for _, table in found.parts]) for found in _scored(llm, texts)]


def experts(llm: LLM, texts: Sequence[Sequence[int] | Int[np.ndarray, " T"]]) -> list[Int[np.ndarray, "T1 L k"]]:
    """Return the experts that the routers choose for each token but the last, of each text, in the layers with experts.

    Of tokens that a rollout has generated they are those of the rollout, if the engine has `deterministic=True`.
    Raises RequestError unless the engine has `enable_return_routed_experts`; otherwise as `score`.
    """
    if not llm.engine.limits.routed_experts:
        raise RequestError("experts", "asked for", "enable_return_routed_experts must be True")
    tables = [[table for _, table in found.parts] for found in _scored(llm, texts)]
    return [np.concatenate([table.experts for table in parts if table.experts is not None]) for parts in tables]


def _scored(llm: LLM, texts: Sequence[Sequence[int] | Int[np.ndarray, " T"]]) -> list[PromptLogprobs]:
    ends: dict[str, TokenEvent] = {}
    names: list[str] = []

    def take(event: TokenEvent) -> None:
        if event.finish_reason is not None:  # not one that names the version of the weights
            ends[event.request_id] = event

    try:
        for text in texts:
            request = llm.engine.request(llm.driver.new_id(), np.array(text, np.int32), _PARAMS)
            names.append(request.request_id)
            llm.driver.add(request, Receiver(_never, take))
        while len(ends) < len(names):
            llm.driver.advance()
    finally:
        for name in names:
            llm.driver.abort(name)
    return [_found(ends[name]) for name in names]


def _found(event: TokenEvent) -> PromptLogprobs:
    if event.error is not None:
        raise event.error
    if not isinstance(event.prompt_logprobs, PromptLogprobs):
        raise GenerationError("the request was aborted before its text was scored")
    return event.prompt_logprobs


def _never(token: int) -> None:
    raise AssertionError(f"token {token} came without log probabilities of the prompt")

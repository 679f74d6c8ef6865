"""Log probabilities of given texts by the engine's own programs: those of the rollout, to the bit, if deterministic."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jswa.errors import GenerationError
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
    ends: dict[str, TokenEvent] = {}
    names: list[str] = []
    try:
        for text in texts:
            request = llm.engine.request(llm.new_id(), np.array(text, np.int32), _PARAMS)
            names.append(request.request_id)
            llm.add(request, Receiver(_never, lambda event: ends.setdefault(event.request_id, event)))
        while len(ends) < len(names):
            llm.advance()
    finally:
        for name in names:
            llm.abort(name)
    return [_found(ends[name]) for name in names]


def _found(event: TokenEvent) -> Float[np.ndarray, " T1"]:
    if event.error is not None:
        raise event.error
    if not isinstance(event.prompt_logprobs, PromptLogprobs):
        raise GenerationError("the request was aborted before its text was scored")
    return np.concatenate([table.chosen for _, table in event.prompt_logprobs.parts])


def _never(token: int) -> None:
    raise AssertionError(f"token {token} came without log probabilities of the prompt")

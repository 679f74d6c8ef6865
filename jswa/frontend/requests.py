"""Make the engine's requests of a call: one for each text of each prompt."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from jswa.frontend.engine_protocol import EngineLike
from jswa.plan import DEFAULT_OPTIONS, ImageRows, Request, RequestOptions
from jswa.text.inputs import bad_word_ids
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams


def make_requests(
    engine: EngineLike,
    tokenizer: Tokenizer | None,
    new_id: Callable[[], str],
    prompts: Sequence[Int[np.ndarray, " P"]],
    params: SamplingParams,
    options: RequestOptions = DEFAULT_OPTIONS,
    images: Sequence[ImageRows] = (),
) -> Iterator[Request]:
    """Yield the requests of all texts; the first n are for the first prompt. Raises RequestError.

    The time for a request does not depend on the number of tokens that the parameters name, except for the first
    request. Nor does it depend on the prompt's length, except for the first request of each prompt.

    Args:
        new_id: returns an id that no request has had.
        images: those of the only prompt.
    """
    words = bad_word_ids(params.bad_words or (), tokenizer)
    first: Request | None = None
    for prompt, choice in itertools.product(prompts, range(params.n)):
        first = engine.request(
            new_id(),
            first.prompt if first is not None and choice else prompt,
            params,
            options,
            bad_words=words,
            choice=choice,
            like=first,
            images=images,
        )
        yield first

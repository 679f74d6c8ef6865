"""The values of a request while it runs: its texts, their new parts, its times and options."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jswa.plan import DEFAULT_OPTIONS, ChoiceLogprobs, PromptLogprobs, RequestOptions, TokenEvent
from jswa.text.answers.parser import Answering
from jswa.text.generated import GeneratedText
from jswa.types import AnswerEvent, FinishReason

from ..http.errors import ApiError
from ..text.prompts import Prompt
from .fairness import Key

# Estimated bytes of an event with its JSON, and of each log probability with its token id.
_EVENT_BYTES, _NUMBER_BYTES = 400, 80
# The bytes of a stream's event before, between and after the JSON of its texts, by the kind of the text: "text" or a
# kind of `AnswerEvent`.
Frames = Mapping[str, tuple[bytes, ...]]


@dataclass(eq=False)
class Text:
    """One text of a request as it is generated.

    Attributes:
        generated: its characters so far, and how it ends.
        last_token: time of the last token, in seconds of `time.monotonic`; 0 before the first.
        tokens: generated so far.
        frames: how its new parts are written to a stream.
    """

    index: int
    prompt: Prompt
    generated: GeneratedText
    last_token: float = 0.0
    tokens: int = 0
    frames: Frames = field(default_factory=dict)


class Delta(NamedTuple):
    """The new part of one text, made from one event of the engine.

    Attributes:
        new: the new characters; of an answer, they are in `events` instead.
        offset: characters of the text before the token.
        error: why the text ends alone, in a stream that goes on with other texts.
    """

    text: Text
    new: str
    offset: int
    events: Sequence[AnswerEvent] = ()
    logprobs: ChoiceLogprobs | None = None
    prompt_logprobs: Collection[ChoiceLogprobs] | PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ApiError | None = None
    pooled: Float[np.ndarray, " M"] | None = None


class Wanted(NamedTuple):
    """What a request asks for: texts after each prompt, and tokens of each; None: as many as fit."""

    n: int = 1
    max_tokens: int | None = None


@dataclass
class Timing:
    """Times of a request's events, in seconds of `time.monotonic`; None before the event.

    Attributes:
        compiling: seconds that the request waited until programs were compiled, before it was queued.
    """

    arrival: float = field(default_factory=time.monotonic)
    compiling: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queued(self) -> float | None:
        """Seconds in the queue: from the arrival to the first step, without the wait for programs."""
        return None if self.scheduled is None else max(0.0, self.scheduled - self.arrival - self.compiling)

    def after(self, moment: float | None) -> float | None:
        """Return the seconds from the arrival to a moment."""
        return None if moment is None else max(0.0, moment - self.arrival)


@dataclass(frozen=True)
class Order:
    """The options of a request besides its prompts and sampling parameters.

    Attributes:
        key: the API key of the request.
        options: those of the engine, which does not know API keys: a tenant is a key's name.
        stream: whether deltas are sent as they arrive, rather than collected until the end.
        deadline: seconds after which the request ends with an error; None means no limit.
        answering: how the texts are read as answers; None if they are not.
    """

    key: Key = None
    options: RequestOptions = DEFAULT_OPTIONS
    stream: bool = False
    deadline: float | None = None
    answering: Answering | None = None


def size_of(event: TokenEvent) -> int:
    """Return the estimated bytes of memory of an event, including the JSON that is made of it for the client."""
    numbers = 0 if event.logprobs is None else 4 + len(event.logprobs.top_ids)
    if event.prompt_logprobs:
        numbers += len(event.prompt_logprobs) * (4 + len(next(iter(event.prompt_logprobs)).top_ids))
    numbers += 0 if event.pooled is None else len(event.pooled)
    return _EVENT_BYTES + _NUMBER_BYTES * numbers

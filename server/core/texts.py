"""The values of a request while it runs: its texts, their new parts, its times and options."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from jswa.plan import DEFAULT_OPTIONS, ChoiceLogprobs, PromptLogprobs, RequestOptions, TokenEvent
from jswa.text.answers.parser import Answering, AnswerParser
from jswa.text.assembler import Assembler
from jswa.types import AnswerEvent, DraftCounts, FinishReason

from ..http.errors import ApiError
from ..text.prompts import Prompt
from .fairness import Key

# Estimated bytes of an event with its JSON, and of each log probability with its token id.
_EVENT_BYTES, _NUMBER_BYTES = 400, 80
# The bytes of a stream's event around the JSON of its text, which stands between each two of them, by the kind of the
# text: "text" or a kind of `AnswerEvent`.
Frames = Mapping[str, tuple[bytes, ...]]


@dataclass(eq=False)
class Text:
    """One text as it is generated.

    Attributes:
        text: its assembler.
        answer: the parser of a chat's answer; None if the text is not an answer.
        last_token: time of the last token, in seconds of `time.monotonic`; 0 before the first.
        frames: how its new parts are written to a stream.
        unsent: tokens since the last part that was sent.
        ended: no further token belongs to the text.
        drafts: those so far.
    """

    index: int
    prompt: Prompt
    text: Assembler
    answer: AnswerParser | None
    last_token: float = 0.0
    frames: Frames = field(default_factory=dict)
    unsent: int = 0
    ended: bool = False
    drafts: DraftCounts = field(default_factory=lambda: DraftCounts(0, 0))
    _held: list[str] = field(default_factory=list)
    _events: list[AnswerEvent] = field(default_factory=list)

    def hold(self, new: str, events: list[AnswerEvent]) -> None:
        """Keep a new part until `flush`."""
        self._held.append(new)
        self._events += events

    def flush(self, new: str, events: list[AnswerEvent]) -> tuple[str, list[AnswerEvent]]:
        """Return the parts that were held with a new one behind them."""
        self.unsent = 0
        if self._held or self._events:
            new, events = "".join([*self._held, new]), _joined(self._events + events)
            self._held, self._events = [], []
        return new, events


class Delta(NamedTuple):
    """The new part of one text, made from one event of the engine.

    Attributes:
        new: the new characters; of an answer, they are in `events` instead.
        offset: characters of the text before the token.
        error: why the text ends alone, in a stream that goes on with other texts.
    """

    text: Text
    new: str
    token: int | None
    offset: int
    events: Sequence[AnswerEvent] = ()
    logprobs: ChoiceLogprobs | None = None
    prompt_logprobs: Collection[ChoiceLogprobs] | PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ApiError | None = None


@dataclass
class Timing:
    """Times of a request's events, in seconds of `time.monotonic`; None before the event."""

    arrival: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


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
    return _EVENT_BYTES + _NUMBER_BYTES * numbers


def _joined(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Return events of which those that add to the same text are one."""
    found: list[AnswerEvent] = []
    for (kind, call), group in groupby(events, lambda event: (event.kind, event.call)):
        if kind in _TEXTS:
            found.append(AnswerEvent(kind, "".join(event.text for event in group), call))
        else:
            found += group
    return found


_TEXTS = ("content", "reasoning", "arguments")  # kinds of events that add text

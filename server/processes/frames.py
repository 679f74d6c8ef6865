"""The messages between the engine's process and its front ends, as MessagePack.

A text has a number, which is unique in its front end. Arrays are bytes.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from jaxtyping import Shaped

from jswa import errors
from jswa.cache.view import ArenaGeometry, CacheView
from jswa.errors import GenerationError
from jswa.frontend.engine_thread import State
from jswa.frontend.operations import Verb
from jswa.images.picture import Picture
from jswa.plan import ChoiceLogprobs, LogprobTable, PromptLogprobs, RequestOptions, TokenEvent
from jswa.types import DraftCounts, FinishReason, PrefixHit, SamplingParams

from ..core.counts import Report


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of all messages."""


class Submit(Message):
    """Call of a front end: queue texts, the first n for the first prompt.

    The answer: the seconds that they waited for programs.

    Attributes:
        prompts: int32.
        pictures: of the images of a single prompt.
    """

    numbers: list[int]
    prompts: list[bytes]
    params: SamplingParams
    key: str | None
    options: RequestOptions
    pictures: list["PictureFrame"] = []


class Claim(Message):
    """Call of a front end: bytes of a budget for a key. The answer: `wanted` or `least` bytes, or 0 if neither fits."""

    budget: str
    key: str | None
    least: int
    wanted: int


class Admit(Message):
    """Call of a front end: count long work as a waiting text."""

    key: str | None
    tokens: int


class StoredConversation(Message):
    """Call of a front end: a stored conversation. The answer is JSON."""

    key: str | None
    name: str


class Compile(Message):
    """Call of a front end: compile a form, as `Forms.compile` does. The answer is a `Made`."""

    question: bytes
    delimiters: list[int]
    key: str | None


class Operate(Message):
    """Call of a front end for an operator: a verb, and its arguments in order. The answer is its result."""

    verb: Verb
    arguments: tuple[str | int | bool | None, ...]


class Ask(Message):
    """Call of a front end for an operator: a method of `EngineSide`, and its argument if it has one."""

    what: Literal["abort_named", "view", "metrics", "info", "standing"]
    argument: str | int | None = None


class Abort(Message):
    """A front end ends texts."""

    numbers: list[int]
    deliver_last: bool


class GiveBack(Message):
    """A front end returns bytes of a budget."""

    budget: str
    key: str | None
    amount: int


class Leave(Message):
    """A front end ends what `Admit` has counted."""

    key: str | None
    tokens: int


class Store(Message):
    """A front end stores a conversation, as JSON."""

    key: str | None
    name: str
    messages: bytes


class Ready(Message):
    """A front end listens."""


class Counted(Message):
    """What a front end has counted since it last said so."""

    report: Report


class GetReport(Message):
    """Call of the engine's process: the answer is a `Report`."""


class AbortNamed(Message):
    """Call of the engine's process: abort requests by name, or all; the answer is their number."""

    name: str | None


class Condition(Message):
    """The state of the engine, and the names of its adapters."""

    state: State
    adapters: list[str]


class Array(msgspec.Struct, array_like=True):
    """A numpy array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class PictureFrame(msgspec.Struct, array_like=True):
    """A picture, with the fields of `Picture`."""

    patches: Array
    positions: Array
    tokens: int
    digest: bytes


class EventFrame(msgspec.Struct, array_like=True):
    """A `TokenEvent`. `scores`, `score_arrays`: its log probabilities of the prompt, as entries or as arrays."""

    number: int
    token: int | None
    finish_reason: FinishReason | None
    stop_reason: int | None
    logprobs: ChoiceLogprobs | None
    scores: list[ChoiceLogprobs] | None
    score_arrays: list[tuple[Array, Array, Array, Array, Array]] | None
    first_scheduled_time: float | None
    prefix: PrefixHit | None
    error: tuple[str, str] | None
    pooled: Array | None
    drafts: DraftCounts | None


class StepFrame(Message):
    """The events of one step for one front end, or the tokens of several steps of the same texts.

    `numbers` (int64): texts with a token alone. `tokens` (int32): theirs in the first step, the second, and so on.
    """

    numbers: bytes
    tokens: bytes
    events: list[EventFrame]


class Last(Message):
    """The last event of a text that was aborted."""

    event: EventFrame


class Problem(msgspec.Struct):
    """An ApiError, with its attributes."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = {}


class Failed(Message):
    """The texts of a request have failed."""

    numbers: list[int]
    problem: Problem


class Drain(Message):
    """Refuse new requests."""


class End(Message):
    """Abort all requests and exit; at once if `now` is set."""

    now: bool = False


_Call = Submit | Claim | Admit | StoredConversation | Compile | Operate | Ask
FromFrontEnd = _Call | Abort | GiveBack | Leave | Store | Ready | Counted
FromEngine = GetReport | AbortNamed | Condition | StepFrame | Last | Failed | Drain | End
encode = msgspec.msgpack.Encoder().encode
from_front_end = msgspec.msgpack.Decoder(FromFrontEnd).decode
from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def event_out(event: TokenEvent, number: int) -> EventFrame:
    """Return an event as a message."""
    scores = event.prompt_logprobs
    arrays = None
    if isinstance(scores, PromptLogprobs):
        parts = [(tokens, *table[:4]) for tokens, table in scores.parts]  # tables of prompts have no more
        arrays = [(_array(a), _array(b), _array(c), _array(d), _array(e)) for a, b, c, d, e in parts]
    listed = None if scores is None or arrays is not None else list(scores)
    error = None if event.error is None else (type(event.error).__name__, str(event.error))
    pooled = None if event.pooled is None else _array(event.pooled)
    return EventFrame(
        number, event.token, event.finish_reason, event.stop_reason, event.logprobs, listed, arrays,
        event.first_scheduled_time, event.prefix, error, pooled, event.drafts,
    )  # fmt: skip


def event_in(event: EventFrame) -> TokenEvent:
    """Return the event of a message; its request id is the number."""
    scores: Sequence[ChoiceLogprobs] | PromptLogprobs | None = event.scores
    if event.score_arrays is not None:
        scores = PromptLogprobs()
        for tokens, *table in event.score_arrays:
            scores.add(_numpy(tokens), LogprobTable(*map(_numpy, table)))
    error = None
    if event.error is not None:
        error = getattr(errors, event.error[0], GenerationError)(event.error[1])
    pooled = None if event.pooled is None else _numpy(event.pooled)
    return TokenEvent(
        str(event.number), event.token, event.finish_reason, event.stop_reason, event.logprobs, scores,
        event.first_scheduled_time, event.prefix, error, pooled=pooled, drafts=event.drafts,
    )  # fmt: skip


def picture_out(picture: Picture) -> PictureFrame:
    """Return a picture as a message."""
    return PictureFrame(_array(picture.patches), _array(picture.positions), picture.tokens, picture.digest)


def picture_in(picture: PictureFrame) -> Picture:
    """Return the picture of a message."""
    return Picture(_numpy(picture.patches), _numpy(picture.positions), picture.tokens, picture.digest)


def _array(array: Shaped[np.ndarray, "..."]) -> Array:
    return Array(array.dtype.str, array.shape, array.tobytes())


def _numpy(array: Array) -> Shaped[np.ndarray, "..."]:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def packed_view(view: CacheView) -> bytes:
    """Return a view of the KV cache as bytes."""
    arrays = [
        np.ascontiguousarray(one).tobytes() for one in (view.slots, view.host, view.rows, view.tree, view.windows)
    ]
    return msgspec.msgpack.encode((view.geometry, arrays, view.seconds))


def unpacked_view(data: bytes) -> CacheView:
    """Return the view of `packed_view`."""
    geometry, (slots, host, rows, tree, windows), seconds = msgspec.msgpack.decode(
        data, type=tuple[ArenaGeometry, list[bytes], float]
    )
    return CacheView(
        geometry,
        np.frombuffer(slots, np.uint8),
        np.frombuffer(host, np.uint8),
        np.frombuffer(rows, np.int32).reshape(-1, 5),
        np.frombuffer(tree, np.int64).reshape(-1, 7),
        np.frombuffer(windows, np.int64).reshape(-1, 2),
        seconds,
    )

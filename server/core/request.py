"""A request while the engine runs it: its texts, and their new parts as they are generated."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jswa.errors import JswaError
from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.engine_thread import EngineThread
from jswa.frontend.requests import make_requests
from jswa.plan import ChoiceLogprobs, PromptLogprobs, Request, TokenEvent
from jswa.text.answers.parser import Answering, AnswerParser, assemblers
from jswa.text.assembler import Assembler
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import AnswerEvent, FinishReason, SamplingParams

from ..http import limits
from ..http.errors import ApiError, engine_errors, invalid
from ..text.prompts import Prompt
from .fairness import Admission, Budget, Key

_numbers = itertools.count()
# Estimated bytes of an event with its JSON, and of each log probability with its token id.
_EVENT_BYTES, _NUMBER_BYTES = 400, 80
_ALWAYS = 64 * 2**10  # bytes that any request may hold
_TURN = (
    32  # largest number of events that one callback of the event loop handles; events with log probabilities count more
)
_PLAIN = 5  # log probabilities that take as long as an event without any


@dataclass(eq=False)
class Text:
    """One text as it is generated.

    Attributes:
        text: its assembler.
        answer: the parser of a chat's answer; None if the text is not an answer.
        waits: the text has no token yet, and counts as waiting.
        last_token: time of the last token, in seconds of `time.monotonic`.
    """

    index: int
    prompt: Prompt
    text: Assembler
    answer: AnswerParser | None
    waits: bool = True
    last_token: float = 0.0


class Delta(NamedTuple):
    """The new part of one text, made from one event of the engine.

    Attributes:
        new: the new characters; of an answer, they are in `events` instead.
        offset: characters of the text before the token.
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
        tenant, weight: name and weight of the key for the engine, which does not know API keys.
        lora: name of the LoRA adapter to run with; None means no adapter.
        stream: whether deltas are sent as they arrive, rather than collected until the end.
        deadline: seconds after which the request ends with an error; None means no limit.
        answering: how the texts are read as answers; None if they are not.
    """

    key: Key = None
    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    lora: str | None = None
    priority: int = 0
    stream: bool = False
    deadline: float | None = None
    answering: Answering | None = None


def build(
    engine: EngineLike,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    order: Order,
) -> Iterator[Request]:
    """Yield the engine's requests, one for each text: the first n are for the first prompt. Raises ApiError."""
    beyond = [token for token in params.stop_token_ids if token >= engine.model.vocab_size]
    if beyond:
        raise invalid("stop_token_ids", f"{beyond[0]} must be in [0, {engine.model.vocab_size})")
    with engine_errors():
        yield from make_requests(
            engine,
            tokenizer,
            lambda: str(next(_numbers)),
            [prompt.ids for prompt in prompts],
            params,
            priority=order.priority,
            cache_salt=order.cache_salt,
            lora=order.lora,
            tenant=order.tenant,
            weight=order.weight,
        )


def size_of(event: TokenEvent) -> int:
    """Return the estimated bytes of memory of an event, including the JSON that is made of it for the client."""
    numbers = 0 if event.logprobs is None else 4 + len(event.logprobs.top_ids)
    if event.prompt_logprobs:
        numbers += len(event.prompt_logprobs) * (4 + len(next(iter(event.prompt_logprobs)).top_ids))
    return _EVENT_BYTES + _NUMBER_BYTES * numbers


class Job:
    """All texts of one request. Iterate over `deltas`, and always `close` the job, which frees its resources."""

    def __init__(
        self,
        engine_thread: EngineThread,
        admission: Admission,
        answers: Budget,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        params: SamplingParams,
        order: Order,
        stops: StopTable,
        between_tokens: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Queue requests that `build` has made and `admission` has admitted.

        Raises ApiError if the engine accepts no requests: then nothing is queued, and the caller must release the
        admission.

        Args:
            answers: the memory budget that all requests share, for events that wait and answers that are collected.
            stops: table of the parameters' stop strings, shared by all texts.
            between_tokens: called with the seconds between two tokens of a text.
        """
        self.timing = Timing()
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reasons: list[FinishReason] = []
        self.lora = order.lora
        self._engine_thread = engine_thread
        self._admission = admission
        self._answers = answers
        self._held = 0  # bytes that this job has acquired from `answers`
        self._events: asyncio.Queue[TokenEvent | ApiError] = asyncio.Queue()
        self._texts: dict[str, Text] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._order = order
        self._between_tokens = between_tokens
        answering = order.answering
        prefixes = [answering.prefix(prompt.text) if answering is not None else "" for prompt in prompts]
        for index, request in enumerate(requests):
            prompt, prefix = prompts[index // params.n], prefixes[index // params.n]
            text, answer = assemblers(answering, tokenizer, prefix, prompt.ids, params, stops)
            self._texts[request.request_id] = Text(index, prompt, text, answer)
        self._firsts = {request.request_id for request in requests[:: params.n]}
        with engine_errors():
            engine_thread.submit(requests, self._put)
        self._start_timers()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Iterate over the new parts of all texts, as they arrive, until all texts have ended. Raises ApiError."""
        done = 0
        while self._texts:
            if done >= _TURN:
                await asyncio.sleep(0)  # if many events wait, other work of the event loop has its turn
                done = 0
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            done += 1 if event.logprobs is None else 1 + len(event.logprobs.top_ids) // _PLAIN
            if self._order.stream:
                self._release(size_of(event))
            if event.request_id in self._texts:
                yield self._take(event, self._texts[event.request_id])

    def close(self) -> None:
        """End the texts that have not ended. Their pages are freed before the next step. Closing twice is fine."""
        for timer in self._timers:
            timer.cancel()
        self._engine_thread.abort(self._texts)
        for text in self._texts.values():
            self._leave_queue(text)
        self._texts = {}
        self._release(self._held)
        self.timing.finished = self.timing.finished or time.monotonic()

    @property
    def ids(self) -> list[str]:
        """The engine's request ids of the texts that have not ended."""
        return list(self._texts)

    def abort(self) -> None:
        """End the request on behalf of another client or the operator: its texts end with the reason "abort"."""
        self._engine_thread.abort(self._texts, deliver_last=True)

    def _put(self, event: TokenEvent | JswaError) -> None:
        """Queue an event or an error from the engine. If it exceeds the memory budget, the request ends."""
        queued: TokenEvent | ApiError
        if isinstance(event, TokenEvent):
            if event.version is not None:
                return  # answers do not say which weights their tokens come from
            queued = event
            size = size_of(event)
            most = limits.MAX_BACKLOG_BYTES if self._order.stream else int(self._answers.most) // 4
            wanted = self._held + size
            if wanted > max(most, _ALWAYS) or (wanted > _ALWAYS and not self._answers.fits(self._order.key, size)):
                queued = self._refuse(most if wanted > most else None)
            else:
                self._hold(size)
        else:
            queued = ApiError.of(event)
        self._events.put_nowait(queued)

    def _refuse(self, most: int | None) -> ApiError:
        """End the request and return its error, because of its own size or because of the size of all answers.

        Args:
            most: bytes that the request may hold, if it needs more; None if all answers together need too much.
        """
        self._answers.refused += 1
        self._engine_thread.abort(self._texts)
        while not self._events.empty():
            self._events.get_nowait()
        self._release(self._held)  # at once: events of other requests in the same step may fit now
        if most is None:
            message = "the answers of all requests use all memory of --max-answer-memory; try again later"
            return ApiError(503, message, code="answer_memory_full", headers={"Retry-After": "5"})
        if self._order.stream:
            return ApiError(
                408, f"the client reads too slowly: {most} bytes of the stream wait for it", code="client_too_slow"
            )
        message = f"the answer needs more than {most} bytes: lower max_tokens, n or logprobs, or use stream = true"
        return ApiError(400, message, code="answer_too_large")

    def _hold(self, size: int) -> None:
        self._held += size
        self._answers.hold(self._order.key, size)

    def _release(self, size: int) -> None:
        self._held -= size
        self._answers.release(self._order.key, size)

    def _take(self, event: TokenEvent, text: Text) -> Delta:
        if event.error is not None:
            raise ApiError.of(event.error)
        now = time.monotonic()
        if text.waits:
            self._leave_queue(text)
            self.timing.scheduled = self.timing.scheduled or event.first_scheduled_time
            self.timing.first_token = self.timing.first_token or now
        elif event.token is not None:
            self._between_tokens(now - text.last_token)
        text.last_token = now
        if event.prefix is not None and event.request_id in self._firsts:
            self.cached_tokens += event.prefix.cached_tokens
        assembled, answer, events = text.text, text.answer, []
        offset, before = assembled.offset, assembled.tokens
        new = assembled.push(event)
        self.completion_tokens += assembled.tokens - before
        reason = event.finish_reason
        stop_reason: int | str | None = event.stop_reason
        ended = assembled.stopped is not None
        if answer is not None:
            self.reasoning_tokens += answer.in_reasoning and assembled.tokens > before
            events = answer.feed(new)
            ended = ended or answer.done
        if ended:
            if reason is None:
                self._engine_thread.abort([event.request_id])
            reason, stop_reason = "stop", assembled.stopped
        if reason is not None:
            events += [] if answer is None else answer.finish()
            del self._texts[event.request_id]
            self.finish_reasons.append(reason)
        return Delta(text, new, event.token, offset, events, event.logprobs, event.prompt_logprobs, reason, stop_reason)

    def _leave_queue(self, text: Text) -> None:
        if text.waits:
            text.waits = False
            self._admission.release(self._order.key, 1, len(text.prompt.ids))

    def _start_timers(self) -> None:
        loop, order = asyncio.get_running_loop(), self._order
        if order.deadline is not None:
            late = ApiError(504, f"not finished within {order.deadline:g} s", code="deadline_exceeded")
            self._timers.append(loop.call_later(order.deadline, self._events.put_nowait, late))

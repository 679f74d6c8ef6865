"""A request while the engine runs it: its texts, and their new parts as they are generated."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from jswa.cache.prefix.stats import for_clients
from jswa.errors import JswaError
from jswa.plan import TokenEvent
from jswa.types import AnswerEvent, DraftCounts, FinishReason

from ..engine.side import Shares
from ..http import limits
from ..http.errors import ApiError
from ..http.pieces import encode
from .counts import Recorder
from .texts import Delta, Frames, Order, Text, Timing, size_of

_ALWAYS = 64 * 2**10  # bytes that any request may hold
_TURN = 32  # events that one callback of the event loop handles at most; log probabilities count as further events
_NOTHING_MORE = TokenEvent("", None)[2:]  # the fields of an event that is a token alone
_PLAIN = 5  # log probabilities that take as long as an event without any


@runtime_checkable
class Writer(Protocol):
    """The connection of a stream, for bytes that need no task to wait for the client."""

    @property
    def ready(self) -> bool:
        """Whether the client is there and has read enough."""
        ...

    def write(self, data: bytes, now: float) -> None:
        """Send bytes; `now` is the time of `time.monotonic`."""
        ...


class Job:
    """All texts of one request. Iterate over `deltas`, and always `close` the job, which frees its resources.

    While a stream's consumer waits for the next delta, tokens that come alone are sent at once, without a task's turn.
    """

    def __init__(
        self,
        texts: Mapping[str, Text],
        abort: Callable[..., None],
        answers: Shares,
        order: Order,
        recorder: Recorder,
        interval: int = 1,
    ) -> None:
        """Prepare to receive the events of texts, which are queued in the engine next.

        Args:
            texts: by id.
            abort: ends texts by their ids in the engine, as `Intake.abort` does.
            answers: the memory budget that all requests share, for events that wait and answers that are collected.
            interval: tokens of a text that are sent together, in streams.
        """
        self.timing = Timing()
        prompts = {text.prompt: None for text in texts.values()}
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.missed_tokens: Counter[str] = Counter()  # the other prompt tokens, by why they were not cached
        self.reasoning_tokens = 0
        self.drafts: DraftCounts | None = None
        self.finish_reasons: list[FinishReason] = []
        self.lora = order.options.lora
        self._texts = dict(texts)
        self._abort = abort
        self._answers = answers
        self._held = 0  # bytes that this job has acquired from `answers`
        self._queue: deque[TokenEvent | Delta | ApiError] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the consumer, while it waits for the queue
        self._timers: list[asyncio.TimerHandle] = []
        self._order = order
        self._recorder = recorder
        self._interval = interval if order.stream else 1
        self._writer: Writer | None = None
        self._firsts = {next(name for name, text in texts.items() if text.prompt is prompt) for prompt in prompts}
        self._start_timers()

    @property
    def tokens(self) -> dict[str, Callable[[int], None]]:
        """The functions that get a token of each text that comes alone."""
        return {name: partial(self._token, name, text) for name, text in self._texts.items()}

    def attach(self, writer: Writer, frames: Callable[[int], Frames]) -> None:
        """Send tokens to a connection at once, if nothing waits before them.

        Args:
            frames: returns the frames of a text, by its index.
        """
        for text in self._texts.values():
            text.frames = frames(text.index)
        self._writer = writer

    async def deltas(self) -> AsyncIterator[Delta]:
        """Iterate over the new parts of all texts, as they arrive, until all texts have ended. Raises ApiError."""
        done = 0
        while self._texts or self._queue:
            if done >= _TURN:
                await asyncio.sleep(0)  # if many events wait, other work of the event loop has its turn
                done = 0
            if not self._queue:
                await self._more()
            event = self._queue.popleft()
            if isinstance(event, ApiError):
                if self._texts:
                    raise event
                continue
            if isinstance(event, Delta):
                yield event
                continue
            done += 1 if event.logprobs is None else 1 + len(event.logprobs.top_ids) // _PLAIN
            if self._order.stream:
                self._release(size_of(event))
            if event.request_id in self._texts and (delta := self._take(event, self._texts[event.request_id])):
                yield delta

    async def _more(self) -> None:
        """Wait until the queue has an event."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """End the texts that have not ended. Their pages are freed before the next step. Closing twice is fine."""
        for timer in self._timers:
            timer.cancel()
        self._abort(self._texts)
        self._texts = {}
        self._writer = None
        self._release(self._held)
        self.timing.finished = self.timing.finished or time.monotonic()

    @property
    def ids(self) -> list[str]:
        """The engine's request ids of the texts that have not ended."""
        return list(self._texts)

    def abort(self) -> None:
        """End the request on behalf of another client or the operator: its texts end with the reason "abort"."""
        self._abort(self._texts, deliver_last=True)

    def put(self, event: TokenEvent | JswaError | ApiError) -> None:
        """Queue an event or an error from the engine. If it exceeds the memory budget, the request ends."""
        queued: TokenEvent | ApiError
        if isinstance(event, TokenEvent):
            queued = event
            size = size_of(event)
            most = limits.MAX_BACKLOG_BYTES if self._order.stream else int(self._answers.most) // 4
            wanted = self._held + size
            if wanted > max(most, _ALWAYS) or (wanted > _ALWAYS and not self._answers.fits(self._order.key, size)):
                queued = self._refuse(most if wanted > most else None)
            else:
                self._hold(size)
        else:
            queued = event if isinstance(event, ApiError) else ApiError.of(event)
        self._append(queued)

    def _append(self, event: TokenEvent | Delta | ApiError) -> None:
        self._queue.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _token(self, name: str, text: Text, token: int) -> None:
        """Send a token that has come alone, or queue it if anything waits before it."""
        writer = self._writer
        if self._queue or self._waiter is None or writer is None or not writer.ready:
            self.put(TokenEvent(name, token))
            return
        if text.ended:
            return
        now = time.monotonic()
        self._recorder.token(now - text.last_token)
        text.last_token = now
        self.completion_tokens += 1
        offset = text.text.offset
        new, events, ended = self._read(text, text.text.add(token), True)
        if ended:
            self._append(self._ended(name, text, Delta(text, new, token, offset, events)))
            return
        if self._interval > 1:
            text.unsent += 1
            if text.unsent < self._interval:
                text.hold(new, events)
                return
            new, events = text.flush(new, events)
        if not self._sent(writer, text, new, events, now):
            self._append(Delta(text, new, token, offset, events))

    def _sent(self, writer: Writer, text: Text, new: str, events: list[AnswerEvent], now: float) -> bool:
        """Send a new part of a text, unless the text's frames lack it; return whether they have it."""
        if text.answer is None:
            frame = text.frames.get("text")
            if new and frame is not None:
                writer.write(encode(new).join(frame), now)
            return not new or frame is not None
        parts = []
        for event in events:
            frame = text.frames.get(event.kind)
            if frame is None:
                return False
            parts.append(encode(event.text).join(frame))
        if parts:
            writer.write(parts[0] if len(parts) == 1 else b"".join(parts), now)
        return True

    def _refuse(self, most: int | None) -> ApiError:
        """End the request and return its error, because of its own size or because of the size of all answers.

        Args:
            most: bytes that the request may hold, if it needs more; None if all answers together need too much.
        """
        self._answers.refused += 1
        self._abort(self._texts)
        self._queue.clear()
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

    def _take(self, event: TokenEvent, text: Text) -> Delta | None:
        """Return the new part of a text; None if it waits for further tokens."""
        if event.error is not None:
            return self._failed(event, text, ApiError.of(event.error))
        self._count(event, text)
        if event.drafts is not None:
            event = event._replace(drafts=None)
        offset = text.text.offset
        new, events, ended = self._read(text, text.text.push(event), event.token is not None)
        text.unsent += 1
        if text.unsent < self._interval and not ended and event[2:] == _NOTHING_MORE:
            text.hold(new, events)
            return None
        new, events = text.flush(new, events)
        delta = Delta(
            text, new, event.token, offset, events, event.logprobs, event.prompt_logprobs, event.finish_reason,
            event.stop_reason,
        )  # fmt: skip
        return self._ended(event.request_id, text, delta) if ended or event.finish_reason is not None else delta

    def _failed(self, event: TokenEvent, text: Text, error: ApiError) -> Delta:
        """End a text of a stream with an error that is its own, if others go on. Raises any other error."""
        if error.status != 400 or not self._order.stream or len(self._texts) == 1:
            raise error
        del self._texts[event.request_id]
        text.ended = True
        self.finish_reasons.append("error")
        return Delta(text, "", None, text.text.offset, finish_reason="error", error=error)

    def _count(self, event: TokenEvent, text: Text) -> None:
        """Count a token, and set the times of the request."""
        now = time.monotonic()
        last, text.last_token = text.last_token, now
        first = last == 0.0
        if first and event.token is not None:
            self.timing.scheduled = self.timing.scheduled or event.first_scheduled_time
            if self.timing.first_token is None:
                self.timing.first_token = now
                self._recorder.prompt(self.prompt_tokens)
        if event.token is not None:
            self.completion_tokens += 1
            if first:
                self._recorder.first()
            else:
                self._recorder.token(now - last)
        if event.prefix is not None and event.request_id in self._firsts:
            self.cached_tokens += event.prefix.cached_tokens
            self.missed_tokens.update(for_clients(event.prefix.missed()))
        if event.drafts is not None:
            before, text.drafts = text.drafts, event.drafts
            changes = (
                new - old + all_ for new, old, all_ in zip(event.drafts, before, self.drafts or (0, 0), strict=True)
            )
            self.drafts = DraftCounts(*changes)

    def _read(self, text: Text, new: str, counts: bool) -> tuple[str, list[AnswerEvent], bool]:
        """Return new characters, the answer's events of them, and whether the text ends by what it says.

        Args:
            counts: the characters are those of a token.
        """
        answer = text.answer
        if answer is None:
            return new, [], text.text.stopped is not None
        self.reasoning_tokens += counts and answer.in_reasoning
        events = answer.feed(new)
        return new, events, answer.done or text.text.stopped is not None

    def _ended(self, name: str, text: Text, delta: Delta) -> Delta:
        """End a text with its last delta, which has no finish reason if the text ends by what it says."""
        new, events = text.flush(delta.new, list(delta.events))
        if delta.finish_reason is None:
            self._abort([name])
        if text.text.stopped is not None or (text.answer is not None and text.answer.done):
            delta = delta._replace(finish_reason="stop", stop_reason=text.text.stopped)
        if text.answer is not None:
            events += text.answer.finish()
        del self._texts[name]
        text.ended = True
        assert delta.finish_reason is not None
        self.finish_reasons.append(delta.finish_reason)
        return delta._replace(new=new, events=events)

    def _start_timers(self) -> None:
        loop, order = asyncio.get_running_loop(), self._order
        if order.deadline is not None:
            late = ApiError(504, f"not finished within {order.deadline:g} s", code="deadline_exceeded")
            self._timers.append(loop.call_later(order.deadline, self._append, late))

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
from jswa.text.generated import Part
from jswa.types import DraftCounts, FinishReason

from ..engine.side import Shares
from ..http import limits
from ..http.errors import ApiError
from ..http.pieces import encode
from .counts import Recorder
from .texts import Delta, Frames, Order, Text, Timing, Wanted, size_of

_ALWAYS = 64 * 2**10  # bytes that any request may hold
_TURN = 32  # events that one callback of the event loop handles at most; log probabilities count as further events
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
    ) -> None:
        """Prepare to receive the events of texts, which are queued in the engine next.

        Args:
            texts: by id.
            abort: ends texts by their ids in the engine, as `Intake.abort` does.
            answers: the memory budget that all requests share, for events that wait and answers that are collected.
        """
        self.timing = Timing()
        prompts = {text.prompt: None for text in texts.values()}
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.completion_tokens = 0
        self.wanted = Wanted()
        self.cached_tokens = 0
        self.missed_tokens: Counter[str] = Counter()  # the other prompt tokens, by why they were not cached
        self.finish_reasons: list[FinishReason] = []
        self.lora = order.options.lora
        self._all = tuple(texts.values())
        self._texts = dict(texts)  # that have not ended
        self._abort = abort
        self._answers = answers
        self._held = 0  # bytes that this job has acquired from `answers`
        self._queue: deque[TokenEvent | Delta | ApiError] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the consumer, while it waits for the queue
        self._timers: list[asyncio.TimerHandle] = []
        self._order = order
        self._recorder = recorder
        self._writer: Writer | None = None
        self._firsts = {next(name for name, text in texts.items() if text.prompt is prompt) for prompt in prompts}
        self._start_timers()

    @property
    def tokens(self) -> dict[str, Callable[[int], None]]:
        """The functions that get a token of each text that comes alone."""
        return {name: partial(self._token, name, text) for name, text in self._texts.items()}

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(text.tokens for text in self._all)

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
    def drafts(self) -> DraftCounts | None:
        """The drafts of all texts so far; None if none of them had any."""
        counts = [text.generated.drafts for text in self._all if text.generated.drafts is not None]
        return DraftCounts(*map(sum, zip(*counts, strict=True))) if counts else None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning of all texts so far."""
        return sum(text.generated.reasoning_tokens for text in self._all)

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
        made = text.generated
        if made.finish_reason is not None:
            return
        now = time.monotonic()
        self._recorder.token(now - text.last_token)
        text.last_token = now
        text.tokens += 1
        self.completion_tokens += 1
        offset = made.offset
        part = made.add(token)
        if part is None:
            return
        if made.finish_reason is not None:
            self._abort([name])
            self._end(name, made.finish_reason)
        elif self._sent(writer, text, part, now):
            return
        self._append(Delta(text, part.new, offset, part.events, None, None, made.finish_reason, made.stop_reason))

    def _sent(self, writer: Writer, text: Text, part: Part, now: float) -> bool:
        """Send a new part of a text, unless the text's frames lack it; return whether they have it."""
        if text.generated.parser is None:
            frame = text.frames.get("text")
            if part.new and frame is not None:
                writer.write(encode(part.new).join(frame), now)
            return not part.new or frame is not None
        parts = []
        for event in part.events:
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
        made = text.generated
        offset = made.offset
        part = made.push(event)
        if part is None:
            return None
        if made.finish_reason is not None:
            if event.finish_reason is None:
                self._abort([event.request_id])
            self._end(event.request_id, made.finish_reason)
        return Delta(
            text, part.new, offset, part.events, event.logprobs, event.prompt_logprobs, made.finish_reason,
            made.stop_reason, pooled=event.pooled,
        )  # fmt: skip

    def _end(self, name: str, reason: FinishReason) -> None:
        """Expect no further event of a text."""
        del self._texts[name]
        self.finish_reasons.append(reason)

    def _failed(self, event: TokenEvent, text: Text, error: ApiError) -> Delta:
        """End a text of a stream with an error that is its own, if others go on. Raises any other error."""
        if error.status != 400 or not self._order.stream or len(self._texts) == 1:
            raise error
        text.generated.finish_reason = "error"
        self._end(event.request_id, "error")
        return Delta(text, "", text.generated.offset, finish_reason="error", error=error)

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
        if event.token is not None and event.pooled is None:  # whose token nobody reads
            text.tokens += 1
            self.completion_tokens += 1
            if first:
                self._recorder.first()
            else:
                self._recorder.token(now - last)
        if event.prefix is not None and event.request_id in self._firsts:
            self.cached_tokens += event.prefix.cached_tokens
            self.missed_tokens.update(for_clients(event.prefix.missed()))

    def _start_timers(self) -> None:
        loop, order = asyncio.get_running_loop(), self._order
        if order.deadline is not None:
            late = ApiError(504, f"not finished within {order.deadline:g} s", code="deadline_exceeded")
            self._timers.append(loop.call_later(order.deadline, self._append, late))

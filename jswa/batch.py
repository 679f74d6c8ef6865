"""One `generate` call: its prompts become requests, and the events of their tokens become outputs.

Calls of several threads share an engine by a `FairLock`: each takes turns of one step, which runs the requests of all.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

from jswa.engine import Engine
from jswa.errors import RequestError
from jswa.plan import ChoiceLogprobs, Request, TokenEvent
from jswa.text.answers.message import AnswerText
from jswa.text.answers.parser import Answering, AnswerParser, assemblers
from jswa.text.assembler import Assembler
from jswa.text.guard import GUARD
from jswa.text.inputs import Prompt, adapter_of, bad_word_ids, params_of, salt_of, tokenize
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import (
    AnswerEvent,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)


class Host(Protocol):
    """The LLM as a batch sees it."""

    tokenizer: Tokenizer | None

    @property
    def engine(self) -> Engine:
        """The engine that all batches share."""
        ...

    def register(self, batch: "Batch") -> str:
        """Return a new request id whose events go to the batch."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong."""
        ...

    def abort(self, request_id: str) -> None:
        """Abort a request if it has not ended, and forget it. Never waits: a finalizer may call it."""
        ...

    def advance(self, batch: "Batch") -> None:
        """Run one engine step and distribute its events, unless another thread has brought the batch some."""
        ...


class FairLock:
    """A lock that threads get in the order in which they ask for it.

    A plain lock would go back to the thread that runs one step after the other; the others would wait for its end.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """Number of threads that wait."""
        return len(self._waiting)

    def take(self) -> bool:
        """Take the lock if nobody has it; never wait, also where the caller interrupts `acquire` in its thread."""
        if not self._mutex.acquire(blocking=False):
            return False
        taken, self._held = not self._held, True
        self._mutex.release()
        return taken

    def acquire(self) -> None:
        """Wait for the lock. It is not reentrant."""
        mine = threading.Lock()
        mine.acquire()
        with self._mutex:
            if not self._held:
                self._held = True
                return
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # KeyboardInterrupt
            with self._mutex:
                given = mine not in self._waiting
                if not given:
                    self._waiting.remove(mine)
            if given:
                self.release()
            raise

    def release(self) -> None:
        """Give the lock to the thread that has waited longest."""
        with self._mutex:
            self._held = bool(self._waiting)
            if self._held:
                self._waiting.popleft().release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclasses.dataclass
class _Choice:
    """One text that is being generated: choice `index` of prompt `prompt`."""

    prompt: int
    index: int
    params: SamplingParams
    text: Assembler
    parser: AnswerParser | None
    answer: AnswerText


class Batch:
    """The requests of one call. The LLM fills `events`, also while another batch, or another thread, runs the steps."""

    def __init__(
        self,
        host: Host,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any],
        priority: int = 0,
        cache_salt: str = "",
        lora: str | None = None,
        answering: Answering | None = None,
    ) -> None:
        self.events: deque[TokenEvent] = deque()
        self._host = host
        self._priority = priority
        self._cache_salt = cache_salt
        self._lora = lora
        self._answering = answering
        self._prompts = list(zip(prompts, params_of(prompts, params, sampling, defaults), strict=True))
        self._errors: dict[int, RequestError] = {}
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._unfinished = [0] * len(prompts)
        self._choices: dict[str, _Choice] = {}

    def collect(self, *, show: bool) -> list[RequestOutput]:
        """Run all requests to their end and return whole results, in input order."""
        texts: list[dict[int, CompletionOutput]] = [{} for _ in self._outputs]
        last: list[RequestOutput | None] = [None] * len(self._outputs)
        with tqdm(total=len(texts), desc="prompts", disable=not show, unit="prompt", dynamic_ncols=True) as bar:
            for index, piece in self._pieces():
                new = piece.outputs[0]
                texts[index][new.index] = _joined(texts[index].get(new.index), new)
                before = last[index]
                if piece.prompt_logprobs is None and before is not None:
                    piece = dataclasses.replace(piece, prompt_logprobs=before.prompt_logprobs)
                last[index] = piece
                bar.update(piece.finished)
            bar.update(len(self._errors))
        for index, output in enumerate(last):
            if output is not None:
                whole = [text for _, text in sorted(texts[index].items())]
                self._outputs[index] = dataclasses.replace(output, outputs=whole)
        self._raise(self._outputs)
        done = [output for output in self._outputs if output is not None]
        if len(done) == 1 and done[0].error is not None:
            raise done[0].error
        return done

    def stream(self) -> Iterator[RequestOutput]:
        """Yield outputs as they come; raise the errors of refused prompts at the end."""
        for _, output in self._pieces():
            yield output
        self._raise([])

    def _submit(self) -> None:
        for index, (prompt, params) in enumerate(self._prompts):
            try:
                self._add(index, prompt, params)
            except RequestError as error:
                error.index = index
                self._errors[index] = error

    def _add(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        tokenizer, engine = self._host.tokenizer, self._host.engine
        shown, ids = tokenize(prompt, tokenizer)
        words = bad_word_ids(params.bad_words or (), tokenizer)
        salt, lora = salt_of(prompt, self._cache_salt), adapter_of(prompt, self._lora)
        request_ids: list[str] = []
        table = StopTable(params.stop_strings())
        prefix = "" if self._answering is None else self._answering.prefix(shown)
        first: Request | None = None
        try:
            for choice in range(params.n):
                request_ids.append(self._host.register(self))
                request = engine.request(
                    request_ids[-1],
                    ids if first is None else first.prompt,
                    params,
                    bad_words=words,
                    priority=self._priority,
                    cache_salt=salt,
                    lora=lora,
                    choice=choice,
                    like=first,
                )
                first = first or request
                self._host.add(request)
                text, parser = assemblers(self._answering, tokenizer, prefix, request.prompt, params, table)
                self._choices[request_ids[-1]] = _Choice(index, choice, params, text, parser, AnswerText())
        except BaseException:
            for request_id in request_ids:
                self._choices.pop(request_id, None)
                self._host.abort(request_id)
            raise
        self._unfinished[index] = params.n
        self._outputs[index] = RequestOutput(
            request_id=request_ids[0],
            prompt=None if shown is None else shown.replace(GUARD, ""),
            prompt_token_ids=ids.tolist(),
            outputs=[],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )

    def _pieces(self) -> Iterator[tuple[int, RequestOutput]]:
        try:
            self._submit()
            while self._choices:
                while not self.events:
                    self._host.advance(self)
                event = self.events.popleft()
                if event.request_id in self._choices:
                    yield self._piece(event, self._choices[event.request_id])
        finally:
            for request_id in self._choices:
                self._host.abort(request_id)

    def _piece(self, event: TokenEvent, choice: _Choice) -> tuple[int, RequestOutput]:
        output = self._outputs[choice.prompt]
        assert output is not None
        reason: FinishReason | None = event.finish_reason
        stop_reason: int | str | None = event.stop_reason
        text = choice.text.push(event)
        if choice.text.stopped is not None:
            reason, stop_reason = "stop", choice.text.stopped
        events: list[AnswerEvent] = []
        if choice.parser is not None:
            events = choice.parser.feed(text) + (choice.parser.finish() if reason is not None else [])
            text = choice.parser.clean(text)
            for one in events:
                choice.answer.add(one)
        if reason is not None:
            del self._choices[event.request_id]
            self._host.abort(event.request_id)
            self._unfinished[choice.prompt] -= 1
        error = event.error if reason == "error" else None
        if output.metrics is not None:
            if event.prefix is not None and output.prefix is None:
                output.prefix, output.num_cached_tokens = event.prefix, event.prefix.cached_tokens
            _stamp(output.metrics, event.first_scheduled_time, finished=not self._unfinished[choice.prompt])
        logprobs = event.logprobs
        completion = CompletionOutput(
            choice.index,
            text,
            [] if event.token is None else [event.token],
            cumulative_logprob=None if logprobs is None else logprobs.logprob,
            logprobs=None if logprobs is None else [self._logprobs(logprobs, choice.params.logprobs)],
            finish_reason=reason,
            stop_reason=stop_reason,
            events=events,
            message=choice.answer.message() if choice.parser is not None and reason is not None else None,
        )
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if event.prompt_logprobs is not None:
            wanted = choice.params.prompt_logprobs
            prompt_logprobs = [None, *(self._logprobs(one, wanted) for one in event.prompt_logprobs)]
        finished = not self._unfinished[choice.prompt]
        piece = dataclasses.replace(
            output, outputs=[completion], finished=finished, error=error, prompt_logprobs=prompt_logprobs
        )
        return choice.prompt, piece

    def _logprobs(self, at: ChoiceLogprobs, wanted: int | None) -> dict[int, Logprob]:
        """Return the log probabilities of the token at this position and of the `wanted` most likely tokens."""
        tokenizer = self._host.tokenizer

        def decoded(token: int) -> str | None:
            return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

        table = {at.token: Logprob(at.logprob, at.rank, decoded(at.token))}
        for rank, (token, logprob) in enumerate(zip(at.top_ids, at.top_logprobs, strict=True), start=1):
            if rank <= (wanted or 0):
                table.setdefault(token, Logprob(logprob, rank, decoded(token)))
        return table

    def _raise(self, outputs: Sequence[RequestOutput | None]) -> None:
        if self._errors:
            first = self._errors[min(self._errors)]
            first.outputs = list(outputs)
            first.errors = dict(self._errors)
            raise first


def _joined(so_far: CompletionOutput | None, new: CompletionOutput) -> CompletionOutput:
    if so_far is None:
        return new
    so_far.text += new.text
    so_far.token_ids += new.token_ids
    so_far.events += new.events
    if so_far.logprobs is not None and new.logprobs is not None:
        so_far.logprobs += new.logprobs
        so_far.cumulative_logprob = (so_far.cumulative_logprob or 0.0) + (new.cumulative_logprob or 0.0)
    so_far.finish_reason, so_far.stop_reason, so_far.message = new.finish_reason, new.stop_reason, new.message
    return so_far


def _stamp(metrics: RequestMetrics, first_scheduled: float | None, *, finished: bool) -> None:
    now = time.monotonic()
    metrics.first_scheduled_time = metrics.first_scheduled_time or first_scheduled
    metrics.first_token_time = metrics.first_token_time or now
    metrics.last_token_time = now
    metrics.finished_time = now if finished else None

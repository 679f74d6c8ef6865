"""The texts that the engine generates for one prompt, as outputs: pieces of a stream, or whole.

`LLM` and `AsyncLLM` share this module. If the caller wants nothing of a text before its end, the text is held until
then: its token ids are appended to a list and decoded at once at the end. With stop strings each piece is searched.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.pictures import with_images
from jswa.frontend.requests import make_requests
from jswa.images.tokens import shown as seen_by_callers
from jswa.plan import DEFAULT_OPTIONS, ChoiceLogprobs, Request, RequestOptions, StepEvents, TokenEvent
from jswa.text.answers.message import AnswerText
from jswa.text.answers.parser import Answering
from jswa.text.generated import GeneratedText, Part, generated_text
from jswa.text.guard import GUARD
from jswa.text.inputs import Prompt, adapter_of, salt_of, tokenize
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import (
    CompletionOutput,
    Logprob,
    PrefixHit,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)


class Receiver(NamedTuple):
    """The functions that take the events of one request: `token` takes a token alone, `event` every other event."""

    token: Callable[[int], object]
    event: Callable[[Any], object]


def distribute(
    events: StepEvents, receivers: Mapping[str, Receiver], failed: Callable[[str, Exception], object]
) -> None:
    """Pass the events of a step to the receivers of their requests; requests without one were aborted.

    If a receiver raises an error, `failed` gets its request id and the error, and then the others get their events.
    """
    for request_id, token in zip(events.request_ids.tolist(), events.tokens.tolist(), strict=True):
        receiver = receivers.get(request_id)
        if receiver is not None:
            try:
                receiver.token(token)
            except Exception as error:
                failed(request_id, error)
    for event in events.others:
        receiver = receivers.get(event.request_id)
        if receiver is not None:
            try:
                receiver.event(event)
            except Exception as error:
                failed(event.request_id, error)


@dataclass(frozen=True)
class CallOptions:
    """The options of a call besides its prompts and sampling parameters.

    Attributes:
        request: of each prompt, which may have its own salt and adapter.
        answering: how the texts are read as answers; None if they are not.
        whole: the caller wants nothing of a text before its end.
    """

    request: RequestOptions = DEFAULT_OPTIONS
    answering: Answering | None = None
    whole: bool = False


@dataclass
class _Text:
    """One text as it is generated; `answer`: its message so far, if it is an answer."""

    index: int
    request: Request
    text: GeneratedText
    answer: AnswerText | None


class PromptTexts:
    """One prompt of a call, and the texts that are generated for it.

    Attributes:
        requests: the engine's requests, one for each text; the caller adds them to the engine.
        unfinished: the texts that have not ended, by request id.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer | None,
        new_id: Callable[[], str],
        prompt: Prompt,
        params: SamplingParams,
        options: CallOptions,
        *,
        name: str | None = None,
    ) -> None:
        """Tokenize a prompt and make its requests. Raises RequestError.

        Args:
            new_id: returns an id that no request of the engine has had.
            name: the request id that outputs show; None: that of the first text.
        """
        shown, ids = tokenize(prompt, tokenizer)
        asked = options.request
        own = replace(asked, cache_salt=salt_of(prompt, asked.cache_salt), lora=adapter_of(prompt, asked.lora))
        ids, images = with_images(engine, prompt, ids, own.cache_salt)
        made = make_requests(engine, tokenizer, new_id, [ids], params, own, images)
        self.requests = list(made)
        self._tokenizer = tokenizer
        self._params = params
        self._id = name or self.requests[0].request_id
        self._prompt = None if shown is None else shown.replace(GUARD, "")
        self._ids = (seen_by_callers(ids, engine.images.tokens) if images and engine.images else ids).tolist()
        self._prefix: PrefixHit | None = None
        self._metrics = RequestMetrics(arrival_time=time.monotonic())
        answering = options.answering
        prefix = "" if answering is None else answering.prefix(shown)
        table = StopTable(params.stop_strings())
        watched = params.wants_logprobs or params.return_sampling_mask
        interval = None if options.whole and answering is None and not watched else 1
        self.unfinished: dict[str, _Text] = {}
        for index, request in enumerate(self.requests):
            text = generated_text(
                answering, tokenizer, prefix, request.prompt, params, table, interval=interval, version=request.version
            )
            answer = None if answering is None else AnswerText()
            self.unfinished[request.request_id] = _Text(index, request, text, answer)

    def receiver(self, request_id: str, queue: Callable[[TokenEvent], object]) -> Receiver:
        """Return the receiver of a text's events. It queues those that `push` must see, in their order."""
        text = self.unfinished[request_id].text
        if not text.collects:
            return Receiver(lambda token: queue(TokenEvent(request_id, token)), queue)

        def take(event: TokenEvent) -> None:
            text.collect(event)
            if event.finish_reason is not None or event.first_scheduled_time is not None or event.prefix is not None:
                queue(event)

        return Receiver(text.tokens.append, take)

    def push(self, event: TokenEvent) -> RequestOutput | None:
        """Return what an event adds to the output, as a piece of a stream; None if its text is held."""
        one = self.unfinished[event.request_id]
        part = one.text.push(event)
        if event.version is not None:
            return None
        if event.prefix is not None and self._prefix is None:
            self._prefix = event.prefix
        if one.text.finish_reason is not None:
            del self.unfinished[event.request_id]
        _stamp(self._metrics, event.first_scheduled_time, finished=not self.unfinished)
        return None if part is None else self._piece(self._completion(one, part, event), event)

    def _completion(self, one: _Text, part: Part, event: TokenEvent) -> CompletionOutput:
        """Return a part of a text as an output."""
        text, new, logprobs = one.text, part.new, event.logprobs
        tokens, versions = text.tokens, text.versions
        if text.interval is not None:
            tokens = [] if event.token is None else [event.token]
            versions = [text.version] * len(tokens)
        if text.parser is not None and one.answer is not None:
            new = text.parser.clean(new)
            for added in part.events:
                one.answer.add(added)
        ended = text.finish_reason is not None
        return CompletionOutput(
            one.index,
            new,
            tokens,
            cumulative_logprob=None if logprobs is None else logprobs.logprob,
            logprobs=None if logprobs is None else [self._logprobs(logprobs, self._params.logprobs)],
            sampling_mask=None if event.sampling_mask is None else [event.sampling_mask],
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
            events=list(part.events),
            message=one.answer.message() if one.answer is not None and ended else None,
            versions=versions,
            drafts=text.drafts if ended else None,
        )

    def _piece(self, completion: CompletionOutput, event: TokenEvent) -> RequestOutput:
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if event.prompt_logprobs is not None:
            wanted = self._params.prompt_logprobs
            prompt_logprobs = [None, *(self._logprobs(one, wanted) for one in event.prompt_logprobs)]
        return RequestOutput(
            request_id=self._id,
            prompt=self._prompt,
            prompt_token_ids=self._ids,
            outputs=[completion],
            finished=not self.unfinished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=0 if self._prefix is None else self._prefix.cached_tokens,
            prefix=self._prefix,
            metrics=self._metrics,
            error=event.error,
            pooled=event.pooled,
        )

    def _logprobs(self, at: ChoiceLogprobs, wanted: int | None) -> dict[int, Logprob]:
        """Return the log probabilities of the token at this position and of the `wanted` most likely tokens."""
        tokenizer = self._tokenizer

        def decoded(token: int) -> str | None:
            return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

        table = {at.token: Logprob(at.logprob, at.rank, decoded(at.token))}
        for rank, (token, logprob) in enumerate(zip(at.top_ids, at.top_logprobs, strict=True), start=1):
            if rank <= (wanted or 0):
                table.setdefault(token, Logprob(logprob, rank, decoded(token)))
        return table


class Joined:
    """The output of a prompt so far, joined from the pieces of its stream."""

    def __init__(self) -> None:
        self._texts: dict[int, CompletionOutput] = {}
        self._parts: dict[int, list[str]] = {}
        self._last: RequestOutput | None = None

    def add(self, piece: RequestOutput) -> None:
        """Add a piece, which belongs to this object from now on."""
        new, last = piece.outputs[0], self._last
        so_far = self._texts.setdefault(new.index, new)
        self._parts.setdefault(new.index, []).append(new.text)
        if so_far is not new:
            so_far.token_ids += new.token_ids
            so_far.versions += new.versions
            so_far.events += new.events
            if so_far.logprobs is not None and new.logprobs is not None:
                so_far.logprobs += new.logprobs
                so_far.cumulative_logprob = (so_far.cumulative_logprob or 0.0) + (new.cumulative_logprob or 0.0)
            if so_far.sampling_mask is not None and new.sampling_mask is not None:
                so_far.sampling_mask += new.sampling_mask
            so_far.finish_reason, so_far.stop_reason, so_far.message = new.finish_reason, new.stop_reason, new.message
            so_far.drafts = new.drafts
        if last is not None:
            if last.prompt_logprobs is not None:
                piece.prompt_logprobs = last.prompt_logprobs
            piece.error = last.error or piece.error
        self._last = piece

    @property
    def empty(self) -> bool:
        """Whether there was no piece."""
        return self._last is None

    def whole(self) -> RequestOutput:
        """Return the output with all texts. The lists are this object's own."""
        assert self._last is not None
        return replace(self._last, outputs=[self._text(index) for index in sorted(self._texts)])

    def latest(self) -> RequestOutput:
        """Return the output with the text that the last piece belongs to. Later pieces do not change what it holds."""
        assert self._last is not None
        text = self._text(self._last.outputs[0].index)
        logprobs = None if text.logprobs is None else list(text.logprobs)
        masks = None if text.sampling_mask is None else list(text.sampling_mask)
        tokens, versions, events = list(text.token_ids), list(text.versions), list(text.events)
        text = replace(text, token_ids=tokens, versions=versions, events=events, logprobs=logprobs, sampling_mask=masks)
        return replace(self._last, outputs=[text])

    def _text(self, index: int) -> CompletionOutput:
        text, parts = self._texts[index], self._parts[index]
        text.text = "".join(parts)
        parts[:] = [text.text]
        return text


def _stamp(metrics: RequestMetrics, first_scheduled: float | None, *, finished: bool) -> None:
    now = time.monotonic()
    if metrics.first_scheduled_time is None:
        metrics.first_scheduled_time = first_scheduled
    if metrics.first_token_time is None:
        metrics.first_token_time = now
    metrics.last_token_time = now
    metrics.finished_time = now if finished else None


def asked_form(
    params: SamplingParams | Sequence[SamplingParams] | None, options: Mapping[str, Any]
) -> StructuredOutputsParams | None:
    """Return the form that was asked of some of the texts; None if there is none."""
    given = [params] if isinstance(params, SamplingParams) else list(params or ())
    forms = [options.get("structured_outputs"), *(one.structured_outputs for one in given)]
    return next((form for form in forms if form is not None), None)

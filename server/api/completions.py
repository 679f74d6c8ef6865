"""The route POST /v1/completions."""

import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from starlette.requests import Request
from starlette.responses import Response

from jswa.grammar.asked import Asked
from jswa.plan import ChoiceLogprobs, PromptLogprobs
from jswa.types import SamplingParams, StructuredOutputsParams

from ..core.off_loop import Run, gathered
from ..core.request import Job
from ..core.service import Service, key_of, service_of
from ..core.texts import Delta, Frames
from ..http.errors import ApiError, unsupported
from ..http.pieces import JsonList, around, chunks, listed, with_fields
from ..http.sse import DONE, event, unless_gone
from ..text.logprobs import Columns, of_prompt, prompt_offsets
from ..text.prompts import Prompt, check_length, encode, split_off_loop, truncated
from .foreign import refuse_foreign
from .params import check_texts, refuse_unsupported, sampling_params
from .schemas import CompletionRequest, Generation
from .structured import form_of

Entries = Collection[ChoiceLogprobs] | PromptLogprobs  # log probabilities of a prompt
_WIDTH = 8  # work for a position of log probabilities, compared with a token
_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class CompletionReply:
    """The values that all parts of a response share."""

    service: Service
    body: CompletionRequest
    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def scores_only(self) -> bool:
        """Whether the request asks for no generated tokens, only for log probabilities of its prompt."""
        return self.body.max_tokens == 0

    def whole(self, **more: Any) -> dict[str, Any]:
        """Return a response or one chunk of it, with `more` fields."""
        head = {"id": f"cmpl-{self.name}", "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, **more}

    def columns(self) -> Columns:
        """Return empty log probabilities for a choice, or for a chunk of it."""
        return Columns(self.body.logprobs or 0, self.service.texts)


class Echo(NamedTuple):
    """The part of a choice that repeats the prompt: its text, and for each token the characters before it."""

    text: str = ""
    offsets: Int[np.ndarray, " P"] = np.zeros(0, np.int32)


@dataclass
class CompletionChoice:
    """One choice of a response that is not streamed.

    Attributes:
        logprobs: log probabilities of the generated tokens in JSON, encoded when the tokens arrive.
        of_prompt: log probabilities of the prompt.
        last: the last delta, without its log probabilities.
    """

    echo: Echo
    logprobs: Columns
    text: StringIO = field(default_factory=StringIO)
    of_prompt: Entries = ()
    last: Delta | None = None


async def completions(body: CompletionRequest, request: Request) -> Response:
    """Generate continuations of prompts. Raises ApiError if the request is refused."""
    service = service_of(request)
    reply = CompletionReply(
        service, body, body.request_id or request.scope["jswa.request_id"], service.check_model(body.model)
    )
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    if body.suffix:
        raise unsupported("suffix", "is not supported")
    if reply.scores_only and not body.echo:
        raise ApiError(400, "max_tokens: must be at least 1 without echo", param="max_tokens", code="invalid_value")
    begun = await unless_gone(request.receive, _begin(reply, request))
    if begun is None:
        return Response(status_code=499)
    job, echoes = begun
    events = _stream(reply, job, echoes) if body.stream else None
    return await service.respond(
        request, job, reply.name, stream=events, whole=lambda: _collect(reply, job, echoes),
        frames=partial(_frames, reply, job),
    )  # fmt: skip


async def _begin(reply: CompletionReply, request: Request) -> tuple[Job, list[Echo]]:
    """Queue the prompts. Return the job, and the echo of each text. Raises ApiError."""
    service, body = reply.service, reply.body
    prompts = await prompts_of(service, body, service.run_for(request))
    form = form_of(body)
    spec = None if form is None else await service.compiled(Asked(form.spec), key_of(request), form.field)
    params = await _params(service, body, prompts, spec)
    echoes = [Echo()] * len(prompts)
    if body.echo:
        shown = (
            Echo(*prompt_offsets(prompt, service.tokenizer, skip_special_tokens=params.skip_special_tokens))
            for prompt in prompts
        )
        echoes = await gathered(shown, sum(len(prompt.ids) for prompt in prompts))
    job = await service.start(request, body, prompts, params, reply.name)
    return job, [echo for echo in echoes for _ in range(params.n)]


def usage(job: Job) -> dict[str, Any]:
    """Return the `usage` of a request: its tokens so far, and what was drafted of those texts that have ended."""
    details = {}
    if job.drafts is not None:
        accepted, rejected = job.drafts
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        details["completion_tokens_details"] = drafts
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "total_tokens": job.prompt_tokens + job.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens, "missed_tokens": dict(job.missed_tokens)},
        **details,
    }


def timings(job: Job) -> dict[str, Any]:
    """Return the numbers and times of a request's tokens, with llama.cpp's names and `queue_ms`. Times before are null.

    A rate of generated tokens does not count the first one of each text: the prompt's step has sampled it.
    """
    at, now = job.timing, time.monotonic()
    computed, made = job.prompt_tokens - job.cached_tokens, job.completion_tokens
    begun = None if at.scheduled is None else max(at.arrival, at.scheduled)
    prompt = None if begun is None or at.first_token is None else at.first_token - begun
    predicted = None if at.first_token is None else (at.finished or now) - at.first_token
    return {
        "cache_n": job.cached_tokens,
        "prompt_n": computed,
        **_rates("prompt", prompt, computed),
        "predicted_n": made,
        **_rates("predicted", predicted, made - len(job.finish_reasons)),
        "queue_ms": None if at.queued is None else round(1e3 * at.queued, 3),
    }


def _rates(name: str, seconds: float | None, tokens: int) -> dict[str, float | None]:
    """Return the time of so many tokens, that of one, and how many there are a second; null where there is none."""
    if seconds is None or seconds <= 0 or tokens <= 0:
        each = a_second = None
    else:
        each, a_second = round(1e3 * seconds / tokens, 3), round(tokens / seconds, 3)
    whole = None if seconds is None else round(1e3 * seconds, 3)
    return {f"{name}_ms": whole, f"{name}_per_token_ms": each, f"{name}_per_second": a_second}


def last_timings(body: Generation, job: Job) -> dict[str, Any]:
    """Return the `timings` field of a chunk: none before the last chunk, which is that of `usage` if there is one."""
    options = body.stream_options
    later = bool(job.ids) or (options is not None and options.include_usage)
    return {} if later else {"timings": timings(job)}


def usage_of(body: Generation, job: Job, usage: Callable[[Job], dict[str, Any]] = usage) -> dict[str, Any]:
    """Return the `usage` field of a chunk: no field, null, or the tokens so far, as `stream_options` asks."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return {}
    return {"usage": usage(job) if options.continuous_usage_stats else None}


def counts_usage(body: Generation) -> bool:
    """Return whether each chunk has the tokens so far."""
    options = body.stream_options
    return options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats)


async def prompts_of(service: Service, body: CompletionRequest, run: Run) -> list[Prompt]:
    """Return the prompts of a request. Raises ApiError, also for those without room for an answer."""
    parts = await split_off_loop(body.prompt, run)
    check_texts(len(parts), body.n or 1)
    texts = [part for part in parts if isinstance(part, str)]
    if texts:
        special = body.add_special_tokens is not False
        longest = service.max_model_len if body.truncate_prompt_tokens is None else None
        prompts = await encode(texts, service.tokenizer, run, special=special, longest=longest)
    else:
        prompts = [Prompt(None, part) for part in parts if not isinstance(part, str)]
    prompts = [truncated(prompt, body.truncate_prompt_tokens, service.max_model_len) for prompt in prompts]
    for prompt in prompts:
        check_length(prompt, body.max_tokens, service.max_model_len)
    return prompts


async def _params(
    service: Service, body: CompletionRequest, prompts: list[Prompt], form: StructuredOutputsParams | None
) -> SamplingParams:
    default = max(min(_DEFAULT_TOKENS, *(service.max_model_len - len(prompt.ids) for prompt in prompts)), 1)
    echoed = body.logprobs if body.echo else None
    wanted = [value for value in (body.prompt_logprobs, echoed) if value is not None]
    return await sampling_params(
        body,
        service.default_sampling,
        max_tokens=default if body.max_tokens is None else max(body.max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=max(wanted, default=None),
        form=form,
    )


async def _collect(reply: CompletionReply, job: Job, echoes: list[Echo]) -> list[bytes]:
    choices = [CompletionChoice(echo, reply.columns()) for echo in echoes]
    async for delta in job.deltas():
        choice = choices[delta.text.index]
        choice.last = delta._replace(logprobs=None, prompt_logprobs=None)
        if delta.prompt_logprobs is not None:
            choice.of_prompt = delta.prompt_logprobs
        if reply.scores_only:
            continue
        choice.text.write(delta.new)
        if reply.body.logprobs is not None and delta.logprobs is not None:
            choice.logprobs.add(delta.logprobs, len(choice.echo.text) + delta.offset)
    size = job.completion_tokens + _WIDTH * sum(len(choice.of_prompt) for choice in choices)
    finished = await gathered(_finished(reply, choices), size)
    return with_fields(
        reply.whole(usage=usage(job), timings=timings(job)), {"choices": listed(one for one in finished if one)}
    )


def _finished(reply: CompletionReply, choices: list[CompletionChoice]) -> Iterator[list[bytes]]:
    """Yield the choices of a response in JSON, each in pieces.

    Empty lists come in between, as often as `gathered` may end its slice of time.
    """
    body = reply.body
    for index, choice in enumerate(choices):
        assert choice.last is not None
        fields = {"logprobs": [b"null"]}
        if body.logprobs is not None:
            before = reply.columns()
            if body.echo:
                yield from _add_prompt(before, choice.last.text.prompt, choice.of_prompt, choice.echo)
            fields["logprobs"] = choice.logprobs.pieces(before)
        if body.prompt_logprobs is not None:
            items = JsonList()
            for item in of_prompt(choice.of_prompt, body.prompt_logprobs, reply.service.texts):
                items.add(item)
                yield []
            fields["prompt_logprobs"] = items.pieces()
        value = {
            "index": index, "text": choice.echo.text + choice.text.getvalue(),
            "finish_reason": "length" if reply.scores_only else choice.last.finish_reason,
            "stop_reason": None if reply.scores_only else choice.last.stop_reason,
        }  # fmt: skip
        yield with_fields(value, fields)


def _add_prompt(columns: Columns, prompt: Prompt, entries: Entries, echo: Echo) -> Iterator[list[bytes]]:
    """Add the positions of a prompt. Yield an empty list after each, where `gathered` may end its slice of time."""
    columns.add(int(prompt.ids[0]), 0)
    for at, offset in zip(entries, echo.offsets[1:], strict=True):
        columns.add(at, int(offset))
        yield []


async def _stream(reply: CompletionReply, job: Job, echoes: list[Echo]) -> AsyncGenerator[bytes]:
    try:
        begun: set[int] = set()
        async for delta in job.deltas():
            if delta.error is not None:
                yield event({**delta.error.body(), "index": delta.text.index})
                continue
            if (choice := await _chunk(reply, delta, echoes[delta.text.index], begun)) is not None:
                last = {} if delta.finish_reason is None else last_timings(reply.body, job)
                for chunk in chunks(_event(reply, job, choice, **last)):
                    yield chunk
        options = reply.body.stream_options
        if options is not None and options.include_usage:
            yield event(reply.whole(choices=[], usage=usage(job), timings=timings(job)))
        yield DONE
    except ApiError as error:
        yield event(error.body())


def _event(reply: CompletionReply, job: Job, choice: list[bytes], **more: Any) -> list[bytes]:
    """Return the event of a choice, in pieces, with `more` fields."""
    pieces = with_fields(reply.whole(**usage_of(reply.body, job), **more), {"choices": listed([choice])})
    return [b"data: ", *pieces, b"\n\n"]


def _frames(reply: CompletionReply, job: Job, index: int) -> Frames:
    """Return how a stream writes new text of a choice, after the first; empty if each event has other numbers too."""
    if counts_usage(reply.body) or reply.body.logprobs is not None or reply.scores_only:
        return {}
    empty = {"index": index, "text": "", "finish_reason": None, "stop_reason": None}

    def made(text: str) -> bytes:
        return b"".join(_event(reply, job, with_fields({**empty, "text": text}, {"logprobs": [b"null"]})))

    return {"text": around(made)}


async def _chunk(reply: CompletionReply, delta: Delta, echo: Echo, begun: set[int]) -> list[bytes] | None:
    """Return the choice of a chunk for one delta, in pieces; None if the delta has nothing for the client.

    Args:
        begun: indices of the choices that have a chunk; the new one is added.
    """
    body, text = reply.body, delta.text
    new = "" if reply.scores_only else delta.new
    if text.index not in begun:
        new = echo.text + new
        begun.add(text.index)
    wants = body.logprobs is not None and (delta.logprobs is not None or delta.prompt_logprobs is not None)
    if not new and not wants and delta.finish_reason is None:
        return None
    logprobs = [b"null"]
    if wants:
        columns = reply.columns()
        if body.echo and delta.prompt_logprobs is not None:
            added = _add_prompt(columns, text.prompt, delta.prompt_logprobs, echo)
            await gathered(added, _WIDTH * len(delta.prompt_logprobs))
        if delta.logprobs is not None and not reply.scores_only:
            columns.add(delta.logprobs, len(echo.text) + delta.offset)
        logprobs = columns.pieces()
    value = {
        "index": text.index, "text": new,
        "finish_reason": "length" if reply.scores_only else delta.finish_reason,
        "stop_reason": None if reply.scores_only else delta.stop_reason,
    }  # fmt: skip
    return with_fields(value, {"logprobs": logprobs})

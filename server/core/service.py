"""The state that all request handlers share: the engine's thread, the tokenizer and template, and the shared limits."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from jswa.frontend.engine_protocol import EngineLike
from jswa.grammar.asked import Asked
from jswa.images.tokens import shown
from jswa.plan import RequestOptions
from jswa.text.answers.parser import Answering
from jswa.text.answers.probe import CONVERSATIONS, UNKNOWN_CALLS, VARIABLES, settled
from jswa.text.answers.template import AnswerTemplate
from jswa.text.chat_template import ChatTemplate
from jswa.text.generated import generated_text
from jswa.text.history.probes import PROBE_TOOL
from jswa.text.pooling import DEFAULT, PoolingConfig
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams, StructuredOutputsParams

from ..api.params import check_generated_logprobs, check_prompt_logprobs, check_token_lists
from ..api.schemas import Queued
from ..engine.intake import new_names, params_size
from ..engine.local import LocalEngine
from ..engine.side import EngineSide
from ..http.errors import ApiError, invalid, unsupported
from ..http.sse import EventStream, JsonResponse, unless_gone
from ..killable.forms import packed
from ..media.fetch import Fetcher
from ..options import ServeConfig
from ..text.images import Preparer
from ..text.logprobs import TokenTexts
from ..text.prompts import Prompt
from ..text.templates import Renderer
from .counts import Load, Recorder, Report, added, image_load
from .fairness import Helpers, Key, check_size, helper_threads, weights_of
from .metrics import record_end
from .off_loop import SMALL, Run, made
from .request import Job
from .texts import Frames, Order, Text, Wanted
from .tracing import annotate

_log = logging.getLogger("jswa.server")
_MOST_NAMES = 256  # names of unknown fields that are logged


@dataclass(frozen=True)
class Served:
    """A loaded model, with the parts of `jswa.LLM` that the server needs.

    Attributes:
        build: returns the engine, and a new engine at each later call, which drops the reference to the one before.
        model: as the operator has named it: a folder, OWNER/NAME or "tiny".
        chat_examples: first messages to try the model with.
        pooling: how embeddings are made.
    """

    build: Callable[[], EngineLike]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None = None
    answer_template: AnswerTemplate | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    chat_examples: Sequence[str] = ()
    pooling: PoolingConfig = DEFAULT


class Service:
    """The state of one server: its engine, its jobs, and the budgets and threads that its requests share.

    Owns the engine's thread, the helper threads, the renderer and the preparer, from `start_up` to `shut_down`.
    """

    def __init__(
        self, model: Served, config: ServeConfig, engine: EngineSide | None = None, created: int | None = None
    ) -> None:
        """Build the engine, unless it is in another process: then `engine` is the way to it, and `created` its start.

        `created` is in seconds of `time.time`.
        """
        self.config = config
        self.tokenizer = model.tokenizer
        self.chat_template = model.chat_template
        self.answer_template = model.answer_template
        self.default_sampling = model.default_sampling
        self.root = model.model or self.names[0]
        self.chat_examples = model.chat_examples
        self.pooling = model.pooling
        self.engine = engine or LocalEngine(model.build, model.tokenizer, config)
        self.limits = self.engine.limits
        weights = weights_of(config.api_key, config.api_key_weight)
        self.helpers = Helpers(helper_threads(), weights)
        self._weights = weights
        self.texts = TokenTexts(model.tokenizer)
        self.recorder = Recorder()
        self.renderer: Renderer | None = None
        self.preparer: Preparer | None = None  # None: the model reads no images
        self.fetcher = Fetcher(config.allowed_media_hosts, config.image_fetch_timeout, weights)
        self.created = int(time.time()) if created is None else created
        self.draining = False
        self._starting = 0
        self._unknown: set[str] = set()
        self.jobs: dict[str, set[Job]] = {}

    @property
    def names(self) -> Sequence[str]:
        """Names that requests may use for the model; the first is the model's id."""
        return self.config.served_model_name

    @property
    def local(self) -> LocalEngine:
        """The engine, which is in this process."""
        assert isinstance(self.engine, LocalEngine)
        return self.engine

    @property
    def failure(self) -> ApiError | None:
        """The error for every request while the engine is dead or restarting; None while it is up."""
        failure = self.engine.failure
        return None if failure is None else ApiError.of(failure)

    @property
    def max_model_len(self) -> int:
        """Largest number of prompt and generated tokens of one text."""
        return self.limits.max_model_len

    @property
    def ready(self) -> bool:
        """Whether the server accepts new requests."""
        return self.engine.state == "up" and not self.draining

    async def compiled(self, asked: Asked, key: Key, field: str, tools: Sequence[str] = ()) -> StructuredOutputsParams:
        """Return a form that is compiled: the engine finds it without further work. Raises ApiError.

        Args:
            field: what in the request asks for the form.
            tools: the field of each of its tools.
        """
        if not self.engine.has_forms:
            raise unsupported(field, "is not supported by this model: it has no tokenizer")
        delimiters = () if self.answer_template is None else self.answer_template.delimiters
        question = await self.helpers.run(key, partial(packed, asked))
        made = await self.engine.compile(question, delimiters, key)
        if made.refused is not None:
            raise invalid(field if made.tool is None else tools[made.tool], made.refused)
        return StructuredOutputsParams(grammar=made.text)

    async def start_up(self) -> None:
        """Start the engine's thread and the renderer, on the running event loop."""
        await self.engine.start(self)
        if self.engine.images is not None:
            self.preparer = Preparer(self.engine.images.geometry, self._weights)
            await self.preparer.start()
        if self.chat_template is not None and self.tokenizer is not None:
            self.renderer = Renderer(self.chat_template, self.config.render_timeout, self._weights)
            await self.renderer.start()
            if self.answer_template is not None and self.answer_template.without_guess is not None:
                self.answer_template = settled(self.answer_template, await self._probe(self.renderer))
                if not self.answer_template.reads_calls and self.chat_template.refusal([PROBE_TOOL]) is None:
                    _log.warning("%s; requests with tools are refused", UNKNOWN_CALLS)

    async def _probe(self, renderer: Renderer) -> list[str]:
        """Return what the chat template writes for a probe of calls; nothing if it refuses."""
        try:
            return [await renderer.render(one, VARIABLES, exact=True) for one in CONVERSATIONS]
        except ApiError:
            return []

    async def shut_down(self) -> None:
        """Stop the renderer, the preparer, the helper threads and the engine's thread."""
        for processes in (self.renderer, self.preparer):
            if processes is not None:
                await processes.close()
        self.helpers.close()
        await self.engine.close()

    @property
    def running(self) -> int:
        """Number of requests in progress, including those that wait for programs to be compiled."""
        return self._starting + sum(map(len, self.jobs.values()))

    def abort_all(self) -> None:
        """Abort every request; their texts end with the reason "abort"."""
        for jobs in self.jobs.values():
            for job in jobs:
                job.abort()

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer: the model's or an adapter's. Raises ApiError (404) for another name."""
        if name is None or name in self.names or name in self.engine.adapters:
            return name or self.names[0]
        served = ", ".join(map(repr, (*self.names, *self.engine.adapters)))
        raise ApiError(
            404, f"The model {name[:200]!r} does not exist: this server serves {served}.", param="model",
            code="model_not_found",
        )  # fmt: skip

    def count_unknown(self, names: Sequence[str]) -> None:
        """Count the unknown fields of a request, and log each name once."""
        self.recorder.number("unknown_request_fields", len(names))
        for name in names:
            if len(self._unknown) < _MOST_NAMES and name[:100] not in self._unknown:
                self._unknown.add(name[:100])
                last = "; further names are not logged" if len(self._unknown) == _MOST_NAMES else ""
                _log.warning("a request has an unknown field, which is ignored: %r%s", name[:100], last)

    async def start(
        self,
        request: Request,
        body: Queued,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        name: str,
        answering: Answering | None = None,
    ) -> Job:
        """Queue a request's prompts and return its job, which the caller must `end`. Raises ApiError.

        The job is filed in `jobs` under the request's name, for POST /abort.

        Args:
            answering: how the texts of a chat are read; None if they are not.
        """
        key = key_of(request)
        if (body.priority or 0) < 0 and not self.config.allow_priority:
            raise invalid("priority", "must be at least 0: this server was started without --allow-priority")
        options = RequestOptions(
            body.priority or 0,
            _salt(key, body.cache_salt),
            lora=None if body.model is None or body.model in self.names else body.model,
            tenant="" if key is None else str(self.config.api_key.index(key)),
            weight=self._weights[key],
        )
        order = Order(
            key=key,
            options=options,
            stream=bool(body.stream),
            deadline=self.config.request_timeout or None,
            answering=answering,
        )
        lengths = [len(prompt.ids) for prompt in prompts for _ in range(params.n)]
        tokens = sum(lengths)
        check_size(self.config.max_queued_requests, self.config.max_queued_tokens, len(lengths), tokens)
        check_prompt_logprobs(tokens, params)
        if not body.stream:
            check_generated_logprobs(lengths, params, self.max_model_len)
        check_token_lists(len(lengths), params)
        size = tokens + params_size(params)
        pictures = prompts[0].pictures
        if pictures:
            prompts = [replace(one, pictures=()) for one in prompts]  # the texts need none for their whole life
        texts = await made(partial(self._texts, prompts, params, order), size)
        job = Job(texts, self.engine.abort, self.engine.answers, order, self.recorder)
        job.timing.arrival = request.scope["jswa.arrival"]
        job.wanted = Wanted(params.n, params.max_tokens)
        self._starting += 1
        try:
            ids = [prompt.ids for prompt in prompts]
            job.timing.compiling = await self.engine.submit(job.ids, ids, params, order, job.put, job.tokens, pictures)
        except BaseException:
            job.close()
            raise
        finally:
            self._starting -= 1
        self.jobs.setdefault(name, set()).add(job)
        return job

    def _texts(self, prompts: Sequence[Prompt], params: SamplingParams, order: Order) -> dict[str, Text]:
        """Return the texts after some prompts, by id."""
        stops, texts = StopTable(params.stop_strings()), dict[str, Text]()
        interval = self.config.stream_interval if order.stream else 1
        for prompt in prompts:
            prefix = order.answering.prefix(prompt.text) if order.answering is not None else ""
            ids = shown(prompt.ids, None if self.engine.images is None else self.engine.images.tokens)
            for name in new_names(params.n):
                text = generated_text(order.answering, self.tokenizer, prefix, ids, params, stops, interval=interval)
                texts[name] = Text(len(texts), prompt, text)
        return texts

    @asynccontextmanager
    async def held(self, request: Request, size: int) -> AsyncGenerator[None]:
        """Count the work on a long text as a waiting prompt of `size` tokens meanwhile. Raises ApiError (429)."""
        if size <= SMALL:
            yield
            return
        key = key_of(request)
        await self.engine.admit(key, size)
        try:
            yield
        finally:
            self.engine.leave(key, size)

    def end(self, job: Job, name: str) -> None:
        """Close a job, count it in the metrics, and log it."""
        whole = not job.ids
        job.close()
        same = self.jobs.get(name, set())
        same.discard(job)
        if not same:
            self.jobs.pop(name, None)
        record_end(self.recorder, job, whole=whole)
        at = job.timing
        data: dict[str, Any] = {"request_id": name, "prompt_tokens": job.prompt_tokens}
        data |= {} if job.lora is None else {"lora": job.lora}
        data |= {"completion_tokens": job.completion_tokens, "cached_tokens": job.cached_tokens}
        spans = {"queue_s": at.queued, "first_token_s": at.after(at.first_token), "total_s": at.after(at.finished)}
        spans |= {"compile_s": at.compiling} if at.compiling else {}
        data |= {key: None if seconds is None else round(seconds, 4) for key, seconds in spans.items()}
        data["finish_reasons"] = ",".join(job.finish_reasons) if whole else "error"
        annotate(data)
        _log.info("request: %s", " ".join(f"{k}={v}" for k, v in data.items()), extra={"data": data})

    async def respond(
        self,
        request: Request,
        job: Job,
        name: str,
        *,
        stream: AsyncGenerator[bytes] | None,
        whole: Callable[[], Coroutine[Any, Any, Sequence[bytes]]],
        frames: Callable[[int], Frames] = lambda _: {},
    ) -> Response:
        """Return the response of a job that `start` has returned. The job is ended, also if the client disconnects.

        Args:
            stream: the events of the response; None if it is not streamed.
            whole: returns the JSON of the response in pieces; it is called only if the response is not streamed.
            frames: returns how the stream writes new parts of a text, by the text's index; empty if there is more to
                write than these parts.
        """
        if stream is not None:
            attach = partial(job.attach, frames=frames)
            return EventStream(stream, lambda: self.end(job, name), self.config.keep_alive, attach)
        try:
            pieces = await unless_gone(request.receive, whole())
        finally:
            self.end(job, name)
        return Response(status_code=499) if pieces is None else self.answer(request, pieces)

    def answer(self, request: Request, pieces: Sequence[bytes]) -> JsonResponse:
        """Return the response with JSON in pieces. It counts towards the memory of answers until it has been sent."""
        key = key_of(request)
        response = JsonResponse(pieces=pieces)
        self.engine.answers.hold(key, response.size)
        response.done = lambda: self.engine.answers.release(key, response.size)
        return response

    def run_for(self, request: Request) -> Run:
        """Return a function that runs long work of a request in a helper thread, in turns with other keys' work."""
        return partial(self.helpers.run, key_of(request))

    async def report(self) -> Report:
        """Return what was counted since the last call."""
        threads, pool = self.helpers.lanes, None if self.renderer is None else self.renderer.pool
        lanes = (0, 0, 0) if pool is None else (pool.lanes.waiting, pool.lanes.refused, pool.killed)
        bodies, answers, tasks = self.engine.bodies, self.engine.answers, len(asyncio.all_tasks())
        load = Load(
            self.running, tasks, bodies.used, bodies.refused, answers.used, answers.refused, threads.waiting,
            threads.refused, *lanes,
        )  # fmt: skip
        load = added(load, image_load(self.fetcher.lanes, None if self.preparer is None else self.preparer.pool))
        jobs = [(job.lora, job.timing) for same in self.jobs.values() for job in same]
        load.adapters_running = Counter(lora for lora, at in jobs if lora is not None and at.scheduled is not None)
        load.adapters_waiting = Counter(lora for lora, at in jobs if lora is not None and at.scheduled is None)
        return Report(self.recorder.take(), load)

    async def abort_named(self, name: str | None) -> int:
        """Abort the requests of a name, or all; return their number."""
        names = list(self.jobs) if name is None else [name]
        jobs = [job for one in names for job in self.jobs.get(one, ())]
        for job in jobs:
            job.abort()
        return len(jobs)


def service_of(request: Request) -> Service:
    """Return the service of the server that received a request."""
    return cast(Service, request.app.state.service)


def key_of(request: Request) -> str | None:
    """Return the API key of a request; None if it has none."""
    key: str | None = request.scope.get("jswa.key")
    return key


def _salt(key: str | None, own: str | None) -> str:
    """Return the cache salt of a request. It contains the key: API keys never share cached prefixes."""
    tenant = "" if key is None else hashlib.sha256(key.encode()).hexdigest()
    return f"{tenant}/{own}" if own is not None else tenant

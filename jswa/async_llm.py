"""The Python API on an event loop: `async for output in AsyncLLM(model).generate(prompt)`."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

from jswa.cache.prefix.stats import CacheStats
from jswa.errors import EngineError, InvalidSampling, JswaError, RequestError
from jswa.frontend.engine_thread import EngineThread
from jswa.frontend.operations import operate_on
from jswa.frontend.outputs import CallOptions, Joined, PromptTexts
from jswa.frontend.pictures import images_of
from jswa.llm import LLM
from jswa.plan import RequestOptions, TokenEvent
from jswa.running.staging import Weights
from jswa.running.turnover import InFlight, WhilePaused
from jswa.sched.outputs import SchedulerStats
from jswa.text.chat_template import ChatTemplate
from jswa.text.inputs import Prompt, params_of
from jswa.text.tokenizer import Tokenizer
from jswa.types import RequestOutput, SamplingParams

OutputKind = Literal["cumulative", "delta", "final_only"]


@dataclass
class _Running:
    """A request that `generate` runs; its ids in the engine once it is queued there."""

    ids: list[str] = field(default_factory=list)
    aborted: bool = False


class AsyncLLM:
    """An engine in a thread of its own, with its tokenizer, for requests of coroutines. vLLM's names.

    Args:
        model: a folder with a Hugging Face checkpoint, OWNER/NAME on the Hugging Face Hub, or "tiny", the embedded
            model.
        options: fields of `jswa.EngineConfig`, by name. Raises ConfigError for an unknown name.

    The model is loaded before the constructor returns. The engine's thread starts with the first call, and all calls
    belong to the event loop of that one. Use it as an async context manager, or `close` it, to free the device's
    memory. If the engine fails, all requests raise EngineDead, and so does every later call.
    """

    def __init__(self, model: str | Path = "tiny", **options: Any) -> None:
        self._start(LLM(model, **options))

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Return an AsyncLLM with the engine of an LLM, which nothing else may use from then on."""
        made = cls.__new__(cls)
        made._start(llm)
        return made

    def _start(self, llm: LLM) -> None:
        self._llm = llm
        self._thread = EngineThread(llm.engine)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if it has none."""
        return self._llm.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template; None if it has none."""
        return self._llm.chat_template

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling parameters of the checkpoint's generation_config.json, by name."""
        return self._llm.default_sampling

    @property
    def num_unfinished(self) -> int:
        """Number of calls of `generate` that have not ended."""
        return len(self._running)

    @property
    def is_running(self) -> bool:
        """Whether new requests are accepted."""
        return not self._closed and not self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine has failed."""
        return self._thread.failure is not None

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has failed, and EngineError if it was closed."""
        if self._closed:
            raise EngineError("this AsyncLLM is closed")
        if self._thread.failure is not None:
            raise self._thread.failure

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests with an EngineError, and free weights and KV memory. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            await self._thread.close()
        if not self._thread.stuck:
            self._llm.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        cache_salt: str = "",
        lora: str | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Generate continuations of a prompt. Closing or cancelling the iterator aborts the request.

        Args:
            prompt: a string or token ids; vLLM's {"prompt": …}, {"prompt_token_ids": …} too.
            sampling_params: or give its fields as keywords; the checkpoint's generation_config.json has their defaults.
            request_id: name of the request for `abort`; no other unfinished request may have it. None: a new one.
            output_kind: what the items of the iterator hold (vLLM has this in SamplingParams): with "cumulative" the
                text so far, with "delta" only what is new since the last item, both as soon as a token has come; with
                "final_only" there is one item, the whole result, which costs the event loop least.
            priority: lower runs first.
            cache_salt: cached prefixes are shared with prompts of the same salt only.
            lora: name of a loaded LoRA adapter.

        Yields:
            RequestOutputs. If `n` > 1, each but that of "final_only" has the one text that has gone on.

        Raises:
            RequestError: the prompt or a parameter was refused.
            GenerationError: a text has no next token; it is raised behind the last item.
            EngineDead, EngineError: the engine has failed, or was closed.
        """
        thread = await self._started()
        if output_kind not in get_args(OutputKind):
            raise InvalidSampling("output_kind", output_kind, f"must be one of {', '.join(get_args(OutputKind))}")
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        if name in self._running:
            raise RequestError("request_id", name, "must not be the id of an unfinished request")
        running = self._running[name] = _Running()
        events: asyncio.Queue[TokenEvent | JswaError] = asyncio.Queue()
        joined = Joined()
        try:
            params = params_of([prompt], sampling_params, sampling, self.default_sampling)[0]
            await thread.prepare(params, images=bool(images_of(prompt)))
            options = CallOptions(RequestOptions(priority, cache_salt, lora), whole=output_kind == "final_only")
            # Other coroutines go on while a long prompt is tokenized.
            texts = await asyncio.to_thread(
                PromptTexts, thread.engine, self.tokenizer, self._new_id, prompt, params, options, name=name
            )
            self._submit(texts, events, running)
            error = None
            while texts.unfinished:
                piece = await self._piece(texts, events)
                error = error or piece.error
                if output_kind == "delta":
                    yield piece
                    continue
                joined.add(piece)
                if output_kind == "cumulative":
                    yield joined.latest()
            if error is not None:
                raise error
            if output_kind == "final_only":
                yield joined.whole()
        finally:
            del self._running[name]
            thread.abort(running.ids)

    async def abort(self, request_id: str) -> None:
        """End a request: the last item of its iterator has the finish reason "abort". Unknown ids are ignored."""
        running = self._running.get(request_id)
        if running is not None:
            running.aborted = True
            self._thread.abort(running.ids, deliver_last=True)

    def stats(self) -> SchedulerStats:
        """Return rows and memory, at most a quarter of a second ago."""
        return self._thread.figures.rows

    def cache_stats(self) -> CacheStats:
        """Return counters and contents of the prefix cache, at most a quarter of a second ago."""
        return self._thread.figures.cache

    async def flush_cache(self) -> None:
        """Empty the prefix cache and reset its counters. Running requests keep their pages."""
        await operate_on(await self._started(), "flush_cache")

    async def load_lora(self, name: str, folder: str | Path, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter into the room that `max_loras` reserves; `load_inplace` replaces one of that name.

        Raises RequestError, and changes nothing, if it cannot be loaded.
        """
        await operate_on(await self._started(), "load_lora", str(folder), name, load_inplace)

    async def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter: new requests for it are refused, those that use it go on to their end."""
        await operate_on(await self._started(), "unload_lora", name)

    async def update_weights(self, source: Weights, *, in_flight: InFlight = "continue") -> int:
        """Change the weights between two steps; see `LLM.update_weights`. Steps go on while they are converted."""
        return cast(int, await operate_on(await self._started(), "update_weights", source, in_flight))

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next step runs with. Raises EngineDead."""
        return self._thread.engine.turnover.version

    async def pause(self, requests: WhilePaused = "keep") -> None:
        """Run no step until `resume`; see `LLM.pause`."""
        await operate_on(await self._started(), "pause", requests)

    async def resume(self) -> None:
        """Run steps again. Raises RequestError while the engine sleeps."""
        await operate_on(await self._started(), "resume")

    async def sleep(self, level: int = 1) -> None:
        """Pause, and free memory; see `LLM.sleep`."""
        await operate_on(await self._started(), "sleep", level)

    async def wake(self) -> None:
        """Take the memory back and resume; see `LLM.wake`."""
        await operate_on(await self._started(), "wake")

    async def _started(self) -> EngineThread:
        """Return the engine's thread, started. Raises EngineDead or EngineError."""
        await self.check_health()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._thread.start()
        if self._loop is not loop:
            raise EngineError("this AsyncLLM belongs to another event loop: make all calls on the loop of the first")
        return self._thread

    def _new_id(self) -> str:
        return str(next(self._numbers))

    def _submit(self, texts: PromptTexts, events: asyncio.Queue[TokenEvent | JswaError], running: _Running) -> None:
        """Queue the requests in the engine, and let `events` have what comes back."""
        running.ids = list(texts.unfinished)
        receivers = {name: texts.receiver(name, events.put_nowait) for name in running.ids}

        def put(event: TokenEvent | JswaError) -> None:
            if isinstance(event, TokenEvent):
                receivers[event.request_id].event(event)
            else:
                events.put_nowait(event)

        self._thread.submit(texts.requests, put, {name: receiver.token for name, receiver in receivers.items()})
        if running.aborted:  # while the prompt was tokenized
            self._thread.abort(running.ids, deliver_last=True)

    async def _piece(self, texts: PromptTexts, events: asyncio.Queue[TokenEvent | JswaError]) -> RequestOutput:
        """Return the next piece of the output. Raises the error that ends the request."""
        while True:
            event = await events.get()
            if not isinstance(event, TokenEvent):
                raise event
            if event.request_id not in texts.unfinished:
                continue  # its text has ended at a stop string
            piece = texts.push(event)
            if event.request_id not in texts.unfinished:
                self._thread.abort([event.request_id])
            if piece is not None:
                return piece

"""The Python API: `LLM(model).generate(prompts)`, and `generate(prompts)` for one-liners."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from tqdm import tqdm

from jswa.config import EngineConfig
from jswa.engine import Engine
from jswa.errors import (
    CheckpointError,
    EngineError,
    GenerationError,
    RequestError,
)
from jswa.inputs import Prompt, Prompts, engine_config, params_of, split_prompts, tokenize
from jswa.sched.scheduler import SchedulerStats
from jswa.text import StreamDecoder, Tokenizer
from jswa.types import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams, TokenEvent

TINY = Path(__file__).parent / "assets" / "tiny"


class LLM:
    """An engine with its tokenizer. Use it as a context manager, or `close` it, to free the device's memory.

    Args:
        model: a folder with a Hugging Face checkpoint, or "tiny", the model in the box.
        options: fields of `jswa.EngineConfig`, by name. Raises ConfigError for a name that is none of them.
    """

    def __init__(self, model: str | Path = "tiny", **options: Any) -> None:
        folder = TINY if str(model) == "tiny" else Path(model)
        if not folder.is_dir():
            raise CheckpointError(f"model = {str(model)!r}: must be the folder of a checkpoint, or 'tiny'")
        self.tokenizer = Tokenizer.load(folder)
        self._engine: Engine | None = Engine.build(folder, engine_config(options))
        self._requests = 0
        self._batches: dict[str, _Batch] = {}

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises EngineError once the LLM is closed."""
        if self._engine is None:
            raise EngineError("this LLM is closed")
        return self._engine

    def close(self) -> None:
        """Let go of weights and KV memory. The LLM cannot be used afterwards; closing twice is fine."""
        self._engine = None
        self._batches.clear()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> SchedulerStats:
        """Rows and pages at this moment."""
        return self.engine.stats()

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        use_tqdm: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        use_tqdm: bool = True,
        **sampling: Any,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        use_tqdm: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate a continuation of every prompt.

        Args:
            prompts: a string, token ids, or a list of either; vLLM's {"prompt": …}, {"prompt_token_ids": …} too.
            sampling_params: for all prompts, or one per prompt; or give its fields as keywords (`max_new_tokens` is
                another name of `max_tokens`).
            stream: return an iterator instead; each item holds what is new for one prompt (`outputs[0].text` and
                `outputs[0].token_ids`), and `finished`. An iterator that is dropped aborts its requests.
            use_tqdm: show progress (never while streaming).

        Returns:
            One `RequestOutput` per prompt, in input order.

        Raises:
            RequestError: a prompt or parameter was refused. Where several prompts were given the others have run to
                their end first, and the error carries their results (`outputs`) and all errors (`errors`).
            GenerationError: as `error` of the outputs concerned, and raised for a single prompt.
        """
        batch = _Batch(self, split_prompts(prompts), sampling_params, sampling)
        return batch.run() if stream else batch.collect(show=use_tqdm)

    def _enter(self, batch: "_Batch") -> str:
        """A request id that this LLM has not used, whose events go to the batch."""
        request_id = str(self._requests)
        self._requests += 1
        self._batches[request_id] = batch
        return request_id

    def _leave(self, request_id: str) -> None:
        """End a request, if it has not ended, and forget it."""
        if self._batches.pop(request_id, None) is not None and self._engine is not None:
            self._engine.abort(request_id)

    def _advance(self) -> None:
        """One engine step; several `generate` calls may be under way, each gets its own events."""
        for event in self.engine.step():
            if event.request_id in self._batches:
                self._batches[event.request_id].events.append(event)


def generate(
    prompts: Prompts,
    model: str | Path = "tiny",
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    stream: bool = False,
    use_tqdm: bool = True,
    **options: Any,
) -> list[RequestOutput] | Iterator[RequestOutput]:
    """`LLM(model, …).generate(prompts, …)` in one call; the last model used stays loaded.

    `options` may name fields of `SamplingParams` and of `EngineConfig`; `seed` is the sampling seed.
    """
    sampling_names = {f.name for f in dataclasses.fields(SamplingParams)} | {"max_new_tokens"}
    engine_options = {name: value for name, value in options.items() if name not in sampling_names}
    sampling = {name: value for name, value in options.items() if name in sampling_names}
    llm = _loaded(str(model), engine_config(engine_options))
    batch = _Batch(llm, split_prompts(prompts), sampling_params, sampling)
    return batch.run() if stream else batch.collect(show=use_tqdm)


@lru_cache(maxsize=1)
def _loaded(model: str, options: EngineConfig) -> LLM:
    return LLM(model, **dataclasses.asdict(options))


class _Batch:
    """The prompts of one `generate` call on their way through the engine."""

    def __init__(
        self,
        llm: LLM,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: dict[str, Any],
    ) -> None:
        self.events: deque[TokenEvent] = deque()
        self._llm = llm
        self._errors: dict[int, RequestError] = {}
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._running: dict[str, tuple[int, StreamDecoder | None]] = {}
        self._prompts = list(zip(prompts, params_of(prompts, params, sampling), strict=True))

    def collect(self, *, show: bool) -> list[RequestOutput]:
        """Run to the end and return whole results."""
        done = [_Whole() for _ in self._outputs]
        with tqdm(total=len(done), desc="prompts", disable=not show, unit="prompt", dynamic_ncols=True) as bar:
            for index, output in self._pieces():
                done[index].add(output)
                bar.update(output.finished)
            bar.update(len(self._errors))
        for index, whole in enumerate(done):
            if whole.output is not None:
                self._outputs[index] = whole.output
        self._raise(self._outputs)
        if len(done) == 1 and done[0].output is not None and done[0].output.error is not None:
            raise done[0].output.error
        return [output for output in self._outputs if output is not None]

    def run(self) -> Iterator[RequestOutput]:
        """Yield pieces as they come; raise what was refused at the end."""
        for _, output in self._pieces():
            yield output
        self._raise([])

    def _add(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        tokenizer, engine = self._llm.tokenizer, self._llm.engine
        text, ids = tokenize(prompt, tokenizer)
        request_id = self._llm._enter(self)
        try:
            request = engine.request(request_id, ids, params)
            engine.add(request)
        except RequestError:
            self._llm._leave(request_id)
            raise
        decoder = None
        if tokenizer is not None:
            decoder = StreamDecoder(tokenizer, request.prompt, skip_special_tokens=params.skip_special_tokens)
        self._running[request_id] = index, decoder
        self._outputs[index] = RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=request.prompt.tolist(),
            outputs=[],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )

    def _submit(self) -> None:
        for index, (prompt, params) in enumerate(self._prompts):
            try:
                self._add(index, prompt, params)
            except RequestError as error:
                error.index = index
                self._errors[index] = error

    def _pieces(self) -> Iterator[tuple[int, RequestOutput]]:
        try:
            self._submit()
            while self._running:
                while not self.events:
                    self._llm._advance()
                yield self._piece(self.events.popleft())
        finally:
            for request_id in self._running:
                self._llm._leave(request_id)

    def _piece(self, event: TokenEvent) -> tuple[int, RequestOutput]:
        index, decoder = self._running[event.request_id]
        output = self._outputs[index]
        assert output is not None
        text, ids = "", [] if event.token is None else [event.token]
        stopped = event.finish_reason == "stop"
        if decoder is not None and event.token is not None and not stopped:
            text = decoder.push(event.token)
        if event.finish_reason is not None:
            del self._running[event.request_id]
            self._llm._leave(event.request_id)
            text += decoder.finish() if decoder is not None else ""
        piece = CompletionOutput(0, text, ids, finish_reason=event.finish_reason, stop_reason=event.stop_reason)
        error = None
        if event.finish_reason == "error":
            error = GenerationError(f"request {event.request_id}: the model gave logits that are not finite")
        _stamp(output.metrics, finished=event.finish_reason is not None)
        return index, dataclasses.replace(
            output, outputs=[piece], finished=event.finish_reason is not None, error=error
        )

    def _raise(self, outputs: Sequence[RequestOutput | None]) -> None:
        if self._errors:
            first = self._errors[min(self._errors)]
            first.outputs = list(outputs)
            first.errors = dict(self._errors)
            raise first


class _Whole:
    """Pieces of one request put together."""

    def __init__(self) -> None:
        self.output: RequestOutput | None = None

    def add(self, piece: RequestOutput) -> None:
        if self.output is None:
            self.output = piece
            return
        so_far, new = self.output.outputs[0], piece.outputs[0]
        so_far.text += new.text
        so_far.token_ids.extend(new.token_ids)
        so_far.finish_reason, so_far.stop_reason = new.finish_reason, new.stop_reason
        self.output.finished, self.output.error = piece.finished, piece.error


def _stamp(metrics: RequestMetrics | None, *, finished: bool) -> None:
    if metrics is not None:
        now = time.monotonic()
        metrics.first_token_time = metrics.first_token_time or now
        metrics.last_token_time = now
        metrics.finished_time = now if finished else None

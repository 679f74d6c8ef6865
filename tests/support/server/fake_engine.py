"""An engine without a model, for tests of the server: generated token k is a function of the prompt and k."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.stats import CacheStats, HitCounter
from jswa.cache.view import FULL, ArenaGeometry, CacheView
from jswa.config import Limits
from jswa.errors import (
    EngineError,
    GenerationError,
    InvalidPrompt,
    InvalidToken,
    JswaError,
    PromptTooLong,
    RequestError,
    UnknownAdapter,
    WeightsError,
)
from jswa.grammar.compiler import Grammars
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput, image_ids
from jswa.kernels import Kernels
from jswa.plan import DEFAULT_OPTIONS, ChoiceLogprobs, ImageRows, Request, RequestOptions, StepEvents, TokenEvent
from jswa.running.turnover import InFlight, WhilePaused
from jswa.sched.constraint import make_constraint
from jswa.sched.outputs import SchedulerStats
from jswa.sched.steplog import StepStats
from jswa.types import FinishReason, PrefixHit, SamplingParams

Rule = Callable[[list[int], int], int | GenerationError]


class FakeModel:
    """The attributes of a model that the server reads: the vocabulary and its end token."""

    vocab_size = 259
    eos_token_ids: tuple[int, ...] = (2,)


def count_up(prompt: list[int], position: int) -> int:
    """Return the letters of the alphabet in turn, beginning with the one at the prompt's length."""
    return 3 + 97 + (len(prompt) + position) % 26


class FakeReader:
    """Reads no file: the name of a folder stands for what it has."""

    def read(self, folder: str) -> str:
        """Refuse folders with certain names, and return the name of any other."""
        if "nowhere" in folder:
            raise UnknownAdapter("lora_path", folder, "must be a folder that exists")
        if "torn" in folder:
            raise RequestError("lora_path", folder, "is torn")
        return folder


class FakeChanges:
    """What changes a fake engine: counts versions, and stops its steps. New weights are any object."""

    def __init__(self) -> None:
        self.version = self.level = 0
        self.paused = self.pausing = False
        self.given: list[tuple[Any, InFlight]] = []

    def stage(self, source: Any) -> Any:
        """Refuse a source that is named "bad"."""
        if source == "bad":
            raise WeightsError("weights", "model.norm.weight", "must be among the new weights")
        return source

    def update(self, params: Any, in_flight: InFlight) -> int:
        """Count a version."""
        self.given.append((params, in_flight))
        self.version += 1
        return self.version

    def pause(self, requests: WhilePaused) -> None:
        """Stop the steps."""
        self.paused = True

    def resume(self) -> None:
        """Run steps again, unless the engine sleeps."""
        if self.level:
            raise RequestError("sleep", self.level, "call wake")
        self.paused = False

    def sleep(self, level: int) -> None:
        """Stop the steps."""
        self.level, self.paused = level, True

    def wake(self) -> None:
        """Run steps again."""
        self.level, self.paused = 0, False


class FakeEngine:
    """An engine that runs up to `max_rows` requests at a time, and generates one token per request and step.

    Attributes:
        delay: seconds of a step; tests may set it.
        prepare_delay: seconds of `prepare`; tests may set it.
        see_delay: seconds of `see`; tests may set it.
        images: how it reads images; tests may set it.
        pictures: all that it has seen.
        prepared_images: for how many prompts with images programs were prepared.
        steps_left: number of steps after which the engine fails; tests may set it.
        seen: all requests so far.
        steps, flushed, constraints: numbers of steps, cache flushes and constraints so far.
    """

    def __init__(
        self, *, rule: Rule = count_up, max_rows: int = 8, max_model_len: int = 256, adapters: Collection[str] = ()
    ) -> None:
        self.model = FakeModel()
        self.adapters = {name: f"digest of {name}" for name in adapters}
        self.kernels = Kernels()
        self.limits = Limits(max_model_len, max_rows, max_rows, 16, num_slabs=64)
        self.grammars: Grammars | None = None
        self.rule = rule
        self.steps = 0
        self.steps_left: int | None = None
        self.flushed = self.constraints = 0
        self.delay = 0.0
        self.profiled: str | None = None
        self.prepare_delay = self.see_delay = 0.0
        self.images: ImageInput | None = None
        self.pictures: list[Picture] = []
        self.prepared_images = 0
        self.prepared: list[SamplingParams] = []
        self.completed: list[SamplingParams] = []
        self.seen: list[Request] = []
        self.running: dict[str, list[int]] = {}
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._hits = HitCounter()
        self.turnover = self.stager = FakeChanges()

    def request(
        self,
        request_id: str,
        prompt: Int[np.ndarray, " P"],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        bad_words: tuple[tuple[int, ...], ...] = (),
        choice: int = 0,
        like: Request | None = None,
        images: Sequence[ImageRows] = (),
    ) -> Request:
        """Validate a request like the real engine. The soft tokens of a prompt must be those of its images."""
        lora = options.lora
        if lora is not None and lora not in self.adapters:
            raise UnknownAdapter("lora", lora, "is not loaded")
        if not len(prompt):
            raise InvalidPrompt("prompt", "", "must have at least one token")
        soft = [image_ids(image.digest, len(image.rows)) for image in images]
        if soft and np.array_equal(prompt[prompt < 0], np.concatenate(soft)):
            bad = prompt[prompt >= self.model.vocab_size]
        else:
            bad = prompt[(prompt < 0) | (prompt >= self.model.vocab_size)]
        if len(bad):
            raise InvalidToken("prompt token id", int(bad[0]), f"must be in [0, {self.model.vocab_size})")
        ends = () if params.ignore_eos else self.model.eos_token_ids
        stops = frozenset(params.stop_token_ids).union(ends)
        longest = self.limits.max_model_len
        if like is None:
            constraint = make_constraint(params, self.model.vocab_size, len(prompt), stops, bad_words)
            self.constraints += constraint is not None
        else:
            constraint = like.constraint and like.constraint._replace(min_length=len(prompt) + params.min_tokens)
        return Request(
            request_id,
            prompt if like is not None and prompt is like.prompt else prompt.astype(np.int32),
            params,
            stops,
            key=divmod((params.seed + choice) % 2**64, 2**32) if params.seed is not None else (0, 0),
            max_length=longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens),
            options=options,
            constraint=constraint,
            cache_salt=options.cache_salt,
            adapter=0 if lora is None else 1 + list(self.adapters).index(lora),
        )

    def see(self, pictures: Sequence[Picture], salt: str = "") -> tuple[ImageRows, ...]:
        """Return rows of zeros."""
        assert self.images is not None
        time.sleep(self.see_delay)
        self.pictures += pictures
        return tuple(ImageRows(one.digest, np.zeros((one.tokens, 4), np.float32)) for one in pictures)

    @property
    def lora_reader(self) -> "FakeReader":
        """Return a reader for which a folder's name is its content."""
        return FakeReader()

    def load_lora(self, name: str, adapter: str, *, replace: bool = False) -> None:
        """Add an adapter; at most three fit."""
        if name in self.adapters and not replace:
            raise RequestError("lora_name", name, "is loaded")
        if len(self.adapters) == 3:
            raise RequestError("max_loras", 3, "no room is left")
        self.adapters[name] = f"digest of {adapter}"

    def unload_lora(self, name: str) -> None:
        """Remove an adapter."""
        if name not in self.adapters:
            raise UnknownAdapter("lora_name", name, "is not loaded")
        del self.adapters[name]

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong."""
        if len(request.prompt) + 1 > self.limits.max_model_len:
            raise PromptTooLong("prompt", f"{len(request.prompt)} tokens", "too long")
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is already running")
        self.seen.append(request)
        self._requests[request.request_id] = request
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.options.priority)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request and return its last event; None if it has ended before."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.running.pop(request_id, None)
        self.waiting = [r for r in self.waiting if r is not request]
        return TokenEvent(request_id, None, "abort")

    def has_work(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._requests) and not self.turnover.paused

    def step(self) -> StepEvents:
        """Sleep for `delay`, admit waiting requests (first of tenants with few rows), and return each row's event."""
        time.sleep(self.delay)
        self.steps += 1
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise EngineError("killed by a test")
        while self.waiting and len(self.running) < self.limits.max_rows:
            rows = Counter(self._requests[name].options.tenant for name in self.running)
            request = min(self.waiting, key=lambda r: (r.options.priority, rows[r.options.tenant]))
            self.waiting.remove(request)
            self.running[request.request_id] = []
        events = [self._next(request_id) for request_id in list(self.running)]
        plain = [event for event in events if event == TokenEvent(event.request_id, event.token)]
        others = tuple(event for event in events if event != TokenEvent(event.request_id, event.token))
        ids, tokens = np.array([e.request_id for e in plain], object), np.array([e.token for e in plain], np.int32)
        return StepEvents(ids, tokens, others)

    def _next(self, request_id: str) -> TokenEvent:
        request, text = self._requests[request_id], self.running[request_id]
        prompt = request.prompt.tolist()
        found = self.rule(prompt, len(text))
        hit = PrefixHit(len(prompt), len(prompt) // 2, len(prompt) // 2, 0, "salt") if not text else None
        reason: FinishReason | None = None
        token, error = (None, found) if isinstance(found, GenerationError) else (found, None)
        if token is None:
            reason = "error"
        else:
            text.append(token)
            if token in request.stop_ids:
                reason = "stop"
            elif len(prompt) + len(text) >= request.max_length:
                reason = "length"
        if reason is not None:
            del self.running[request_id]
            del self._requests[request_id]
        params = request.params
        want = params.logprobs if params.logprobs is not None else params.prompt_logprobs
        logprobs = None if want is None or token is None else _logprobs(token, 20)
        of_prompt = None
        if params.prompt_logprobs is not None and hit is not None:
            of_prompt = [_logprobs(t, 20) for t in prompt[1:]]
        stop = token if reason == "stop" and token in params.stop_token_ids else None
        begun = time.monotonic() if hit else None
        pooled = None if params.pooling is None or error else np.resize(np.array(prompt, np.float32), 4)
        return TokenEvent(request_id, token, reason, stop, logprobs, of_prompt, begun, hit, error, pooled=pooled)

    def stats(self) -> SchedulerStats:
        """Return statistics in which every running request has one page."""
        rows = len(self.running)
        return SchedulerStats(rows, len(self.waiting), rows, rows, 0, 63 - rows, 63, 0)

    def cache_stats(self) -> CacheStats:
        """Return fixed numbers: misses "cold" and "salt"."""
        return CacheStats(0, 10, 5, 5, 0, 0, {"cold": 3, "salt": 2}, 0, 0, 0, 0, 0, 0)

    def view(self, edges: int) -> CacheView:
        """Return an arena of 64 slabs, in which every running request has one full page."""
        slots = np.zeros(64, np.uint8)
        slots[1 : 1 + len(self.running)] = FULL
        texts = [len(text) for text in self.running.values()]
        rows = np.array([(row, length, 0, 0, 1) for row, length in enumerate(texts)], np.int32).reshape(-1, 5)
        tree, marks = np.array([(-1, 0, 48, 3, 1, 2, 0)])[:edges], np.array([(0, 48)])[:edges]
        geometry = ArenaGeometry(16, 1, 64, 8, 32, False, True)
        return CacheView(geometry, slots, np.zeros(0, np.uint8), rows, tree, marks, 0.0)

    def step_stats(self) -> StepStats:
        """Return the number of steps and of prepared programs."""
        return StepStats(self.steps, compiled_beside=len(self.prepared))

    def prepare(
        self,
        params: SamplingParams,
        *,
        images: bool = False,
        fewest: bool = False,
        pause: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Record the parameters: after `prepare_delay` in `prepared` for the fewest programs, else in `completed`."""
        if fewest:
            time.sleep(self.prepare_delay)
            self.prepared.append(params)
            self.prepared_images += images
        elif not stop():
            self.completed.append(params)

    def close(self) -> None:
        """Free nothing."""

    def when_lost(self, lost: Callable[[JswaError], None], leaving: Callable[[JswaError], None]) -> None:
        """Store the callbacks, for tests to call."""
        self.report_lost, self.report_leaving = lost, leaving

    def profile(self, folder: str | None) -> None:
        """Store the folder."""
        if (folder is None) == (self.profiled is None):
            raise RequestError("profile", folder, "a profile must run, or none")
        self.profiled = folder

    def flush_cache(self) -> None:
        """Count the calls."""
        self.flushed += 1


def _logprobs(token: int, top: int) -> ChoiceLogprobs:
    others = [t for t in range(100, 130) if t != token][: top - 1]
    return ChoiceLogprobs(token, -0.25, 1, (token, *others), (-0.25, *(-1.0 - i for i in range(len(others)))))

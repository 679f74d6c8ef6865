"""The engine's interface as its drivers use it. `jswa.engine.Engine` has it, and so has the unit tests' fake."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.stats import CacheStats
from jswa.cache.view import CacheView
from jswa.config import Limits
from jswa.errors import JswaError
from jswa.grammar.compiler import Grammars
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput
from jswa.kernels import Kernels
from jswa.plan import DEFAULT_OPTIONS, ImageRows, Request, RequestOptions, StepEvents, TokenEvent
from jswa.running.turnover import InFlight, WhilePaused
from jswa.sched.outputs import SchedulerStats
from jswa.sched.steplog import StepStats
from jswa.types import SamplingParams


class Model(Protocol):
    """The attributes of a model that drivers of an engine read."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all ids are below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generated text."""
        ...


class AdapterReader(Protocol):
    """Reads LoRA adapters in any thread. It holds no reference to the engine, which may be replaced meanwhile."""

    def read(self, folder: str) -> Any:
        """Check and read a folder. Raises RequestError."""
        ...


class Stager(Protocol):
    """Turns new weights into parameters, in any thread. It holds no reference to the engine."""

    def stage(self, source: Any) -> Any:
        """Check and convert new weights; nothing of the engine changes. Raises WeightsError."""
        ...


class Changes(Protocol):
    """Changes the weights of an engine, and stops and starts its steps; `jswa.running.turnover.Turnover`."""

    version: int
    paused: bool
    level: int

    @property
    def pausing(self) -> bool:
        """Whether it pauses once older requests have ended."""
        ...

    def update(self, params: Any, in_flight: InFlight) -> int:
        """Change to weights that were staged, now or when older requests have ended; return their version."""
        ...

    def pause(self, requests: WhilePaused) -> None:
        """Run no step until `resume`, now or when older requests have ended."""
        ...

    def resume(self) -> None:
        """Run steps again."""
        ...

    def sleep(self, level: int) -> None:
        """Free the arena (1), and the weights too (2)."""
        ...

    def wake(self) -> None:
        """Allocate the arena and resume."""
        ...


class EngineLike(Protocol):
    """An engine that can be driven: `jswa.engine.Engine`, or the fake of the unit tests, which needs no jax.

    The engine's thread alone may call the methods, unless their docstrings say otherwise.
    """

    @property
    def model(self) -> Model:
        """The model that the engine runs."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits that the engine runs with."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The kernels that the engine runs."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Digests of the loaded LoRA adapters, by name. Any thread may read it."""
        ...

    @property
    def grammars(self) -> Grammars | None:
        """What compiles structured outputs; None: they are refused. Any thread may use it."""
        ...

    @property
    def stager(self) -> Stager:
        """Turns new weights into parameters. Raises RequestError if the engine cannot change them."""
        ...

    @property
    def turnover(self) -> Changes:
        """Changes the weights, pauses the engine and lets it sleep."""
        ...

    @property
    def lora_reader(self) -> AdapterReader:
        """What reads adapters for `load_lora`. Raises RequestError if the engine cannot load any."""
        ...

    @property
    def images(self) -> ImageInput | None:
        """What makes prompts of images; None if the model reads no images. Any thread may read it."""
        ...

    def see(self, pictures: Sequence[Picture], salt: str = "") -> tuple[ImageRows, ...]:
        """Return the rows of pictures' soft tokens. It may take seconds; any thread may call it, beside the steps.

        A picture that was seen lately under the same salt takes no time. Raises RequestError if the model reads none.
        """
        ...

    def load_lora(self, name: str, adapter: Any, *, replace: bool = False) -> None:
        """Load an adapter that was read, instead of one of that name if `replace` is set. Raises RequestError."""
        ...

    def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter; free its room when the last of its requests ends. Raises RequestError."""
        ...

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
        """Return the validated request for text `choice` of a prompt. Raises RequestError.

        Of all methods, only this one and `prepare` may be called in other threads than the engine's, also in several
        at once.

        Args:
            like: a request with the same parameters, with which the new one shares all that depends on these alone.
            images: those of the prompt, in its order.
        """
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request and return its last event, or None if it has ended already."""
        ...

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        ...

    def step(self) -> StepEvents:
        """Run one step and return its events."""
        ...

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        ...

    def cache_stats(self) -> CacheStats:
        """Return counters and contents of the prefix cache."""
        ...

    def view(self, edges: int) -> CacheView:
        """Return what the arena, the rows and so many edges of the prefix tree hold: ids and counts."""
        ...

    def step_stats(self) -> StepStats:
        """Return counts and times of the steps so far."""
        ...

    def profile(self, folder: str | None) -> None:
        """Begin a profile of the device, written to a folder; None ends it. Raises RequestError."""
        ...

    def flush_cache(self) -> None:
        """Empty the prefix cache. Running rows keep their pages."""
        ...

    def close(self) -> None:
        """Free the memory; closing twice is fine."""
        ...

    def when_lost(self, lost: Callable[[JswaError], None], leaving: Callable[[JswaError], None]) -> None:
        """Register callbacks for the loss of another host that shares the model. They run in a thread of their own.

        Args:
            lost: called when a host is lost: a step that waits for it never returns.
            leaving: called when a host was told to exit. It keeps working until this engine is closed.
        """
        ...

    def prepare(
        self,
        params: SamplingParams,
        *,
        images: bool = False,
        fewest: bool = False,
        pause: float = 0.0,
        stop: Callable[[], bool] = ...,
    ) -> None:
        """Compile the step programs that a request with these parameters needs. Any thread may call this.

        Args:
            images: whether its prompt has images.
            fewest: compile only the fewest programs that suffice, in which steps are slower.
            pause: while steps run, pause after each program for `pause` times as long as it took to compile.
            stop: asked before each program whether to stop compiling.
        """
        ...


class Readers(Protocol):
    """Other processes that get the events of all steps, in place of the requests of this one."""

    def deliver(self, events: StepEvents) -> None:
        """Send a step to them, on the event loop."""
        ...

    def send(self, events: StepEvents) -> bool:
        """Do so in the engine's thread, once `deliver` has had all earlier steps; False: `deliver` must do it."""
        ...

    def wait(self, most: int) -> None:
        """Wait, in the engine's thread, while one of them has more than `most` steps to handle."""
        ...

    def flush(self) -> None:
        """Send what `send` has kept for them: the engine's thread does something else than steps next."""
        ...


class Figures(NamedTuple):
    """Figures of an engine between two steps, and its grammars, which have their own."""

    rows: SchedulerStats
    cache: CacheStats
    steps: StepStats
    grammars: Grammars | None


def figures_of(engine: EngineLike) -> Figures:
    """Return the figures of an engine. Only the engine's own thread may call this."""
    return Figures(engine.stats(), engine.cache_stats(), engine.step_stats(), engine.grammars)

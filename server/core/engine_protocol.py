"""What the server asks of an engine: `jswa.engine.Engine` is one, unit tests have a fake without jax."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.stats import CacheStats
from jswa.config import Limits
from jswa.errors import JswaError
from jswa.plan import Request, TokenEvent
from jswa.sched.outputs import SchedulerStats
from jswa.sched.steplog import StepStats
from jswa.types import SamplingParams


class Model(Protocol):
    """What the server asks of the model."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...


class EngineLike(Protocol):
    """What the server needs of an engine; `jswa.engine.Engine` is one, tests have a fake."""

    @property
    def model(self) -> Model:
        """What it runs."""
        ...

    @property
    def limits(self) -> Limits:
        """What it runs with."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Its LoRA adapters, by name."""
        ...

    def request(
        self,
        request_id: str,
        prompt: Int[np.ndarray, " P"],
        params: SamplingParams,
        *,
        bad_words: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        cache_salt: str = "",
        lora: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
        choice: int = 0,
        like: Request | None = None,
    ) -> Request:
        """Validate a prompt; text `choice` of it. What depends on the parameters alone is shared with `like`.

        Of all methods, only this one and `prepare` may be called beside the engine's thread, also by several threads.
        """
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request; None where it has ended already."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def step(self) -> list[TokenEvent]:
        """One step."""
        ...

    def stats(self) -> SchedulerStats:
        """Rows and pages."""
        ...

    def cache_stats(self) -> CacheStats:
        """What the prefix cache holds."""
        ...

    def step_stats(self) -> StepStats:
        """What the steps have done and taken."""
        ...

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        ...

    def when_lost(self, lost: Callable[[JswaError], None], leaving: Callable[[JswaError], None]) -> None:
        """Have these called, in a thread of their own, when a host that shares the model is gone, or is to end."""
        ...

    def prepare(
        self, params: SamplingParams, *, fewest: bool = False, pause: float = 0.0, stop: Callable[[], bool] = ...
    ) -> None:
        """Compile what such a request needs; may be called beside the engine's thread.

        Args:
            fewest: only as many programs as suffice.
            pause: waits after each program that many times as long as it took, while steps run.
            stop: whether to end now.
        """
        ...


class Figures(NamedTuple):
    """What an engine has done and holds, between two steps."""

    rows: SchedulerStats
    cache: CacheStats
    steps: StepStats


def figures_of(engine: EngineLike) -> Figures:
    """Read the figures of an engine; only its own thread may."""
    return Figures(engine.stats(), engine.cache_stats(), engine.step_stats())

"""What the routes need of the engine, in their own process (`LocalEngine`) or in another one (`RemoteEngine`)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jswa.cache.view import CacheView
from jswa.config import Limits
from jswa.errors import EngineDead
from jswa.frontend.engine_thread import State
from jswa.frontend.operations import Verb
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput
from jswa.types import SamplingParams

from ..core.counts import Report
from ..core.fairness import Key
from ..core.texts import Order
from .forms import Made
from .intake import Ids, Put


@runtime_checkable
class Shares(Protocol):
    """An amount of bytes that API keys share, as `Budget` has it. `most`: the whole amount, `used`: this process's."""

    most: float
    refused: int

    @property
    def used(self) -> int:
        """The amount that this process uses."""
        ...

    async def claim(self, key: Key, amount: int) -> bool:
        """Acquire an amount for a key and return True, or return False if it does not fit."""
        ...

    def fits(self, key: Key, amount: int) -> bool:
        """Return whether a key may have an amount more."""
        ...

    def hold(self, key: Key, amount: int) -> None:
        """Acquire an amount for a key even if it does not fit."""
        ...

    def release(self, key: Key, amount: int) -> None:
        """Release an amount that a key has acquired."""
        ...


@runtime_checkable
class FrontEnd(Protocol):
    """The routes of one process, as the engine asks them."""

    async def report(self) -> Report:
        """Return what was counted since the last call."""
        ...

    async def abort_named(self, name: str | None) -> int:
        """Abort the requests of a name, or all; return their number."""
        ...


class Info(NamedTuple):
    """The engine's part of /server_info."""

    load: dict[str, Any]
    rest: dict[str, Any]


class Standing(NamedTuple):
    """Which weights an engine has, and whether it runs. `level`: 1 if its KV arena sleeps, 2 if its weights do too."""

    version: int
    paused: bool
    level: int


@runtime_checkable
class EngineSide(Protocol):
    """The engine and all that its requests share. Methods raise ApiError, also if the engine is dead or restarting.

    Attributes:
        images: what makes prompts of images; None if the model reads none.
    """

    limits: Limits
    images: ImageInput | None
    bodies: Shares
    answers: Shares

    @property
    def state(self) -> State:
        """Whether the engine accepts requests."""
        ...

    @property
    def failure(self) -> EngineDead | None:
        """The error for every request while the engine is dead or restarting; None while it is up."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the loaded LoRA adapters; while the engine is down, of those that it had."""
        ...

    @property
    def has_forms(self) -> bool:
        """Whether answers can be held to a form: the model has a tokenizer."""
        ...

    async def compile(self, question: bytes, delimiters: Collection[int], key: Key) -> Made:
        """Compile a form, as `Forms.compile` does."""
        ...

    async def submit(
        self,
        names: Sequence[str],
        prompts: Sequence[Ids],
        params: SamplingParams,
        order: Order,
        put: Put,
        tokens: Mapping[str, Callable[[int], object]],
        pictures: Sequence[Picture] = (),
    ) -> float:
        """Queue a request's texts, as `Intake.submit` does."""
        ...

    def abort(self, names: Iterable[str], *, deliver_last: bool = False) -> None:
        """End texts before the next step. Their last events are delivered only if `deliver_last` is set."""
        ...

    async def admit(self, key: Key, tokens: int) -> None:
        """Count long work as a waiting text of so many tokens, until `leave`."""
        ...

    def leave(self, key: Key, tokens: int) -> None:
        """Count work no longer that `admit` has counted."""
        ...

    async def store(self, key: Key, name: str, messages: bytes) -> None:
        """Store a conversation as JSON."""
        ...

    async def stored(self, key: Key, name: str) -> bytes:
        """Return a conversation that was stored."""
        ...

    async def operate(self, verb: Verb, *arguments: Any) -> int | None:
        """Do what an operator asks, with a verb of `jswa.frontend.operations`; return its result."""
        ...

    async def standing(self) -> Standing:
        """Return which weights the engine has, and whether it runs."""
        ...

    async def abort_named(self, name: str | None) -> int:
        """Abort the requests of a name, or all, in all processes; return their number."""
        ...

    async def view(self, edges: int) -> CacheView:
        """Return what the KV cache holds, with so many edges of the prefix tree."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics of all processes in Prometheus' text format."""
        ...

    async def info(self) -> Info:
        """Return the engine's part of /server_info."""
        ...

    async def start(self, front_end: FrontEnd) -> None:
        """Begin to serve the routes of this process."""
        ...

    async def close(self) -> None:
        """Stop."""
        ...

"""The engine as a front end's routes see it: in another process, at the other end of a socket."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jswa.cache.view import CacheView
from jswa.config import Limits
from jswa.errors import EngineDead, EngineRestarting, InternalError, JswaError
from jswa.frontend.engine_thread import State
from jswa.frontend.operations import Verb
from jswa.frontend.outputs import Receiver
from jswa.images.picture import Picture
from jswa.images.tokens import ImageInput
from jswa.types import SamplingParams

from ..core.counts import Report
from ..core.fairness import Key
from ..core.texts import Order
from ..engine.forms import Made
from ..engine.intake import Ids, Put
from ..engine.side import FrontEnd, Info, Shares, Standing
from ..http.errors import ApiError
from ..options import ServeConfig
from . import frames
from .channel import Channel, ProcessLost, api_error
from .leases import Leases

_log = logging.getLogger("jswa.server")
_REPORT_SECONDS = 0.25  # between two reports: what a front end has counted since the last one is lost with it


class EngineFacts(NamedTuple):
    """What a front end knows of the engine from its start."""

    limits: Limits
    has_forms: bool
    images: ImageInput | None = None


class RemoteEngine:
    """The engine in another process; see `EngineSide`.

    Attributes:
        on_drain, on_end: called when that process says so; `on_end` gets whether to end at once.
        on_lost: called when that process has ended.
    """

    def __init__(self, end: socket.socket, counter: int, facts: EngineFacts, config: ServeConfig) -> None:
        """Prepare to connect.

        Args:
            end: the socket to the other process.
            counter: the eventfd that counts the steps which this process has handled; see `Progress`.
        """
        self.limits = facts.limits
        self.images = facts.images
        self.state: State = "up"
        self.adapters: Sequence[str] = ()
        self.bodies: Shares = self._leases("bodies", config.max_body_memory)
        self.answers: Shares = self._leases("answers", config.max_answer_memory)
        self.on_drain: Callable[[], None] = lambda: None
        self.on_end: Callable[[bool], None] = lambda _: None
        self.on_lost: Callable[[], None] = lambda: None
        self._end = end
        self._counter = counter
        self._known = asyncio.Event()
        self._channel = Channel(frames.from_engine, self._answer, self._hear, self._lost, self._read)
        self._steps = 0  # handled, and not counted
        self._receivers: dict[int, Receiver] = {}
        self._front_end: FrontEnd | None = None
        self._reports: asyncio.Task[None] | None = None
        self._has_forms = facts.has_forms

    @property
    def failure(self) -> EngineDead | None:
        """The error for every request while the engine is dead or restarting; None while it is up."""
        if self.state == "restarting":
            return EngineRestarting("the engine has failed and is restarting")
        return EngineDead("the engine has failed") if self.state == "dead" else None

    @property
    def has_forms(self) -> bool:
        """Whether the model has a tokenizer. Raises ApiError if the other process has failed."""
        if self.failure is not None:
            raise ApiError.of(self.failure)
        return self._has_forms

    async def compile(self, question: bytes, delimiters: Collection[int], key: Key) -> Made:
        """Have a form compiled in the other process."""
        return await self._call(frames.Compile(question, sorted(delimiters), key), Made)

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
        """Queue a request's texts; return the seconds that they waited for programs."""
        numbers = [int(name) for name in names]
        for name, number in zip(names, numbers, strict=True):
            self._receivers[number] = Receiver(tokens[name], put)
        bodies = [prompt.astype(np.int32).tobytes() for prompt in prompts]
        seen = [frames.picture_out(picture) for picture in pictures]
        asked = frames.Submit(numbers, bodies, params, order.key, order.options, seen)
        try:
            return await self._call(asked, float)
        except BaseException:
            for number in numbers:
                self._receivers.pop(number, None)
            raise

    def abort(self, names: Iterable[str], *, deliver_last: bool = False) -> None:
        """End texts before the next step."""
        numbers = [number for name in names if (number := int(name)) in self._receivers]
        if not deliver_last:
            for number in numbers:
                del self._receivers[number]
        if numbers:
            self._channel.tell(frames.Abort(numbers, deliver_last))

    async def admit(self, key: Key, tokens: int) -> None:
        """Count long work as a waiting text."""
        await self._call(frames.Admit(key, tokens), type(None))

    def leave(self, key: Key, tokens: int) -> None:
        """Count work no longer that `admit` has counted."""
        self._channel.tell(frames.Leave(key, tokens))

    async def store(self, key: Key, name: str, messages: bytes) -> None:
        """Store a conversation."""
        self._channel.tell(frames.Store(key, name, messages))

    async def stored(self, key: Key, name: str) -> bytes:
        """Return a conversation that was stored."""
        return await self._call(frames.StoredConversation(key, name), bytes)

    async def operate(self, verb: Verb, *arguments: Any) -> int | None:
        """Do what an operator asks."""
        return await self._call(frames.Operate(verb, arguments), int | None)  # type: ignore[arg-type]  # a union

    async def standing(self) -> Standing:
        """Return which weights the engine has, and whether it runs."""
        return await self._call(frames.Ask("standing"), Standing)

    async def abort_named(self, name: str | None) -> int:
        """Abort the requests of a name, or all, of all front ends; return their number."""
        return await self._call(frames.Ask("abort_named", name), int)

    async def view(self, edges: int) -> CacheView:
        """Return what the KV cache holds, with so many edges of the prefix tree."""
        return frames.unpacked_view(await self._call(frames.Ask("view", edges), bytes))

    async def metrics(self) -> bytes:
        """Return the metrics of all front ends and of the engine."""
        return await self._call(frames.Ask("metrics"), bytes)

    async def info(self) -> Info:
        """Return the engine's part of /server_info."""
        return await self._call(frames.Ask("info"), Info)

    async def start(self, front_end: FrontEnd) -> None:
        """Connect to the other process, and wait until it has told its state."""
        self._front_end = front_end
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=self._end)
        await self._known.wait()
        self._reports = asyncio.ensure_future(self._count(front_end))

    def listens(self) -> None:
        """Tell the other process that this one listens."""
        self._channel.tell(frames.Ready())

    async def close(self) -> None:
        """Report for the last time, and disconnect."""
        if self._reports is not None:
            self._reports.cancel()
        if self._front_end is not None:
            self._channel.tell(frames.Counted(await self._front_end.report()))
        self._channel.close()

    async def _call[T](self, message: Any, kind: type[T]) -> T:
        """Ask the other process. Raises ApiError."""
        try:
            return await self._channel.call(message, kind)
        except ProcessLost as error:
            raise ApiError.of(EngineDead("the engine has failed")) from error

    def _leases(self, name: str, most: int) -> Leases:
        async def ask(key: Key, least: int, wanted: int) -> int:
            try:
                return await self._channel.call(frames.Claim(name, key, least, wanted), int)
            except ProcessLost:
                return 0

        return Leases(most, ask, lambda key, amount: self._channel.tell(frames.GiveBack(name, key, amount)))

    async def _count(self, front_end: FrontEnd) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            self._channel.tell(frames.Counted(await front_end.report()))

    async def _answer(self, message: Any) -> Report | int:
        assert self._front_end is not None
        if isinstance(message, frames.AbortNamed):
            return await self._front_end.abort_named(message.name)
        return await self._front_end.report()

    def _hear(self, message: Any) -> None:
        match message:
            case frames.StepFrame():
                self._step(message)
            case frames.Last(event):
                self._event(event)
            case frames.Failed(numbers, found):
                receivers = [self._receivers.pop(number) for number in numbers if number in self._receivers]
                for receiver in receivers[:1]:  # all of them are of one request
                    _end(receiver, api_error(found))
            case frames.Condition(state, adapters):
                self.state, self.adapters = state, adapters
                self._known.set()
            case frames.Drain():
                self.on_drain()
            case frames.End(now):
                self.on_end(now)

    def _step(self, step: frames.StepFrame) -> None:
        receivers = self._receivers
        numbers, tokens = np.frombuffer(step.numbers, np.int64), np.frombuffer(step.tokens, np.int32)
        by_text = tokens.reshape(-1, len(numbers)).T.tolist() if len(numbers) else []
        for number, some in zip(numbers.tolist(), by_text, strict=True):
            for token in some:
                receiver = receivers.get(number)
                if receiver is not None:
                    try:
                        receiver.token(token)
                    except Exception:
                        self._fail(number)
        for event in step.events:
            self._event(event)
        self._steps += len(tokens) // len(numbers) if len(numbers) else 1

    def _read(self) -> None:
        """Count the steps that are handled: once for all that came in one read."""
        if self._steps:
            os.eventfd_write(self._counter, self._steps)
            self._steps = 0

    def _event(self, event: frames.EventFrame) -> None:
        ends = event.finish_reason is not None
        receiver = self._receivers.get(event.number)
        if receiver is not None:
            try:
                receiver.event(frames.event_in(event))
            except Exception:
                self._fail(event.number)
            if ends:
                self._receivers.pop(event.number, None)

    def _fail(self, number: int) -> None:
        """End a text that cannot handle its events, while that error is handled: it harms no other text."""
        _log.exception("text %d cannot handle its events, and is aborted", number)
        receiver = self._receivers.pop(number)
        self._channel.tell(frames.Abort([number], deliver_last=False))
        _end(receiver, InternalError("the tokens of the request could not be handled"))

    def _lost(self) -> None:
        """End all requests: the engine's process has ended."""
        self.state = "dead"
        self._known.set()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            _end(receiver, EngineDead("the engine has failed"))
        self.on_lost()


def _end(receiver: Receiver, error: JswaError | ApiError) -> None:
    """Tell a text its error."""
    try:
        receiver.event(error)
    except Exception:
        _log.exception("a text cannot be told its error")

"""The engine's side of the front-end processes: runs their calls, and sends each the tokens of its requests."""

import asyncio
import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.errors import JswaError
from jswa.plan import StepEvents, TokenEvent

from ..core.counts import Counts, Load, Report, added
from ..core.fairness import Budget, Key
from ..core.texts import Order
from ..engine.local import LocalEngine
from ..http.errors import ApiError
from . import frames
from .channel import Channel, ProcessLost, problem
from .progress import Progress

_log = logging.getLogger("jswa.server")
_STUCK = 30.0  # seconds after which a front end that does not handle its steps counts as lost
_AHEAD = 4  # steps by which the engine may be ahead: it runs a few while its caches are warm, and is woken less often
_JOIN = 1e-3  # seconds for which a front end that has steps to handle may wait for the next one
_BITS = 40  # of a text's number
_LOW = 2**_BITS - 1


class RoutedTexts(NamedTuple):
    """The texts of a step that belong to one front end: their indices, and as int64 their numbers there."""

    at: Int[np.ndarray, " n"]
    numbers: bytes

    def of(self, tokens: Int[np.ndarray, " rows"]) -> bytes:
        """Return the tokens of these texts as int32."""
        return tokens.take(self.at).astype(np.int32, copy=False).tobytes()


_NOTHING = RoutedTexts(np.zeros(0, np.intp), b"")


class Hub:
    """All front ends of one engine.

    Args:
        lost: called when a front end is lost.
    """

    def __init__(self, engine: LocalEngine, lost: Callable[["Connection"], None] = lambda _: None) -> None:
        self.engine = engine
        self.lost = lost
        self.connections: dict[int, Connection] = {}
        self.places: dict[str, int] = {}  # of a text by its id in the engine: front end << _BITS | number there
        self._next = itertools.count(1)
        self._routes: tuple[list[str], dict[int, RoutedTexts]] = [], {}  # texts of the last step, and by front end
        engine.thread.ahead = _AHEAD
        engine.thread.readers = self
        engine.thread.on_state = self.tell_state

    async def connect(self, end: socket.socket, counter: int) -> "Connection":
        """Serve the front end at the other end of a socket, which adds the steps that it has handled to an eventfd."""
        number = next(self._next)
        connection = Connection(self, number, Progress(number, counter))
        connection.channel.socket = end
        self.connections = {**self.connections, number: connection}
        self.engine.front_ends.append(connection)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection.channel, sock=end)
        connection.tell_state()
        return connection

    def tell(self, message: Any) -> None:
        """Tell all front ends."""
        for connection in self.connections.values():
            connection.channel.tell(message)

    def tell_state(self) -> None:
        """Tell all front ends the state of the engine."""
        for connection in self.connections.values():
            connection.tell_state()

    def check(self) -> list["Connection"]:
        """Return the front ends that are stuck."""
        return [one for one in self.connections.values() if one.progress.late() > _STUCK]

    def drop(self, connection: "Connection") -> None:
        """Forget a front end that is lost: its requests end, and what it held is free."""
        if connection.number not in self.connections:
            return
        self.connections = {number: one for number, one in self.connections.items() if one is not connection}
        self._routes = [], {}
        self.engine.front_ends.remove(connection)
        self.engine.ended = added(self.engine.ended, connection.refusals())
        self.engine.add(Counts(numbers={"request_failed": connection.requests}))
        connection.end()
        self.lost(connection)

    def deliver(self, events: StepEvents) -> None:
        """Send each front end its part of a step, on the event loop."""
        names = events.request_ids.tolist()
        if names != self._routes[0]:  # mostly they are those of the step before
            self._routes = names, self._route(names)
        routes, others, now = self._routes[1], self._others(events), time.monotonic()
        for number in routes.keys() | others.keys():
            if (connection := self.connections.get(number)) is not None:
                connection.progress.sent(now)
                route = routes.get(number, _NOTHING)
                connection.channel.tell(
                    frames.StepFrame(route.numbers, route.of(events.tokens), others.get(number, []))
                )

    def send(self, events: StepEvents) -> bool:
        """Do so in the engine's thread, if the texts are those of the step before, and none begins or ends.

        A front end that has steps to handle gets several in one write, if the engine makes them fast.
        """
        names, routes = self._routes
        if events.others or not routes or events.request_ids.tolist() != names:
            return False
        connections, now = self.connections, time.monotonic()
        for number, route in routes.items():
            if (connection := connections.get(number)) is not None:
                connection.progress.sent(now)
                connection.channel.hold((route, events.tokens))
                if now - connection.progress.busy > _JOIN:
                    connection.flush(now)
        return True

    def wait(self, most: int) -> None:
        """Wait while a front end has more than `most` steps to handle, until it has a quarter as many."""
        late = [one for one in self.connections.values() if one.progress.behind > most]
        if late:
            self.flush()
        for one in late:
            one.progress.wait(most // 4)

    def flush(self) -> None:
        """Send what front ends have not got yet."""
        now = time.monotonic()
        for one in self.connections.values():
            one.flush(now)

    def _others(self, events: StepEvents) -> dict[int, list[frames.EventFrame]]:
        """Return the events of a step that are no tokens alone, by front end; forget the texts that end."""
        others: dict[int, list[frames.EventFrame]] = {}
        for event in events.others:
            if event.version is not None:  # see `Intake.submit`
                continue
            at = self.places.get(event.request_id, -1)
            self.engine.intake.begun(event.request_id)
            if event.finish_reason is not None:
                self.places.pop(event.request_id, None)
            if at >> _BITS in self.connections:
                others.setdefault(at >> _BITS, []).append(frames.event_out(event, at & _LOW))
                if event.finish_reason is not None:
                    self.connections[at >> _BITS].ended(at & _LOW)
        return others

    def _route(self, names: list[str]) -> dict[int, RoutedTexts]:
        """Return which of these texts each front end has; none for a front end that has none."""
        place = self.places.get
        found = np.array([place(name, -1) for name in names], np.int64)
        whose = found >> _BITS
        routes = {}
        for number in self.connections:
            at = (whose == number).nonzero()[0]
            if len(at):
                routes[number] = RoutedTexts(at, (found[at] & _LOW).tobytes())
        return routes


def _joined(parts: list[tuple[RoutedTexts, Int[np.ndarray, " n"]]]) -> frames.StepFrame:
    """Return the tokens of consecutive steps of the same texts, as `send` has held them, as one message."""
    return frames.StepFrame(parts[0][0].numbers, b"".join([route.of(tokens) for route, tokens in parts]), [])


class Connection:
    """One front end, as the engine asks it (`FrontEnd`), and what it holds."""

    def __init__(self, hub: Hub, number: int, progress: Progress) -> None:
        self.number = number
        self.progress = progress
        self.channel = Channel(frames.from_front_end, self._answer, self._hear, lambda: hub.drop(self), join=_joined)
        self.ready = asyncio.Event()
        self._hub = hub
        self._engine = hub.engine
        self._names: dict[int, str] = {}
        self._held: dict[str, Counter[Key]] = {"bodies": Counter(), "answers": Counter()}
        self._admitted: Counter[tuple[Key, int]] = Counter()
        self._load = Load()

    @property
    def requests(self) -> int:
        """Requests that it had at its last report."""
        return self._load.requests

    async def report(self) -> Report:
        """Return what it has counted since its last report."""
        report = await self.channel.call(frames.GetReport(), Report)
        self._load = report.load
        return report

    async def abort_named(self, name: str | None) -> int:
        """Abort requests by name, or all; return their number."""
        try:
            return await self.channel.call(frames.AbortNamed(name), int)
        except ProcessLost:
            return 0

    def refusals(self) -> Load:
        """Return the refusals that it has reported."""
        names = [name for name in Load.__struct_fields__ if name.endswith(("refused", "killed"))]
        return Load(**{name: getattr(self._load, name) for name in names})

    def tell_state(self) -> None:
        """Tell it the state of the engine."""
        self.channel.tell(frames.Condition(self._engine.state, list(self._engine.adapters)))

    def flush(self, now: float) -> None:
        """Send what it has not got yet, in the engine's thread; `now` is the time of `time.monotonic`."""
        if self.channel.holds:
            self.progress.busy = now
            self.channel.flush()

    def end(self) -> None:
        """End its requests, and release what it holds."""
        self._engine.abort(self._forget(self._names))
        for budget, held in self._held.items():
            for key, amount in held.items():
                self._budget(budget).release(key, amount)
        for (key, tokens), times in self._admitted.items():
            for _ in range(times):
                self._engine.leave(key, tokens)
        self.progress.end()

    def _budget(self, name: str) -> Budget:
        return self._engine.bodies if name == "bodies" else self._engine.answers

    def _forget(self, numbers: Any) -> list[str]:
        """Forget texts; return their ids in the engine."""
        found = [self._names.pop(number) for number in list(numbers) if number in self._names]
        for name in found:
            self._hub.places.pop(name, None)
        return found

    def ended(self, number: int) -> None:
        """Forget a text that has ended."""
        self._names.pop(number, None)

    def _abort(self, asked: frames.Abort) -> None:
        names = [self._names[number] for number in asked.numbers if number in self._names]
        if not asked.deliver_last:
            self._forget(asked.numbers)
        self._engine.abort(names, deliver_last=asked.deliver_last)

    def _hear(self, message: Any) -> None:
        match message:
            case frames.Abort():
                self._abort(message)
            case frames.GiveBack(budget, key, amount):
                self._held[budget][key] -= amount
                self._budget(budget).release(key, amount)
            case frames.Leave(key, tokens):
                self._admitted[key, tokens] -= 1
                self._engine.leave(key, tokens)
            case frames.Store(key, name, messages):
                self._engine.responses.put(key, name, messages)
            case frames.Counted(report):
                self._load = report.load
                self._engine.add(report.counts)
            case frames.Ready():
                self.ready.set()

    async def _answer(self, message: Any) -> Any:
        match message:
            case frames.Submit():
                return await self._submit(message)
            case frames.Claim(name, key, least, wanted):
                return self._claim(name, key, least, wanted)
            case frames.Admit(key, tokens):
                await self._engine.admit(key, tokens)
                self._admitted[key, tokens] += 1
                return None
            case frames.StoredConversation(key, name):
                return await self._engine.stored(key, name)
            case frames.Compile(question, delimiters, key):
                return await self._engine.compile(question, delimiters, key)
            case frames.Operate():
                return await self._operate(message)
            case frames.Ask():
                return await self._ask(message)
        raise ApiError(500, "internal error")

    async def _submit(self, asked: frames.Submit) -> float:
        order = Order(asked.key, asked.options)
        prompts = [np.frombuffer(prompt, np.int32) for prompt in asked.prompts]
        names = [f"{self.number}.{number}" for number in asked.numbers]
        numbers = dict(zip(names, asked.numbers, strict=True))
        self._names |= dict(zip(asked.numbers, names, strict=True))
        self._hub.places |= {name: self.number << _BITS | number for name, number in numbers.items()}

        def put(event: TokenEvent | JswaError) -> None:
            if isinstance(event, TokenEvent):
                number = numbers[event.request_id]
                self._forget([number])
                self.channel.tell(frames.Last(frames.event_out(event, number)))
                return
            self._engine.abort(self._forget(numbers.values()))  # the error of one text ends the request
            self.channel.tell(frames.Failed(asked.numbers, problem(ApiError.of(event))))

        try:
            pictures = [frames.picture_in(picture) for picture in asked.pictures]
            return await self._engine.submit(names, prompts, asked.params, order, put, pictures=pictures)
        except BaseException:
            self._forget(asked.numbers)
            raise

    def _claim(self, name: str, key: Key, least: int, wanted: int) -> int:
        budget = self._budget(name)
        for amount in (wanted, least):
            if budget.fits(key, amount):
                budget.hold(key, amount)
                self._held[name][key] += amount
                return amount
        return 0

    async def _operate(self, asked: frames.Operate) -> int | None:
        result = await self._engine.operate(asked.verb, *asked.arguments)
        if asked.verb in ("load_lora", "unload_lora"):
            self._hub.tell_state()
        return result

    async def _ask(self, asked: frames.Ask) -> Any:
        match asked.what:
            case "abort_named":
                assert not isinstance(asked.argument, int)
                return await self._engine.abort_named(asked.argument)
            case "view":
                assert isinstance(asked.argument, int)
                return frames.packed_view(await self._engine.view(asked.argument))
            case "metrics":
                return await self._engine.metrics()
            case "info":
                return await self._engine.info()
            case "standing":
                return await self._engine.standing()

"""A model checker for `pallas_kernels.ring`: every order in which warpgroups and copies can run, in plain Python.

A warpgroup is a list of steps, which the methods of `Ring` themselves record: `recording` puts a recorder in the place
of Mosaic's operations. `check` visits all states that these lists can reach, with as many copies under way as there
are, which land in any order. What it knows of the hardware:

    barrier    `num_arrivals` arrivals complete a phase. A warpgroup's n-th wait for a barrier passes if the parity of
               the number of completed phases is not that of n: one bit, which a barrier that runs on shows again.
    copy       writes its stage at any time after it is started, and arrives once when it has landed.
    read       lasts from its begin to its end: a WGMMA reads its stage until it is waited for.
    cluster    Thread blocks have barriers and stages of their own. An arrival at those of another one, or of several,
               takes its time, as a copy does. Nothing may land in a thread block that has ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from pallas_kernels import ring as ring_module
from pallas_kernels.mosaic import plgpu
from pallas_kernels.ring import Ring

Kind = Literal["wait", "arrive", "signal", "copy", "write", "read", "done"]
Barrier = tuple[str, int]


class Wrong(Exception):
    """A law of the ring is broken; the message says which, and what ran before."""


class Step(NamedTuple):
    """A step of a warpgroup: on a barrier, or on a stage's data of a turn; a copy on both. A signal arrives later."""

    kind: Kind
    barrier: Barrier = ("", 0)
    stage: tuple[str, int] = ("", 0)
    turn: int = 0


@dataclass
class Group:
    """A warpgroup and its steps."""

    steps: list[Step] = field(default_factory=list)


class _Barriers:
    """Stands for an array of barriers: `at[i]` is the i-th one's name."""

    def __init__(self, name: str) -> None:
        self.name, self.at = name, self

    def __getitem__(self, index: int) -> Barrier:
        return self.name, int(index)


@dataclass
class Model:
    """Warpgroups, and the arrivals that complete a phase of each barrier.

    Attributes:
        blocks: the thread blocks of a cluster. Names of their rings and warpgroups begin with theirs.
        parts: writes that make a stage whole, by ring.
    """

    blocks: tuple[str, ...] = ()
    groups: dict[str, Group] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    _now: str = ""
    _clustered: set[str] = field(default_factory=set)

    def ring(self, kind: type[Ring], stages: int, arrivals: int, name: str = "", **options: Any) -> Any:
        """Return a ring whose barriers are recorded; their numbers of arrivals are those of `Ring.scratch`."""
        types = kind.scratch(stages, arrivals, **options)
        # A part that thread blocks copy for each other comes in as many as there are.
        self.parts[name] = arrivals + max(0, len(self.blocks) - 1)
        fields = {}
        for barrier in ("ready", "consumed", "edges"):
            own = getattr(types, barrier)
            fields[barrier] = None if own is None else _Barriers(name + barrier)
            if own is not None:
                self.arrivals[name + barrier] = own.num_arrivals
        if self.blocks:
            self.arrivals[f"{name}ready"] = self.parts[name]
        if isinstance(types.consumed, plgpu.ClusterBarrier):
            self.arrivals[f"{name}consumed"] *= len(self.blocks)
            self._clustered.add(f"{name}consumed")
        return kind(types.stages, types.arrivals, **fields)

    @contextmanager
    def recording(self, group: str) -> Iterator[None]:
        """Record the steps of a warpgroup that are made inside."""
        self._now = group
        self.groups.setdefault(group, Group())
        fakes: dict[str, Any] = {
            "plgpu": SimpleNamespace(barrier_wait=self._wait, barrier_arrive=self.arrive),
            "pl": SimpleNamespace(when=lambda condition: lambda body: body() if condition else None),
            "lax": SimpleNamespace(rem=lambda a, b: a % b),
            "jnp": SimpleNamespace(minimum=min),
        }
        with patch.multiple(ring_module, **fakes):
            yield

    def _wait(self, barrier: Barrier) -> None:
        self._add(Step("wait", barrier))

    def arrive(self, barrier: Barrier, predicate: bool = True) -> None:
        """Record an arrival, or of a cluster's barrier one at each thread block."""
        if predicate and barrier[0] in self._clustered:
            for block in self.blocks:
                self._add(Step("signal", (f"{block}consumed", barrier[1]), ("signal", 0)))
        elif predicate:
            self._add(Step("arrive", barrier))

    def wait(self, barrier: Barrier) -> None:
        """Record a wait for a barrier that is of no ring."""
        self._wait(barrier)

    def copy(self, ring: Any, turn: int, barrier: Barrier, name: str = "", count: int | None = None) -> None:
        """Record copies of a turn: one for each arrival, or so many."""
        for _ in range(ring.arrivals if count is None else count):
            self._add(Step("copy", barrier, (name, turn % ring.stages), turn))

    def copy_for_all(self, ring: Any, turn: int) -> None:
        """Record the copy of a thread block's share of a part, which lands in all of the cluster."""
        for block in self.blocks:
            at = turn % ring.stages
            self._add(Step("copy", (f"{block}ready", at), (block, at), turn))

    def write(self, ring: Any, turn: int, name: str = "") -> None:
        """Record that the warpgroup itself writes or corrects a stage."""
        self._add(Step("write", stage=(name, turn % ring.stages), turn=turn))

    def read(self, ring: Any, turn: int, name: str = "", *, done: bool = True) -> None:
        """Record the begin of a read, and its end, unless it comes later."""
        self._add(Step("read", stage=(name, turn % ring.stages), turn=turn))
        if done:
            self.done(ring, turn, name)

    def done(self, ring: Any, turn: int, name: str = "") -> None:
        """Record the end of a read."""
        self._add(Step("done", stage=(name, turn % ring.stages), turn=turn))

    def _add(self, step: Step) -> None:
        self.groups[self._now].steps.append(step)


class _State(NamedTuple):
    """Where each warpgroup is; of each barrier completed phases and arrivals; data of stages; copies under way."""

    places: tuple[int, ...]
    barriers: tuple[tuple[Barrier, int, int], ...]
    data: tuple[tuple[tuple[str, int], int, int], ...]  # stage, turn, parts of it that are there
    copies: tuple[Step, ...]


def check(model: Model, most: int = 2_000_000) -> int:
    """Visit all states. Return their number. Raises Wrong if a law is broken in one of them."""
    names, programs = list(model.groups), [group.steps for group in model.groups.values()]
    first = _State((0,) * len(programs), (), (), ())
    came: dict[_State, tuple[_State, str] | None] = {first: None}
    left = [first]
    while left:
        state = left.pop()
        try:
            following = list(_following(model, names, programs, state))
            if not following:
                _end(names, programs, state)
        except Wrong as error:
            raise Wrong(f"{error}, after {' | '.join(_path(came, state))}") from None
        for event, new in following:
            if new not in came:
                came[new] = state, event
                left.append(new)
        if len(came) > most:
            raise OverflowError(f"more than {most} states")
    return len(came)


def _path(came: dict[_State, tuple[_State, str] | None], state: _State) -> list[str]:
    events = []
    while (step := came[state]) is not None:
        state, event = step
        events.append(event)
    return events[::-1]


def _end(names: list[str], programs: list[list[Step]], state: _State) -> None:
    """Check a state in which nothing can run: all have ended, and every phase has been observed by all that wait."""
    stuck = [
        f"{name} at {programs[index][place]}"
        for index, (name, place) in enumerate(zip(names, state.places, strict=True))
        if place < len(programs[index])
    ]
    if stuck:
        raise Wrong(f"no progress: {'; '.join(stuck)}")
    for barrier, phases, arrived in state.barriers:
        for steps in programs:
            waits = sum(step.kind == "wait" and step.barrier == barrier for step in steps)
            if waits not in (0, phases):
                raise Wrong(f"{barrier} has completed {phases} phases, of which {waits} were observed")
        if arrived:
            raise Wrong(f"{barrier} ends with {arrived} arrivals in a phase")


def _following(
    model: Model, names: list[str], programs: list[list[Step]], state: _State
) -> Iterator[tuple[str, _State]]:
    """Yield what can happen next, and the state after it."""
    _require_running(model, names, programs, state)
    for copy in sorted(set(state.copies)):
        copies = list(state.copies)
        copies.remove(copy)
        if copy.kind == "signal":
            yield "a signal lands", _arrived(model, state._replace(copies=tuple(copies)), copy.barrier)
            continue
        turn, parts = _data(state).get(copy.stage, (-1, 0))
        new = _with(state, copy.stage, copy.turn, parts + 1 if turn == copy.turn else 1)
        yield f"{copy.turn} lands", _arrived(model, new._replace(copies=tuple(copies)), copy.barrier)
    for index, steps in enumerate(programs):
        if state.places[index] == len(steps):
            continue
        step = steps[state.places[index]]
        ran = _run(model, programs, state, index, step)
        if ran is not None:
            places = tuple(place + (index == own) for own, place in enumerate(state.places))
            yield f"{names[index]}: {step.kind} {step.barrier[0]}{step.turn}", ran._replace(places=places)


def _run(model: Model, programs: list[list[Step]], state: _State, index: int, step: Step) -> _State | None:
    """Return the state after a step, or None if it has to wait."""
    if step.kind == "wait":
        waits = sum(
            old.kind == "wait" and old.barrier == step.barrier for old in programs[index][: state.places[index]]
        )
        phases = next((phases for barrier, phases, _ in state.barriers if barrier == step.barrier), 0)
        if phases % 2 == waits % 2:
            return None
        if phases != waits + 1:
            raise Wrong(f"wait {waits} for {step.barrier} passes at phase {phases}: its parity came again")
        return state
    if step.kind == "signal":
        return state._replace(copies=tuple(sorted([*state.copies, step])))
    if step.kind == "arrive":
        return _arrived(model, state, step.barrier)
    turn, parts = _data(state).get(step.stage, (-1, 0))
    if step.kind == "read":
        if (turn, parts) != (step.turn, model.parts[step.stage[0]]):
            raise Wrong(f"turn {step.turn} is read from {step.stage}, which has {parts} parts of turn {turn}")
        return state
    if step.kind == "done":
        return state
    _require_unread(programs, state, step)
    if step.kind == "write":
        return _with(state, step.stage, step.turn, model.parts[step.stage[0]])
    return state._replace(copies=tuple(sorted([*state.copies, step])))


def _require_running(model: Model, names: list[str], programs: list[list[Step]], state: _State) -> None:
    """Check that nothing is under way to a thread block whose warpgroups have all ended."""
    for block in model.blocks:
        ends = [place == len(steps) for place, steps in zip(state.places, programs, strict=True)]
        own = [ended for name, ended in zip(names, ends, strict=True) if name.startswith(block)]
        if all(own) and any(copy.barrier[0].startswith(block) for copy in state.copies):
            raise Wrong(f"something lands in thread block {block}when it has ended")


def _require_unread(programs: list[list[Step]], state: _State, step: Step) -> None:
    """Check that no earlier turn of the stage has yet to be read, and that nothing reads it now."""
    if any(copy.stage == step.stage and copy.turn != step.turn for copy in state.copies):
        raise Wrong(f"turn {step.turn} is written to {step.stage} while a copy of another turn is under way")
    for steps, place in zip(programs, state.places, strict=True):
        for late in steps[place:]:
            if late.kind == "done" and late.stage == step.stage and late.turn < step.turn:
                raise Wrong(f"turn {step.turn} is written to {step.stage} before turn {late.turn} has been read")
        begun = {old.turn for old in steps[:place] if old.kind == "read" and old.stage == step.stage}
        ended = {old.turn for old in steps[:place] if old.kind == "done" and old.stage == step.stage}
        if begun - ended:
            raise Wrong(f"{step.stage} is written while it is read")


def _data(state: _State) -> dict[tuple[str, int], tuple[int, int]]:
    return {stage: (turn, parts) for stage, turn, parts in state.data}


def _with(state: _State, stage: tuple[str, int], turn: int, parts: int) -> _State:
    data = {**_data(state), stage: (turn, parts)}
    return state._replace(data=tuple(sorted((own, *held) for own, held in data.items())))


def _arrived(model: Model, state: _State, barrier: Barrier) -> _State:
    held = {own: (phases, arrived) for own, phases, arrived in state.barriers}
    phases, arrived = held.get(barrier, (0, 0))
    whole = arrived + 1 == model.arrivals[barrier[0]]
    held[barrier] = (phases + 1, 0) if whole else (phases, arrived + 1)
    return state._replace(barriers=tuple(sorted((own, *counts) for own, counts in held.items())))

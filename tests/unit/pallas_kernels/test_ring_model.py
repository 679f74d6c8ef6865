"""The protocol of `Ring` in every order of its warpgroups and copies, as each kernel uses it; and wrong uses of it."""

from collections.abc import Callable
from typing import Any

import pytest

from pallas_kernels.ring import Ring
from tests.support.kernels.ring_model import Model, Wrong, check

DEPTHS = (1, 2, 3)


def producer(model: Model, ring: Any, turns: int, *, edges: bool = False) -> None:
    """Record a producer; with edges it corrects the first and the last turn, as that of attention does."""

    def correct(turn: int) -> None:
        model.wait(ring.producer_edge_barrier(turn))
        model.write(ring, turn)
        ring.producer_commit(turn)

    with model.recording("producer"):
        for turn in range(turns):
            ring.producer_acquire(turn)
            edge = edges and turn in (0, turns - 1)
            barrier = ring.producer_edge_barrier if edge else ring.producer_barrier
            model.copy(ring, turn, barrier(turn))
            if edges and turn == min(turns, ring.stages) - 1:
                correct(0)
        if edges and turns > 1:
            correct(turns - 1)


def reader(model: Model, ring: Any, turns: int, name: str) -> None:
    """Record a consumer that releases a stage in its own turn, as those of packed experts do."""
    with model.recording(name):
        for turn in range(turns):
            ring.consumer_wait(turn)
            model.read(ring, turn)
            ring.consumer_release(turn, turns)


def late_reader(model: Model, ring: Any, turns: int, name: str, tile: int) -> None:
    """Record a consumer whose product of a turn runs into the next one, as those of experts do: tile by tile."""
    with model.recording(name):
        for turn in range(turns):
            ring.consumer_wait(turn)
            model.read(ring, turn, done=False)
            if turn % tile:
                model.done(ring, turn - 1)
                ring.consumer_release(turn - 1, turns)
            if turn % tile == tile - 1:
                model.done(ring, turn)
                ring.consumer_release(turn, turns)


def unpacking_reader(model: Model, ring: Any, turns: int, name: str, tile: int, block: str = "") -> None:
    """Record a consumer that unpacks from the next turn before the products of this one are done, tile by tile.

    `block`: its thread block, in a cluster.
    """
    with model.recording(name):
        for turn in range(turns):
            if turn % tile == 0:
                ring.consumer_wait(turn)
            model.read(ring, turn, block, done=False)
            if turn % tile < tile - 1:
                ring.consumer_wait(turn + 1)
                model.read(ring, turn + 1, block)
            model.done(ring, turn, block)
            ring.consumer_release(turn, turns)


def ahead_reader(model: Model, ring: Any, turns: int, part: int) -> None:
    """Record a consumer of attention that forms the next scores meanwhile, by turns with the other consumer."""

    def schedule() -> None:
        model.arrive(("schedule", 0))
        model.wait(("schedule", 0))

    def output(turn: int) -> None:
        schedule()
        model.read(ring, turn)
        ring.consumer_release(turn, turns)

    model.arrivals["schedule"] = 2
    with model.recording(f"part {part}"):
        if part == 1:
            schedule()
        ring.consumer_wait(0)
        model.read(ring, 0)
        for turn in range(turns - 1):
            ring.consumer_wait(turn + 1)
            model.read(ring, turn + 1, done=False)
            schedule()
            output(turn)
            model.done(ring, turn + 1)
        schedule()
        output(turns - 1)
        if part == 0:
            schedule()


def experts(stages: int, turns: int, tile: int, consumers: int, read: Callable[..., None] = late_reader) -> Model:
    """Return the ring of experts of 16 bits, or of others whose consumers are recorded by `read`."""
    model = Model()
    ring = model.ring(Ring, stages, 2, consumers=consumers)
    producer(model, ring, turns)
    for consumer in range(consumers):
        read(model, ring, turns, f"consumer {consumer}", tile)
    return model


def plain(stages: int, turns: int, consumers: int, *, edges: bool = False, kind: type[Ring] = Ring) -> Model:
    """Return a ring whose consumers release in their own turn."""
    model = Model()
    ring = model.ring(kind, stages, 2, consumers=consumers, edges=edges)
    producer(model, ring, turns, edges=edges)
    for consumer in range(consumers):
        reader(model, ring, turns, f"consumer {consumer}")
    return model


def attention_ahead(stages: int, turns: int) -> Model:
    """Return the ring of attention with scores ahead, two consumers and edges."""
    model = Model()
    ring = model.ring(Ring, stages, 1, consumers=2, edges=True)
    producer(model, ring, turns, edges=True)
    for part in range(2):
        ahead_reader(model, ring, turns, part)
    return model


def attention_8_bits(stages: int, turns: int) -> Model:
    """Return the two rings of 8-bit pages: the producer is the only consumer of the first one, and refills it."""
    model = Model()
    stored, ring = model.ring(Ring, 2, 2, "stored "), model.ring(Ring, stages, 1, consumers=2)
    with model.recording("producer"):
        for turn in range(min(turns, stored.stages)):
            model.copy(stored, turn, stored.producer_barrier(turn), "stored ")
        for turn in range(turns):
            stored.consumer_wait(turn)
            ring.producer_acquire(turn)
            model.read(stored, turn, "stored ")
            model.write(ring, turn)
            ring.producer_commit(turn)
            after = turn + stored.stages
            if after < turns:
                model.copy(stored, after, stored.producer_barrier(after), "stored ")
    for consumer in range(2):
        reader(model, ring, turns, f"consumer {consumer}")
    return model


def cluster(
    stages: int, turns: int, tile: int, consumers: int, *, kind: type[Ring] = Ring, axis: str | None = "cluster",
    fewer: int = 0,
) -> Model:  # fmt: skip
    """Return the rings of two thread blocks of experts that copy the rows of both, and weights of their own.

    `fewer`: turns that the second one lacks.
    """
    model = Model(blocks=("a ", "b "))
    for block in model.blocks:
        own = turns - (fewer if block == "b " else 0)
        ring = model.ring(kind, stages, 2, block, consumers=consumers, cluster=axis)
        with model.recording(f"{block}producer"):
            for turn in range(own):
                ring.producer_acquire(turn)
                model.copy_for_all(ring, turn)
                model.copy(ring, turn, ring.producer_barrier(turn), block, count=ring.arrivals - 1)
        for consumer in range(consumers):
            unpacking_reader(model, ring, own, f"{block}consumer {consumer}", tile, block)
    return model


@pytest.mark.parametrize(
    ("stages", "turns", "tile", "consumers"),
    [(2, 1, 1, 1), (2, 3, 3, 1), (2, 4, 2, 1), (2, 2, 2, 2), pytest.param(3, 4, 4, 1, marks=pytest.mark.nightly)],
)
def test_every_order_of_a_cluster_keeps_the_laws(stages: int, turns: int, tile: int, consumers: int) -> None:
    """Thread blocks that run apart, arrivals that take their time, and ends at different times."""
    assert check(cluster(stages, turns, tile, consumers)) > turns


def attention_8_bits_alone(stages: int, turns: int, *, refills_early: bool = False) -> Model:
    """Return the ring of 8-bit pages whose only consumer casts each block into one stage, which nobody waits for."""
    model = Model()
    stored, ring = model.ring(Ring, stages, 2, "stored "), model.ring(Ring, 1, 1)

    def copy(turn: int) -> None:
        if turn < turns:
            model.copy(stored, turn, stored.producer_barrier(turn), "stored ")

    with model.recording("consumer"):
        for turn in range(stages):
            copy(turn)
        for turn in range(turns):
            stored.consumer_wait(turn)
            if refills_early:
                copy(turn + stages)
            model.read(stored, turn, "stored ")
            model.write(ring, turn)
            if not refills_early:
                copy(turn + stages)
            model.read(ring, turn)
    return model


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("stages", DEPTHS)
def test_every_order_keeps_the_laws(stages: int, turns: int) -> None:
    """Turns that are fewer than stages, and that go round them several times; parts land in any order."""
    assert check(plain(stages, turns, 2)) > turns
    assert check(plain(stages, turns, 1, edges=True)) > turns
    assert check(attention_8_bits(stages, turns)) > turns
    assert check(attention_8_bits_alone(stages, turns)) > turns
    assert check(plain(stages, turns, 2, edges=True)) > turns
    if stages > 1:
        assert check(experts(stages, 2 * turns, turns, 2)) > turns
        assert check(experts(stages, 2 * turns, turns, 2, unpacking_reader)) > turns


@pytest.mark.parametrize(("stages", "turns"), [(2, 2), (3, 1), (3, 5)])
def test_every_order_of_attention_ahead_keeps_the_laws(stages: int, turns: int) -> None:
    """Two consumers that wait for each other, so that one may be a turn behind."""
    assert check(attention_ahead(stages, turns)) > turns


@pytest.mark.parametrize(
    "make",
    [lambda: experts(1, 4, 4, 1), lambda: experts(1, 4, 4, 1, unpacking_reader), lambda: attention_ahead(2, 3)],
    ids=["one", "overlapping", "ahead"],
)
def test_too_few_stages_make_no_progress(make: Callable[[], Model]) -> None:
    """The law of progress: a turn that is held while the next is waited for takes a stage, and so does a turn behind.

    `plan.launch` of both kernels asks for these stages.
    """
    with pytest.raises(Wrong, match="no progress: producer"):
        check(make())


class NeverAcquires(Ring):
    """The producer refills without waiting."""

    def producer_acquire(self, turn: Any) -> None:
        """Wait for nothing."""


class AcquiresLate(Ring):
    """The producer begins to wait a ring too late, so that each wait sees the phase before its own."""

    def producer_acquire(self, turn: Any) -> None:
        """Leave one wait out."""
        if turn >= 2 * self.stages:
            super().producer_acquire(turn)


class AlwaysReleases(Ring):
    """Consumers release turns that nobody refills."""

    def consumer_release(self, turn: Any, turns: Any) -> None:
        """Forget how many turns there are."""
        super().consumer_release(turn, turns + self.stages)


class WaitsTwice(Ring):
    """A consumer takes the parity of the next phase."""

    def consumer_wait(self, turn: Any) -> None:
        """Wait for a phase too many."""
        super().consumer_wait(turn)
        if turn == 0:
            super().consumer_wait(turn)


class CommitsTooLittle(Ring):
    """The producer forgets an arrival of a stage that it has corrected."""

    def producer_commit(self, turn: Any) -> None:
        """Arrive once less."""
        Ring(self.stages, self.arrivals - 1, self.ready, self.consumed, self.edges).producer_commit(turn)


def released_early() -> Model:
    """A consumer that releases a stage which its product still reads."""
    model = Model()
    ring = model.ring(Ring, 2, 1, consumers=1)
    producer(model, ring, 4)
    with model.recording("consumer"):
        for turn in range(4):
            ring.consumer_wait(turn)
            model.read(ring, turn, done=False)
            ring.consumer_release(turn, 4)
            if turn:
                model.done(ring, turn - 1)
        model.done(ring, 3)
    return model


def read_early() -> Model:
    """A consumer that waits for the turn after it has begun to read."""
    model = Model()
    ring = model.ring(Ring, 2, 1, consumers=1)
    producer(model, ring, 3)
    with model.recording("consumer"):
        for turn in range(3):
            model.read(ring, turn, done=False)
            ring.consumer_wait(turn)
            model.done(ring, turn)
            ring.consumer_release(turn, 3)
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: plain(2, 4, 1, kind=NeverAcquires), "is written to .* (before turn|while a copy)"),
        (lambda: plain(2, 6, 1, kind=AcquiresLate), "is written to .* (before turn|while a copy)"),
        (lambda: plain(2, 3, 2, kind=AlwaysReleases), "of which .* were observed"),
        (lambda: plain(2, 4, 2, kind=WaitsTwice), "no progress|turn 0 is read"),
        (lambda: plain(2, 4, 1, edges=True, kind=CommitsTooLittle), "no progress"),
        (lambda: cluster(2, 4, 4, 1, axis=None), "is written to .* (before turn|while a copy)"),
        (lambda: cluster(2, 3, 3, 1, kind=NeverAcquires), "is written to .* (before turn|while a copy)"),
        (lambda: cluster(2, 4, 4, 1, kind=AlwaysReleases), "lands in thread block . when it has ended|were observed"),
        (lambda: cluster(2, 3, 3, 1, fewer=1), "no progress|when it has ended"),
        (lambda: attention_8_bits_alone(2, 4, refills_early=True), "is written to .* before turn 0 has been read"),
        (released_early, "is written (to .* before turn|while it is read)"),
        (read_early, "turn 0 is read from .* parts of turn -1"),
    ],
    ids=[
        *("no wait", "a wait too few", "a release too many", "wrong parity", "an arrival too few"),
        *("releases alone", "a cluster without waits", "a release after the end", "turns that differ"),
        *("refilled before the cast", "released", "read"),
    ],
)
def test_a_wrong_ring_is_found(make: Callable[[], Model], named: str) -> None:
    """With what is wrong, and the steps that lead there."""
    with pytest.raises(Wrong, match=named) as found:
        check(make())
    assert ", after " in str(found.value)

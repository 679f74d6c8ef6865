"""A ring of stages in shared memory between one producer and its consumers, and the protocol that they follow.

The producer is the warpgroup that fills stages: it starts asynchronous copies (TMA) into them, or writes them itself.
Consumers are the warpgroups that read them. Turns are numbered from 0, and go on across tiles if a thread block works
on several. With S stages, turn t uses stage t % S, and is phase t // S of that stage's barriers:

    ready      completes a phase after `arrivals` arrivals: one of each copy as its bytes land, or the producer's own
    consumed   completes a phase after one arrival of each consumer

Laws, of which each kernel keeps all. `tests/unit/pallas_kernels/test_ring_model.py` visits every order in which the
warpgroups of each kernel can run under them:

    fill       The producer fills turns in order, and causes exactly `arrivals` arrivals at ready[t % S] in turn t.
    wait       Each consumer waits for ready[t % S] exactly once in turn t, in order of turns. That is phase t // S,
               whose parity is (t // S) % 2. It reads the stage only after that.
    release    Each consumer arrives at consumed[t % S] exactly once in turn t, after its last read of the stage, if
               there is a turn t + S. If there is none, it does not arrive, since the phase would not be observed.
    refill     In turn t ≥ S the producer waits for consumed[t % S] exactly once before it fills the stage: for phase
               t // S - 1, whose parity is (t // S - 1) % 2. A stage may be refilled then, and no earlier.
    progress   If a consumer waits for turn t + h before it releases turn t, or waits for another consumer that does,
               then S > h. With fewer stages the producer and the consumers wait for each other for ever.
    cluster    Thread blocks of a cluster that copy parts of a stage for each other run the same turns. Such a part
               lands in the stage of each, and arrives at ready there. Each consumer arrives at consumed[t % S] of each
               thread block, so that this phase completes after the arrivals of all consumers of all of them: a stage
               is filled in none before it is free in all. Its warps meet before, since one of them arrives for all.
    edge       If the producer corrects the data of turn 0 or of the last turn, then that turn's copies arrive at
               edges[min(t, 1)] instead of ready[t % S]. The producer waits for that barrier once, corrects the stage,
               and makes all arrivals at ready[t % S] itself. It may fill later turns in between, but not turn t + S:
               no consumer releases the stage before it is ready.

It follows that no barrier completes a phase before all warpgroups that wait for it have observed the phase before, so
one bit of parity tells phases apart. Mosaic keeps that bit for each warpgroup and barrier, flips it with each wait, and
allows 32 barriers in an array; its interpreter raises an error if a phase is skipped or not observed.

A ring without `consumed` has a single consumer that is its producer too: it refills a stage after its last read.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import Ref, Scalar, plgpu

Turn = Scalar | int  # a test of the protocol counts on the host


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["ready", "consumed", "edges"],
    meta_fields=["stages", "arrivals"],
)
@dataclass(frozen=True)
class Ring:
    """The barriers of a ring: their types in a kernel's scratch, and references to them in its body.

    Method names are those of CUTLASS' pipelines.

    Attributes:
        stages: S.
        arrivals: arrivals at `ready` (and at `edges`) per turn.
        ready, consumed, edges: see the module.
    """

    stages: int
    arrivals: int
    ready: Ref
    consumed: Ref | None
    edges: Ref | None

    @classmethod
    def scratch(
        cls, stages: int, arrivals: int, *, consumers: int = 0, edges: bool = False, cluster: str | None = None
    ) -> "Ring":
        """Return the types of the barriers. Without `consumers` the only consumer refills the ring itself.

        `cluster`: the axis along which thread blocks copy parts of stages for each other.
        """
        consumed = plgpu.Barrier if cluster is None else partial(plgpu.ClusterBarrier, collective_axes=(cluster,))
        return cls(
            stages,
            arrivals,
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            consumed(num_arrivals=consumers, num_barriers=stages) if consumers else None,
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=2) if edges else None,
        )

    def stage(self, turn: Turn) -> Turn:
        """Return the stage that a turn uses."""
        return lax.rem(turn, self.stages)

    def producer_acquire(self, turn: Turn) -> None:
        """Wait until the turn's stage may be filled."""
        consumed = self.consumed
        assert consumed is not None
        pl.when(turn >= self.stages)(lambda: plgpu.barrier_wait(consumed.at[self.stage(turn)]))

    def producer_barrier(self, turn: Turn) -> Ref:
        """Return the barrier at which the turn's copies arrive."""
        return self.ready.at[self.stage(turn)]

    def producer_edge_barrier(self, turn: Turn) -> Ref:
        """Return the barrier at which the turn's copies arrive if the producer corrects their data."""
        assert self.edges is not None
        return self.edges.at[jnp.minimum(turn, 1)]

    def producer_commit(self, turn: Turn) -> None:
        """Make all arrivals of a turn whose data the producer has written or corrected."""
        for _ in range(self.arrivals):
            plgpu.barrier_arrive(self.producer_barrier(turn))

    def consumer_wait(self, turn: Turn) -> None:
        """Wait until the turn's data has arrived."""
        plgpu.barrier_wait(self.ready.at[self.stage(turn)])

    def consumer_release(self, turn: Turn, turns: Turn) -> None:
        """Let the producer refill the turn's stage, if one of the `turns` in all needs it again."""
        assert self.consumed is not None
        plgpu.barrier_arrive(self.consumed.at[self.stage(turn)], predicate=turn + self.stages < turns)

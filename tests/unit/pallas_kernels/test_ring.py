"""Tests of the ring of stages, interpreted: a producer and two consumers of several turns, without races."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import interpreter, mosaic
from pallas_kernels.mosaic import Ref, Scalar, plgpu
from pallas_kernels.ring import Ring

CONSUMERS, SIZE = 2, 128


def sum_of_turns(numbers: Float[Array, "turns size"], stages: int, *, edges: bool) -> Float[Array, "consumers size"]:
    """Return the sum of all turns by each consumer. With `edges` the producer doubles the first and the last turn."""
    turns = len(numbers)

    def produce(source: Ref, memory: Ref, ring: Ring) -> None:
        def correct(turn: int) -> None:
            plgpu.barrier_wait(ring.producer_edge_barrier(jnp.int32(turn)))
            stage = memory.at[turn % stages]
            stage[...] = stage[...] * 2
            plgpu.commit_smem()
            ring.producer_commit(jnp.int32(turn))

        @pl.loop(0, turns)
        def _turn(turn: Scalar) -> None:
            ring.producer_acquire(turn)
            target = memory.at[ring.stage(turn)]
            is_edge = edges & ((turn == 0) | (turn == turns - 1))
            edge_barrier = ring.producer_edge_barrier(turn) if edges else ring.producer_barrier(turn)
            pl.when(is_edge)(lambda: plgpu.copy_gmem_to_smem(source.at[turn], target, edge_barrier))
            pl.when(~is_edge)(lambda: plgpu.copy_gmem_to_smem(source.at[turn], target, ring.producer_barrier(turn)))
            if edges:
                pl.when(turn == min(turns, stages) - 1)(lambda: correct(0))

        if edges and turns > 1:
            correct(turns - 1)

    def consume(consumer: Scalar, memory: Ref, ring: Ring, staged: Ref, out: Ref) -> None:
        def step(turn: Scalar, total: Float[Array, " size"]) -> Float[Array, " size"]:
            ring.consumer_wait(turn)
            total = total + memory.at[ring.stage(turn)][...]
            plgpu.commit_smem()
            ring.consumer_release(turn, jnp.int32(turns))
            return total

        staged.at[consumer][...] = lax.fori_loop(0, turns, step, jnp.zeros(SIZE, jnp.float32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[consumer], out.at[consumer])
        plgpu.wait_smem_to_gmem(0)

    def body(source: Ref, out: Ref, *, memory: Ref, ring: Ring, staged: Ref) -> None:
        thread = lax.axis_index("thread")
        pl.when(thread < CONSUMERS)(lambda: consume(thread, memory, ring, staged, out))
        pl.when(thread == CONSUMERS)(lambda: produce(source, memory, ring))

    run = mosaic.kernel(
        body,
        name="sum_of_turns",
        outputs=[((CONSUMERS, SIZE), jnp.dtype(jnp.float32))],
        grid={"x": 1},
        num_threads=CONSUMERS + 1,
        scratch={
            "memory": plgpu.SMEM((stages, SIZE), jnp.float32),
            "ring": Ring.scratch(stages, 1, consumers=CONSUMERS, edges=edges),
            "staged": plgpu.SMEM((CONSUMERS, SIZE), jnp.float32),
        },
    )
    return run(numbers)[0]


@pytest.mark.parametrize(("turns", "stages", "edges"), [(7, 2, False), (2, 3, False), (6, 3, True), (1, 2, True)])
def test_each_consumer_sees_each_turn_once(turns: int, stages: int, edges: bool) -> None:
    """Whether stages are refilled or not, and corrected data is seen only after the correction."""
    numbers = np.random.default_rng(turns).standard_normal((turns, SIZE)).astype(np.float32)
    with interpreter.interpreted(detect_races=True):
        out = np.asarray(sum_of_turns(jnp.asarray(numbers), stages, edges=edges))
        assert not interpreter.races_found()
    if edges:
        numbers[[0, -1]] *= 2  # a single turn is both, and doubled once
    np.testing.assert_allclose(out, np.broadcast_to(numbers.sum(axis=0), (CONSUMERS, SIZE)), rtol=1e-5, atol=1e-5)

"""Interpret mode for the Hopper kernels: a simulation of TMA, barriers and warpgroups on a CPU, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


def interpreting() -> bool:
    """Return whether kernels that are traced now will be interpreted."""
    return _interpreting.get()


@contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Run kernels that are traced inside on the CPU. Uninitialised shared memory holds NaN.

    Each warpgroup blocks a thread of XLA's pool, which has one thread per core. On few cores a matrix product that
    waits for threads of its own never ends, unless the environment has PJRT_NPROC=8 before jax first runs.
    """
    from jax.experimental.pallas import mosaic_gpu  # here, since it takes 65 MB, which an engine on a CPU never needs

    plgpu: Any = mosaic_gpu  # only partly typed
    _module().reset_gpu_interpret_mode_state()  # an earlier failure leaves its state behind
    token = _interpreting.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield
    finally:
        _interpreting.reset(token)


def races_found() -> bool:
    """Return whether the last kernel that was interpreted with `detect_races` had a data race."""
    return bool(_module().get_races().races_found)


class Copy(NamedTuple):
    """A copy from global to shared memory.

    Attributes:
        block: the thread block within its cluster.
        source: the array that is copied from.
        where: what is copied, and to where.
    """

    block: int
    source: str
    where: str


@dataclass
class Copies:
    """The copies from global to shared memory that interpreted kernels have made; those of a thread block in order."""

    made: list[Copy]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.made)


@contextmanager
def counted_copies() -> Iterator[Copies]:
    """List the copies from global to shared memory of the kernels that are traced and interpreted inside."""
    callbacks, copies = _module().gpu_callbacks, Copies([])
    original = callbacks.copy_gmem_to_smem

    def copy(*arguments: Any, **options: Any) -> Any:
        source, into = (str(_tree_of_integers(options[f"{end}_transforms"])) for end in ("src", "dst"))
        key = str(options["src_allocation_key_as_array"])
        copies.made.append(Copy(int(options["thread"].block_id), key, f"{source} to {into}"))
        return original(*arguments, **options)

    callbacks.copy_gmem_to_smem = copy
    try:
        yield copies
    finally:
        callbacks.copy_gmem_to_smem = original


def _tree_of_integers(tree: Any) -> Any:
    import jax

    return jax.tree.map(int, tree)


def _module() -> Any:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # not exported in 0.11.2

    return interpret_pallas_call

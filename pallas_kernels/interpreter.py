"""Interpret mode for the Hopper kernels: a simulation of TMA, barriers and warpgroups on a CPU, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Copies:
    """The number of copies from global to shared memory that interpreted kernels have made."""

    count: int = 0


@contextmanager
def counted_copies() -> Iterator[Copies]:
    """Count the copies from global to shared memory of the kernels that are traced and interpreted inside."""
    callbacks, copies = _module().gpu_callbacks, Copies()
    original = callbacks.copy_gmem_to_smem

    def copy(*arguments: Any, **options: Any) -> Any:
        copies.count += 1
        return original(*arguments, **options)

    callbacks.copy_gmem_to_smem = copy
    try:
        yield copies
    finally:
        callbacks.copy_gmem_to_smem = original


def _module() -> Any:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # not exported in 0.11.2

    return interpret_pallas_call

"""Where the Hopper kernels of a test run."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from pallas_kernels import interpreter


@contextmanager
def hopper() -> Iterator[None]:
    """Kernels traced inside run on the GPU, if there is one; else simulated, and they must be free of races."""
    if jax.default_backend() == "gpu":
        yield
        return
    with interpreter.interpreted(detect_races=True):
        yield
        assert not interpreter.races_found()

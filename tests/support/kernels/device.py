"""The device on which tests run Hopper kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from pallas_kernels import interpreter


@contextmanager
def hopper() -> Iterator[None]:
    """Run kernels that are traced inside on the GPU, if there is one. Else interpret them: races are an error."""
    if jax.default_backend() == "gpu":
        yield
        return
    with interpreter.interpreted(detect_races=True):
        yield
        assert not interpreter.races_found()

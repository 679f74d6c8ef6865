"""The device on which tests run Hopper kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # not exported in 0.11.2
from jaxtyping import Float

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


def add_in_order(patch: pytest.MonkeyPatch) -> None:
    """Make interpreted WGMMAs of operands in shared memory add each output's products one after the other.

    The interpreter multiplies by numpy, whose order of additions follows from the sizes of the matrices.
    """
    names: dict[str, Any] = {name: getattr(np, name) for name in dir(np) if not name.startswith("_")}
    patch.setattr(gpu_callbacks, "np", SimpleNamespace(**names | {"matmul": _product}))


def _product(a: Float[np.ndarray, "M K"], b: Float[np.ndarray, "K N"], dtype: np.dtype) -> Float[np.ndarray, "M N"]:
    left, right = np.asarray(a, dtype), np.asarray(b, dtype)
    out = np.zeros((len(left), right.shape[1]), dtype)
    for k in range(len(right)):
        out += left[:, k, None] * right[k]
    return out

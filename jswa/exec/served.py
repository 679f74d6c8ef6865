"""What the chosen kernels serve of a model, and what they promise with its weights."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jswa.architecture import ModelConfig
from jswa.forms.base.names import linear_in_16_bits, matrices_on_xla
from jswa.kernels import Kernel, Kernels, ServedKernels
from jswa.model.binding import param_shapes
from jswa.model.fused_products import adds_experts
from jswa.model.fused_projection import require_served
from jswa.model.routing import require_routed
from pallas_kernels.errors import NoKernel
from pallas_kernels.experts.dense import fits
from pallas_kernels.sampling.api import MOST_TOKENS


def what_serves(model: ModelConfig, dtype: jnp.dtype, kv_dtype: jnp.dtype, *, plain: bool) -> ServedKernels:
    """Return what kernels can do with a model, as far as its config tells.

    Args:
        plain: whether all its dense matrices are held in `dtype`, and no adapter or drafter adds others.
    """

    def alone(kernels: Kernels) -> bool:
        """Whether they compute its rows alone. Panels of the CPU's library hold matrices in any form."""
        if kernels.linear == "cpu":
            return True
        shapes = param_shapes(model, dtype)
        fit = all(fits(*shapes[name].shape) for name in linear_in_16_bits(shapes))
        return plain and kv_dtype == dtype and fit and computes_rows_alone(kernels, shapes, model)

    return ServedKernels(lambda kernel: unserved(kernel, model, kv_dtype), alone)


def unserved(kernel: Kernel, model: ModelConfig, kv_dtype: jnp.dtype) -> str | None:
    """Return why a kernel cannot serve a model, as far as its config tells; None if it can, as far as that goes."""
    try:
        if kernel.operation == "elementwise" and kernel.name != "xla":
            require_served(model, "cpu" if kernel.name == "cpu" else "mosaic")
            if kernel.name == "cpu" and kv_dtype.itemsize == 1:
                return "writes no KV of 8 bits"
        if kernel.operation == "routing" and kernel.name == "triton":
            require_routed(model)
    except NoKernel as error:
        return str(error)
    if kernel.operation == "sampling" and kernel.name == "triton" and model.vocab_size > MOST_TOKENS:
        return f"takes a vocabulary of {MOST_TOKENS} tokens at most, and this one has {model.vocab_size}"
    return None


def computes_rows_alone(kernels: Kernels, params: Mapping[str, Any], model: ModelConfig) -> bool:
    """Return whether the numbers of a row depend on nothing else in its step: not on how many rows there are either.

    This is so if batch-invariant kernels add up all that is added along a row: the library of CPU kernels, or the
    kernels for Hopper, in a model whose experts elementwise kernels add. XLA does the rest number by number.
    """
    if not kernels.batch_invariant:
        return False
    if kernels.linear == "cpu":
        return not matrices_on_xla(params)
    added = all(layer.moe is None or adds_experts(layer.moe) for layer in model.layers)
    return added and kernels.sums != "xla" and not matrices_on_xla(params, "mosaic")

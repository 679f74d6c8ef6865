"""Grouped products on a CPU: the rows of each expert times its matrix, in panels or in MXFP4."""

import jax
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.cpu import library
from pallas_kernels.cpu.products import MXFP4, PRODUCT_TYPES, Panels, operands
from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts.groups import Groups
from pallas_kernels.experts.mxfp4 import Mxfp4


def grouped_products(
    x: Float[Array, "R K"], weights: Panels | Mxfp4, groups: Groups, bias: Float[Array, "E C"] | None
) -> Float[Array, "R C"]:
    """Return x · weights[e] + bias[e], added in float32 and rounded once; rows of no expert may hold anything.

    Raises NoLibrary, and NoExpertKernel for other types of x.
    """
    if x.dtype.name not in PRODUCT_TYPES:
        raise NoExpertKernel(f"implementation = 'cpu' takes no rows of {x.dtype}: must be one of {PRODUCT_TYPES}")
    library.digest()
    if isinstance(weights, Mxfp4):
        kind, arrays, columns = MXFP4, [weights.blocks, weights.scales], weights.blocks.shape[1]
    else:
        (kind, arrays), columns = operands(weights.weights), weights.outputs
    first, *rest = arrays
    shape = jax.ShapeDtypeStruct((len(x), columns), x.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_experts", shape)
    biases = [] if bias is None else [bias.astype(x.dtype)]
    starts, sizes = (array.astype(np.int32) for array in groups)
    out: Array = call(
        x, first, starts, sizes, *biases, *rest, kind=np.int64(kind), by_rows=kind == MXFP4, biased=bool(biases)
    )
    return out

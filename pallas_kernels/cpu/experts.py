"""Experts on a CPU: the rows of each one times its matrix, in panels or in MXFP4, or the whole of a mixture."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import library
from pallas_kernels.cpu.products import PRODUCT_TYPES, number_of
from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import Groups

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # by their numbers in src/types.h; behind them: with `alpha`


@runtime_checkable
class Operands(Protocol):
    """What the library reads of the matrices of experts: `Panels` or `Mxfp4`."""

    @property
    def columns(self) -> int:
        """C."""
        ...

    @property
    def by_rows(self) -> bool:
        """Whether outputs are rows."""
        ...

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the matrices are held, and their arrays."""
        ...


def grouped_products(
    x: Float[Array, "R K"], weights: Operands, groups: Groups, bias: Float[Array, "E C"] | None
) -> Float[Array, "R C"]:
    """Return x · weights[e] + bias[e], added in float32 and rounded once; rows of no expert may hold anything.

    Raises NoLibrary, and NoExpertKernel for other types of x.
    """
    if x.dtype.name not in PRODUCT_TYPES:
        raise NoExpertKernel(f"implementation = 'cpu' takes no rows of {x.dtype}: must be one of {PRODUCT_TYPES}")
    library.digest()
    kind, (first, *rest) = weights.operands()
    shape = jax.ShapeDtypeStruct((len(x), weights.columns), x.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_experts", shape)
    biases = [] if bias is None else [bias.astype(x.dtype)]
    starts, sizes = (array.astype(np.int32) for array in groups)
    out: Array = call(
        x, first, starts, sizes, *biases, *rest, kind=number_of(kind), by_rows=weights.by_rows, biased=bool(biases)
    )
    return out


def mixture(
    x: Float[Array, "T M"],
    chosen: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Operands,
    down: Operands,
    *,
    glu: Glu,
    biases: tuple[Float[Array, "E C"], Float[Array, "E M"]] | None = None,
    weight_on_input: bool = False,
) -> Float[Array, "T M"]:
    """Return the sum of each token's experts, weighted, in one call; a row depends on no other row.

    Results of both products are rounded to x's type; activation and sum are computed in float32.

    Args:
        chosen: a number that is no expert's counts for nothing.
        weights: of the experts' results, or with `weight_on_input` of what they read.
        gate_up: gates, then ups, of every expert.
        biases: of both products.

    Raises NoLibrary, and NoExpertKernel for other types of x.
    """
    if x.dtype.name not in PRODUCT_TYPES:
        raise NoExpertKernel(f"implementation = 'cpu' takes no rows of {x.dtype}: must be one of {PRODUCT_TYPES}")
    library.digest()
    columns, (up_kind, (up_first, *up_rest)) = gate_up.columns, gate_up.operands()
    down_kind, (down_first, *down_rest) = down.operands()
    pairs = chosen.size
    # Beside the result, room for the rows of the pairs, which XLA allocates and counts.
    shapes = x.shape, (pairs, x.shape[1]), (pairs, columns), (pairs, columns // 2)
    call = jax.ffi.ffi_call("jswa_mixture", [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes])  # type: ignore[no-untyped-call]
    added = [] if biases is None else [bias.astype(x.dtype) for bias in biases]
    out: Array = call(
        x,
        chosen.astype(jnp.int32),
        weights.astype(jnp.float32),
        up_first,
        down_first,
        *added,
        *up_rest,
        *down_rest,
        up_kind=number_of(up_kind),
        down_kind=number_of(down_kind),
        by_rows=gate_up.by_rows,
        biased=bool(added),
        weight_on_input=weight_on_input,
        **_unit(glu),
    )[0]
    return out


def gated(glu: Glu, gate_up: Float[Array, "T F2"]) -> Float[Array, "T F"]:
    """Return a gated linear unit of rows of gates, then ups, computed in float32; a row depends on no other row.

    Raises NoLibrary, and NoExpertKernel for other types.
    """
    if gate_up.dtype.name not in PRODUCT_TYPES:
        raise NoExpertKernel(f"a unit on a CPU takes no rows of {gate_up.dtype}: must be one of {PRODUCT_TYPES}")
    library.digest()
    shape = jax.ShapeDtypeStruct((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)  # type: ignore[no-untyped-call]
    out: Array = jax.ffi.ffi_call("jswa_gated", shape)(gate_up, **_unit(glu))
    return out


def _unit(glu: Glu) -> dict[str, Any]:
    """Return a unit as src/between_ffi.h reads it."""
    return {
        "activation": np.int64(len(_ACTIVATIONS) if glu.alpha is not None else _ACTIVATIONS.index(glu.activation)),
        "clamp": np.float32(np.inf if glu.clamp is None else glu.clamp),
        "alpha": np.float32(glu.alpha or 0.0),
    }

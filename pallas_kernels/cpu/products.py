"""Products with matrices in panels and with rows of an embedding.

Shape letters: T rows, K inputs, C outputs; P panels, PANEL outputs each, the last one padded; E leading axes.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int8, Shaped, UInt8

from pallas_kernels.cpu import library
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.int4 import Int4
from pallas_kernels.int8_groups import Int8GroupRows, Int8Groups
from pallas_kernels.quantized import Quantized, QuantizedRows

PANEL = 32  # outputs
QUAD = 4  # bytes of an output side by side: eight inputs of 4 bits, or four of 8
BLOCK = 32  # inputs that are rounded together where a matrix lies in quads
PRODUCT_TYPES = ("float32", "bfloat16", "float16")  # of x
_KINDS = (
    "numbers",
    "scaled",
    "codes",
    "codes_by_table",
    "mxfp4",
    "nvfp4",
    "grouped",
)  # by their numbers in src/types.h


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["outputs"])
@dataclass(frozen=True)
class Panels:
    """Weights whose matrices lie in panels, so that products read them as one stream.

    Attributes:
        weights: numbers [*E, P, K, PANEL]; or `Quantized` or `Int4` with such values or codes; or `Int4` with codes in
            quads [*E, P, K / 8, 4 · PANEL], and scales and zeros [*E, P, G, PANEL]; or `Nvfp4` with such codes and
            scales; or `Int8Groups` with such values or, with scales [*E, P, G, PANEL], quads [*E, P, K / 4, 4 · PANEL].
            What else they have per output lies as it is.
        outputs: C.
    """

    weights: Array | Quantized | Int4 | Nvfp4 | Int8Groups
    outputs: int

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in panels"

    @property
    def readers(self) -> tuple[str, ...]:
        """The library."""
        return ("cpu",)

    @property
    def columns(self) -> int:
        """C."""
        return self.outputs

    @property
    def by_rows(self) -> bool:
        """Outputs are no rows."""
        return False

    @property
    def native(self) -> bool:
        """The library multiplies."""
        return True

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the library reads the matrix, and its arrays."""
        return operands(self.weights)

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weights in x's type."""
        return matmul(x, self)

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """The library has no call for gates, ups and their unit: `experts.gated` computes the unit."""

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · weights in float32."""
        return matmul(x, self, jnp.dtype(jnp.float32))


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=[])
@dataclass(frozen=True)
class RowMajor:
    """An embedding that is the head too: with a row per output, which the library multiplies as it lies."""

    weights: Float[Array, "C K"] | QuantizedRows | Int8GroupRows

    def rows(self, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
        """Return rows by their indices, in `dtype` if they have 8 bits."""
        return self.weights[ids] if isinstance(self.weights, Array) else self.weights.rows(ids, dtype)

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · weightsᵀ in float32."""
        return matmul_rows(x, self.weights)


def panel_count(outputs: int) -> int:
    """Return P."""
    return -(-outputs // PANEL)


def to_panels(matrix: Shaped[np.ndarray, "*E K C"], out: Shaped[np.ndarray, "*E P K 32"]) -> None:
    """Lay a matrix out in panels; outputs beyond C become zeros."""
    whole, rest = divmod(matrix.shape[-1], PANEL)
    lead = matrix.shape[:-1]
    out[..., :whole, :, :] = matrix[..., : whole * PANEL].reshape(*lead, whole, PANEL).swapaxes(-3, -2)
    if rest:
        out[..., whole, :, :rest] = matrix[..., whole * PANEL :]
        out[..., whole, :, rest:] = 0


def fits_quads(inputs: int, groups: int, *, table: bool = False) -> bool:
    """Return whether the processor multiplies integers of 4 or 8 bits in quads.

    Args:
        inputs, groups: of the matrix.
        table: whether a table tells the group of each input.
    """
    return library.has_quads() and not table and inputs % (BLOCK * groups) == 0


def to_quads(codes: UInt8[np.ndarray, "*E half C"], out: UInt8[np.ndarray, "*E P Q 128"]) -> None:
    """Lay codes out in panels, four bytes of an output side by side; outputs beyond C become zeros."""
    columns = codes.shape[-1]
    panels, quads = out.shape[-3:-1]
    step = 16  # quads at a time, so that they stay in the processor's cache
    for index in np.ndindex(codes.shape[:-2]):
        words = out[index].view(np.uint32)
        for first in range(0, quads, step):
            part = codes[index][first * QUAD : (first + step) * QUAD]
            packed = np.zeros((len(part) // QUAD, panels * PANEL), np.uint32)
            for byte in range(QUAD):
                packed[:, :columns] |= part[byte::QUAD].astype(np.uint32) << np.uint32(8 * byte)
            words[:, first : first + step] = packed.reshape(-1, panels, PANEL).swapaxes(0, 1)


def to_byte_quads(values: Int8[np.ndarray, "*E K C"], out: Int8[np.ndarray, "*E P Q 128"]) -> None:
    """Lay values out in panels, four inputs of an output side by side; outputs beyond C become zeros.

    Of eight neighbouring inputs the even ones are in one quad and the odd ones in the next, as `to_quads` has them.
    """
    columns = values.shape[-1]
    panels, quads = out.shape[-3:-1]
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    step = 16  # quads at a time, so that they stay in the processor's cache
    for index in np.ndindex(values.shape[:-2]):
        for first in range(0, quads, step):
            part = values[index][first * QUAD : (first + step) * QUAD].reshape(-1, 8, columns)[:, order]
            padded = np.zeros((part.size // columns // QUAD, panels * PANEL, QUAD), np.int8)
            padded[:, :columns] = part.reshape(-1, QUAD, columns).swapaxes(1, 2)
            out[index][:, first : first + step] = padded.reshape(-1, panels, PANEL * QUAD).swapaxes(0, 1)


def operands(
    weights: Array | Quantized | QuantizedRows | Int4 | Nvfp4 | Int8Groups | Int8GroupRows,
) -> tuple[str, list[Array]]:
    """Return how the library reads a matrix, and its arrays: the matrix first."""
    return ("numbers", [weights]) if isinstance(weights, Array) else weights.operands()


def number_of(kind: str) -> np.int64:
    """Return the number by which the library knows how a matrix is held."""
    return np.int64(_KINDS.index(kind))


def matmul(x: Float[Array, "T K"], weights: Panels, dtype: jnp.dtype | None = None) -> Float[Array, "T C"]:
    """Return x · weights, added in float32 and rounded once to `dtype`, or x's. A row depends on no other row.

    Raises NoLibrary.
    """
    library.digest()
    kind, arrays = weights.operands()
    shape = jax.ShapeDtypeStruct((len(x), weights.outputs), dtype or x.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_product", shape)
    out: Array = call(x, *arrays, kind=number_of(kind), by_rows=False)
    return out


def matmul_rows(
    x: Float[Array, "T K"], weights: Float[Array, "C K"] | QuantizedRows | Int8GroupRows
) -> Float[Array, "T C"]:
    """Return x · weightsᵀ in float32, of a matrix with a row per output. A row depends on no other row.

    Groups of inputs must be whole blocks of `BLOCK`. Raises NoLibrary.
    """
    library.digest()
    kind, arrays = operands(weights)
    shape = jax.ShapeDtypeStruct((len(x), len(arrays[0])), jnp.float32)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("jswa_product", shape)
    out: Array = call(x, *arrays, kind=number_of(kind), by_rows=True)
    return out

"""The matrices of a mixture's experts as grouped products read them: what each form tells of itself.

A form's record is beside its numbers (`pallas_kernels.quantized`, `int4`, `mxfp4`, …); a bare array is `PlainStack`.
Besides what `Stack` has, a record has what its readers ask for: `api.Widened`, `cpu.experts.Operands`,
`hopper.launch.OnHopper`.

Shape letters: E experts, K inputs, C columns.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.errors import NoExpertKernel


@runtime_checkable
class Stack(Protocol):
    """The matrices of all experts in one form."""

    @property
    def form(self) -> str:
        """What to call it in an error, such as "of 8 bits"."""
        ...

    @property
    def readers(self) -> tuple[str, ...]:
        """The implementations that read it, those for tests aside."""
        ...


class PlainStack(NamedTuple):
    """Matrices in the type of the rows, or only their shape and type."""

    values: Float[Array, "E K C"]

    @property
    def form(self) -> str:
        """Their type."""
        return f"in {self.values.dtype}"

    @property
    def readers(self) -> tuple[str, ...]:
        """All that need no layout of their own."""
        return "xla", "mosaic", "triton"

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return "plain"

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.values.shape[1])

    @property
    def columns(self) -> int:
        """C."""
        return int(self.values.shape[2])

    def product(
        self, x: Float[Array, "R K"], index: Int[Array, ""] | int, precision: lax.PrecisionLike
    ) -> Float[Array, "R C"]:
        """Return x · the matrix of an expert in x's type."""
        return jnp.matmul(x, self.values[index].astype(x.dtype), precision=precision)

    def numbers(self) -> Float[Array, "E K C"]:
        """Return the matrices in float32."""
        out: Array = self.values.astype(jnp.float32)
        return out


def stack_of(weights: Any) -> Any:
    """Return the record of weights: a bare array, or its shape and type, is a `PlainStack`."""
    plain: bool = isinstance(weights, Array | jax.ShapeDtypeStruct)
    return PlainStack(weights) if plain else weights


def read_by(implementation: str, weights: Any) -> Any:
    """Return the record of weights that an implementation reads. Raises NoExpertKernel if it does not read this form.

    "reference" reads what "xla" does.
    """
    stack = stack_of(weights)
    if ("xla" if implementation == "reference" else implementation) not in stack.readers:
        others = " or ".join(map(repr, stack.readers))
        raise NoExpertKernel(f"implementation = {implementation!r} takes no weights {stack.form}: must be {others}")
    return stack

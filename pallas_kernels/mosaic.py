"""The operations that the Hopper kernels use of Pallas Mosaic GPU, whose API moves with each JAX release (here 0.11.2).

Kernels reach the rest of that API as `plgpu`. The interpreter has no rule for a WGMMA whose left operand or accumulator
lies in registers, and none for optimization barriers: `accumulate`, `settled`, and the main loop and the operands of
`experts.hopper.overlap` are the only places in which the interpreted source differs from the compiled one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.interpreter import interpreting

plgpu: Any = mosaic_gpu  # only partly typed
Ref = Any  # a reference to GMEM, SMEM or a barrier
Scalar = Int[Array, ""]

REDUCTION_BYTES = 1_024  # of shared memory, enough for sums over the warps of a warpgroup
_LAYOUT = plgpu.Layout.WGMMA


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    outputs: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    grid: dict[str, int],
    num_threads: int,
    scratch: Mapping[str, Any],
    reduction_scratch_bytes: int = 0,
    cluster: Mapping[str, int] | None = None,
) -> Callable[..., list[Array]]:
    """Return a kernel of `num_threads` warpgroups (axis "thread") per thread block.

    The body is called with references to the operands and the outputs, and with the scratch by keyword. Exponentials,
    logarithms and tanh take one instruction each (`approx_math`), with relative errors of about 2^-22, and 2^-11 for
    tanh.

    Args:
        outputs: shape and type of each output.
        grid: names and sizes of the grid's axes; the last one runs fastest.
        scratch: shared memory and barriers, as trees of Pallas' types.
        reduction_scratch_bytes: shared memory for sums over several warps; 0, since the rows of a WGMMA's result lie
            within a warp.
        cluster: names and sizes of the axes of a cluster of thread blocks, of which the grid is then made.
    """
    run: Callable[..., list[Array]] = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*output) for output in outputs],  # type: ignore[no-untyped-call]
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple((cluster or {}).values()),
        cluster_names=tuple(cluster or {}),
        num_threads=num_threads,
        thread_name="thread",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=reduction_scratch_bytes,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    return run


def in_place(
    body: Callable[..., None],
    *,
    name: str,
    outputs: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    grid: dict[str, int],
) -> Callable[..., list[Array]]:
    """Return a kernel of one warpgroup per thread block, without shared memory, whose operands may be `jax.Ref`s.

    It may write to those: the array is updated in place if nothing else reads it. See `kernel`.
    """
    mesh = plgpu.Mesh(
        grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=1, thread_name="thread", kernel_name=name
    )
    semantics = plgpu.LoweringSemantics.Warpgroup
    run: Callable[..., list[Array]] = pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*output) for output in outputs],  # type: ignore[no-untyped-call]
        mesh=mesh,
        name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES, lowering_semantics=semantics
        ),
    )
    return run


def tiled(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int) -> Any:
    """Return the type of shared memory that WGMMA can read: its last two axes in tiles of 8 rows by `swizzle` bytes."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def full(shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
    """Return a float32 constant in the registers of a warpgroup: the 64 rows of an accumulator, or a number per row."""
    out: Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _layout(shape))
    return out


def iota(shape: tuple[int, ...], axis: int, *, upcast: bool = False) -> Int[Array, "..."]:
    """Return indices along an axis, in the registers that `full` uses, or if `upcast` those of `load_upcast`."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X if upcast else _layout(shape)
    out: Array = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
    return out


def load(ref: Ref) -> Float[Array, "M N"]:
    """Load shared memory into the registers that `full` uses. M must be a multiple of 64."""
    out: Array = plgpu.load(ref, layout=_LAYOUT)
    return out


def load_upcast(ref: Ref, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """Load 8-bit numbers, four neighbours to a register, and cast them to 16 bits. M must be a multiple of 64."""
    out: Array = plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype)
    return out


def rows_to_columns(values: Num[Array, " M"], columns: int) -> Num[Array, "M columns"]:
    """Repeat the number of each row along the row."""
    return lax.broadcast_in_dim(values, (values.shape[0], columns), [0])


def product_and[T](a: Ref, b: Ref, meanwhile: Callable[[], T]) -> tuple[Float[Array, "M N"], T]:
    """Return a · bᵀ in float32, of shared memory [M, D] and [N, D], and the result of `meanwhile`.

    `meanwhile` runs while the tensor cores work on the product.
    """

    def multiply(total: Ref) -> tuple[Array, T]:
        plgpu.wgmma(total, a, b.T)
        result = meanwhile()
        return total[...], result

    out: tuple[Array, T] = pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))
    return out


def accumulate(total: Float[Array, "M N"], a: Float[Array, "M K"], b: Ref) -> Float[Array, "M N"]:
    """Return total + a · b, of `a` in registers and `b` [K, N] in shared memory."""
    if interpreting():
        out = total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # this read is an ordinary one, which a copy may overtake; a WGMMA's is not
    else:
        out = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(total))
    return out


def settled(*values: Array) -> tuple[Array, ...]:
    """Return the values, computed before the code that follows: compilers move arithmetic past waits for barriers."""
    if interpreting():
        return values  # the interpreter keeps the order anyway
    out: tuple[Array, ...] = lax.optimization_barrier(values)  # type: ignore[no-untyped-call]
    return out


def _layout(shape: tuple[int, ...]) -> Any:
    return _LAYOUT if len(shape) == 2 else _LAYOUT.reduce(1)

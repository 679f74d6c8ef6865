"""Tests of the CPU's products against float64, for every way in which a matrix is held."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from pallas_kernels import int4, int8_groups
from pallas_kernels.cpu import library
from pallas_kernels.cpu.products import PANEL, QUAD, Panels, matmul, matmul_rows
from pallas_kernels.experts.api import grouped_matmul
from pallas_kernels.experts.groups import group_rows
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.experts.nvfp4 import dequantized as nvfp4_dequantized
from pallas_kernels.int4 import Int4
from pallas_kernels.int8_groups import Int8GroupRows, Int8Groups
from pallas_kernels.quantized import Kind, Quantized, QuantizedRows, dequantized, quantize, quantize_rows
from tests.support.kernels.grouped_calls import in_panels

pytestmark = pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not built")

Weights = Array | Quantized | Int4 | Int8Groups
KINDS = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "fp8",
    "4 bits",
    "4 bits, bfloat16 scales",
    "4 bits, act-order",
    "4 bits, widened",
    "int8 groups",
    "int8 groups, widened",
)
SHAPES = ((64, 32), (2050, 33), (30, 100), (512, 7), (1088, 72))  # inputs, outputs
ROWS = (1, 2, 3, 5, 8, 9, 12, 13, 40, 100, 600)


@dataclass(frozen=True)
class Held:
    """A matrix [*E, K, C] as it is held, and its numbers in float64 where products are added in a type."""

    weights: Weights
    panels: Panels
    numbers: Float[np.ndarray, "..."]


def held(kind: str, shape: tuple[int, ...], dtype: str) -> Held:
    """Return a random matrix whose products with rows of `dtype` are tested."""
    rng = np.random.default_rng(sum(shape))
    inputs = shape[-2]
    plain = rng.standard_normal(shape) * inputs**-0.5
    if kind in ("float32", "bfloat16", "float16"):
        matrix = jnp.asarray(plain, kind)
        return Held(matrix, in_panels(matrix), np.asarray(matrix.astype(jnp.float32), np.float64))
    if kind in ("int8", "fp8"):
        name: Kind = "int8" if kind == "int8" else "fp8"
        weights = quantize(jnp.asarray(plain, jnp.float32), name)
        return Held(weights, in_panels(weights), np.asarray(dequantized(weights, jnp.dtype(jnp.float32)), np.float64))
    groups = 5 if inputs % 5 == 0 else 2
    if "int8 groups" in kind:
        return held_groups(kind, shape, groups)
    codes = rng.integers(0, 256, (*shape[:-2], inputs // 2, shape[-1]), np.uint8)
    scales = jnp.asarray(rng.uniform(0.5, 1, (*shape[:-2], groups, shape[-1])) * inputs**-0.5 / 5)
    zeros = jnp.asarray(rng.integers(0, 17, scales.shape), jnp.uint8)
    table = jnp.asarray(rng.integers(0, groups, (*shape[:-2], inputs)), jnp.int32) if "act-order" in kind else None
    packed = Int4(jnp.asarray(codes), scales.astype("bfloat16" if "bfloat16" in kind else "float16"), zeros, table)
    panels = in_panels(packed, quads="widened" not in kind)
    # In quads, weights are not rounded to the type of x.
    whole = partial(int4.dequantized, dtype=jnp.dtype("float32" if in_quads(panels) else dtype))
    numbers = jax.vmap(whole)(packed) if len(shape) == 3 else whole(packed)
    return Held(packed, panels, np.asarray(numbers.astype(jnp.float32), np.float64))


def held_groups(kind: str, shape: tuple[int, ...], groups: int) -> Held:
    """Return a random matrix in int8 with group scales; each has the least and the largest value."""
    rng = np.random.default_rng(sum(shape))
    values = rng.integers(-128, 128, shape, np.int8)
    values[..., 0, :], values[..., -1, :] = -128, 127
    scales = rng.uniform(0.5, 1, (*shape[:-2], groups, shape[-1])) * shape[-2] ** -0.5 / 70
    matrix = Int8Groups(jnp.asarray(values), jnp.asarray(scales, "float16"))
    panels = in_panels(matrix, quads="widened" not in kind)
    whole = partial(int8_groups.dequantized, dtype=jnp.dtype("float32"))  # no weight is rounded to the type of x
    numbers = jax.vmap(whole)(matrix) if len(shape) == 3 else whole(matrix)
    return Held(matrix, panels, np.asarray(numbers, np.float64))


def in_quads(panels: Panels) -> bool:
    first = jax.tree.leaves(panels.weights)[0]
    return bool(first.shape[-1] == QUAD * PANEL)


def check(out: Array, x: Array, numbers: Float[np.ndarray, "K C"], *, quads: bool = False) -> None:
    """Assert that a product is exact but for its sums in float32 and one rounding.

    `quads`: of x in bfloat16, numbers below 1/64 of the largest of their 32 inputs are rounded too.
    """
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    sums = np.abs(wide) @ np.abs(numbers)
    unit = float(jnp.finfo(out.dtype).eps) / 2  # type: ignore[no-untyped-call]
    allowed = (2.0**-24 * np.sqrt(len(numbers)) * 4 + 2.0**-22) * sums + unit * np.abs(wide @ numbers) + 1e-7
    if quads and x.dtype == jnp.bfloat16:
        blocks = np.abs(wide).reshape(len(wide), -1, 32)
        largest = blocks.max(-1, keepdims=True)
        allowed += (2.0**-15 * largest * (blocks < largest / 64)).reshape(wide.shape) @ np.abs(numbers)
    found = np.asarray(out.astype(jnp.float32), np.float64)
    worst = np.nan_to_num(np.abs(found - wide @ numbers) / allowed, nan=np.inf).max()
    assert worst <= 1, f"{worst:.3g} times what rounding may do"


# Each kind, and each type, in every run.
TYPES = [
    pytest.param(kind, dtype, marks=[] if (number + other) % 3 == 0 else [pytest.mark.nightly])
    for number, kind in enumerate(KINDS)
    for other, dtype in enumerate(("float32", "bfloat16", "float16"))
]


@pytest.mark.parametrize(("kind", "dtype"), TYPES)
def test_products_are_exact_and_rows_do_not_see_each_other(kind: str, dtype: str, subtests: pytest.Subtests) -> None:
    """For all numbers of rows. A row has equal bits alone, among others and again."""
    rng = np.random.default_rng(3)
    for inputs, outputs in SHAPES:
        one = held(kind, (inputs, outputs), dtype)
        panels = one.panels
        x = jnp.asarray(rng.standard_normal((max(ROWS), inputs)), dtype)
        whole = matmul(x, panels)
        check(whole, x, one.numbers, quads=in_quads(panels))
        for rows in ROWS:
            with subtests.test(f"{rows} rows, {inputs} inputs, {outputs} outputs"):
                for some in (x[:rows], x[max(ROWS) - rows :]):
                    first = 0 if some is x[:rows] else max(ROWS) - rows
                    out = matmul(some, panels)
                    assert out.dtype == jnp.dtype(dtype)
                    same = np.asarray(whole)[:rows] if np.array_equal(some, x[:rows]) else np.asarray(whole)[-rows:]
                    np.testing.assert_array_equal(np.asarray(out), same, err_msg=str(first))
        wide = matmul(x[:3], panels, jnp.dtype(jnp.float32))
        np.testing.assert_array_equal(wide.astype(dtype), whole[:3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "fp8"])
def test_embeddings_are_heads(kind: str, dtype: str) -> None:
    """The result is float32; a row has equal bits alone and among others."""
    rng = np.random.default_rng(4)
    for inputs, outputs in ((64, 32), (2050, 33), (31, 100), (512, 257)):
        plain = jnp.asarray(rng.standard_normal((outputs, inputs)), jnp.float32)
        weights: Array | QuantizedRows = plain.astype(kind) if "float" in kind else plain
        numbers = np.asarray(weights, np.float64)
        if kind in ("int8", "fp8"):
            name: Kind = "int8" if kind == "int8" else "fp8"
            weights = quantize_rows(plain, name)
            numbers = np.asarray(dequantized(quantize(plain.T, name), jnp.dtype(jnp.float32)), np.float64).T
        x = jnp.asarray(rng.standard_normal((40, inputs)), dtype)
        whole = matmul_rows(x, weights)
        assert whole.dtype == jnp.float32
        check(whole, x, numbers.T)
        for rows in (1, 2, 3, 4, 5, 11):
            np.testing.assert_array_equal(matmul_rows(x[-rows:], weights), whole[-rows:])


@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embeddings_in_groups_are_heads(scales: str, dtype: str) -> None:
    """No weight is rounded; a row has equal bits alone and among others."""
    rng = np.random.default_rng(6)
    for inputs, outputs, size in ((64, 32, 32), (2048, 33, 128), (576, 100, 32), (96, 257, 96)):
        values = rng.integers(-128, 128, (outputs, inputs), np.int8)
        values[:, 0], values[:, -1] = -128, 127
        factors = jnp.asarray(rng.uniform(0.5, 1, (outputs, inputs // size)) * inputs**-0.5 / 70, scales)
        weights = Int8GroupRows(jnp.asarray(values), factors)
        numbers = np.asarray(int8_groups.dequantized_rows(weights, jnp.dtype("float32")), np.float64)
        x = jnp.asarray(rng.standard_normal((40, inputs)), dtype)
        whole = matmul_rows(x, weights)
        assert whole.dtype == jnp.float32
        check(whole, x, numbers.T)
        for rows in (1, 2, 3, 4, 5, 11):
            np.testing.assert_array_equal(matmul_rows(x[-rows:], weights), whole[-rows:])


def test_rows_in_parts_of_blocks_are_refused() -> None:
    """The kernel reads whole blocks of a group."""
    weights = Int8GroupRows(jnp.zeros((8, 96), jnp.int8), jnp.zeros((8, 2), jnp.float16))
    with pytest.raises(jax.errors.JaxRuntimeError, match="quads and rows need groups of neighbouring blocks"):
        matmul_rows(jnp.zeros((1, 96)), weights).block_until_ready()


def nvfp4(inputs: int, outputs: int) -> tuple[Panels, Float[np.ndarray, "K C"]]:
    """Return a random matrix in NVFP4 with scales of all values but NaN, and its numbers."""
    rng = np.random.default_rng(inputs)
    codes = rng.integers(0, 256, (inputs // 2, outputs), np.uint8)
    scales = rng.integers(0, 0x7F, (inputs // 16, outputs)) | rng.integers(0, 2, (inputs // 16, outputs)) << 7
    factors = rng.uniform(1e-4, 2e-4, outputs)
    held = Nvfp4(jnp.asarray(codes), jnp.asarray(scales, jnp.uint8), jnp.asarray(factors, jnp.float32))
    return in_panels(held), np.asarray(nvfp4_dequantized(held, jnp.dtype(jnp.float32)), np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_with_nvfp4_are_exact_and_rows_do_not_see_each_other(dtype: str) -> None:
    """No weight is rounded, whatever the type of x; a row has equal bits alone and among others."""
    rng = np.random.default_rng(7)
    for inputs, outputs in ((64, 32), (2064, 33), (48, 100), (512, 7), (16, 1)):
        panels, numbers = nvfp4(inputs, outputs)
        x = jnp.asarray(rng.standard_normal((max(ROWS), inputs)), dtype)
        whole = matmul(x, panels)
        assert whole.dtype == jnp.dtype(dtype)
        check(whole, x, numbers)
        for rows in ROWS:
            np.testing.assert_array_equal(matmul(x[-rows:], panels), whole[-rows:])
        wide = matmul(x[:3], panels, jnp.dtype(jnp.float32))
        np.testing.assert_array_equal(wide.astype(dtype), whole[:3])


def test_each_code_at_each_scale_of_nvfp4_is_exact() -> None:
    """One of x's inputs is 1, so that a product is a weight: NaN where the scale is."""
    scales = np.arange(256, dtype=np.uint8)[None]
    codes = np.broadcast_to((np.arange(8, dtype=np.uint8) * 0x22 + 0x10)[:, None], (8, 256))
    held = Nvfp4(jnp.asarray(codes), jnp.asarray(scales), jnp.full(256, 1 / 3, jnp.float32))
    out = matmul(jnp.eye(16), in_panels(held))
    np.testing.assert_array_equal(out, nvfp4_dequantized(held, jnp.dtype(jnp.float32)))


@pytest.mark.parametrize(("kind", "dtype"), TYPES)
def test_experts_multiply_their_rows(kind: str, dtype: str) -> None:
    """Each expert's rows, in any number of experts; the biases are added before the one rounding."""
    rng = np.random.default_rng(5)
    experts, inputs, outputs = 6, 62, 40
    one = held(kind, (experts, inputs, outputs), dtype)
    bias = jnp.asarray(rng.standard_normal((experts, outputs)), dtype)
    for tokens in (1, 7, 700):
        chosen = jnp.asarray(rng.integers(0, experts - 1, (tokens, 2)), jnp.int32)  # the last expert has no rows
        groups, rows, pair = group_rows(chosen, experts)
        x = jnp.asarray(rng.standard_normal((tokens, inputs)), dtype)
        out = grouped_matmul(x[pair // 2], one.panels, groups, implementation="cpu")[rows]
        with_bias = grouped_matmul(x[pair // 2], one.panels, groups, bias=bias, implementation="cpu")[rows]
        for expert in range(experts - 1):
            mine = np.argwhere(np.asarray(chosen) == expert)
            if len(mine):
                token, choice = mine.T
                check(out[token, choice], x[token], one.numbers[expert])
                added = jnp.concatenate([x[token], jnp.ones((len(mine), 1), dtype)], axis=1)
                own = np.asarray(bias[expert].astype(jnp.float32), np.float64)
                check(with_bias[token, choice], added, np.concatenate([one.numbers[expert], own[None]]))


def test_what_is_not_finite_reaches_its_row_alone() -> None:
    """NaN and infinity are neither lost nor spread."""
    weights = held("float32", (64, 40), "float32").weights
    assert isinstance(weights, Array)
    for dtype in ("float32", "bfloat16"):
        x = jnp.ones((20, 64), dtype)
        clean = matmul(x, in_panels(weights.astype(dtype)))
        dirty = matmul(x.at[3, 5].set(jnp.nan).at[7, 60].set(jnp.inf), in_panels(weights.astype(dtype)))
        others = [row for row in range(20) if row not in (3, 7)]
        np.testing.assert_array_equal(dirty[jnp.array(others)], clean[jnp.array(others)])
        assert np.isnan(np.asarray(dirty[3], np.float32)).all()
        assert not np.isfinite(np.asarray(dirty[7], np.float32)).any()


def test_codes_of_what_is_not_finite_or_very_large() -> None:
    """The largest numbers are multiplied, infinity and NaN give NaN, in their row alone."""
    rng = np.random.default_rng(6)
    codes, zeros = jnp.asarray(rng.integers(0, 256, (32, 40), np.uint8)), jnp.full((2, 40), 8, jnp.uint8)
    panels = in_panels(Int4(codes, jnp.full((2, 40), 1e-3, jnp.float32), zeros))
    if not in_quads(panels):
        pytest.skip("this processor has no products of quads")
    for dtype in ("float32", "bfloat16"):
        limits = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
        x = jnp.zeros((9, 64), dtype).at[:, 3].set(1).at[4, 7].set(-jnp.inf).at[5, 40].set(jnp.nan)
        x = x.at[6, 3].set(limits.max).at[7, 3].set(float(limits.smallest_subnormal))
        out = np.asarray(matmul(x, panels).astype(jnp.float32))
        assert np.isnan(out[4:6]).all()
        assert np.isfinite(np.delete(out, [4, 5], axis=0)).all()
        assert (out[7] == 0).all()
        np.testing.assert_allclose(out[6], out[0] * np.float32(limits.max), rtol=1e-2)


def test_operands_that_do_not_fit_are_errors() -> None:
    """The C++ part reads no byte of them."""
    panels = in_panels(jnp.ones((64, 40)))
    with pytest.raises(Exception, match="jswa: the weights do not fit x and the result"):
        matmul(jnp.ones((3, 65)), panels).block_until_ready()
    one_more = replace(panels, outputs=70)
    with pytest.raises(Exception, match="jswa: the weights do not fit x and the result"):
        matmul(jnp.ones((3, 64)), one_more).block_until_ready()

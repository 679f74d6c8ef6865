"""Tests of a mixture of experts in one call of the CPU's library, against float64."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import library
from pallas_kernels.cpu.experts import gated, mixture
from pallas_kernels.cpu.products import Panels
from pallas_kernels.experts.glu import Glu, glu
from pallas_kernels.experts.mxfp4 import Mxfp4, unpack
from pallas_kernels.experts.nvfp4 import dequantized, quantize
from tests.support.kernels.grouped_calls import in_panels

pytestmark = pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not built")

EXPERTS, WIDTH, HIDDEN, CHOICES, TOKENS = 6, 64, 96, 3, 80
GLUS = (
    Glu("silu"),
    Glu("gelu", clamp=0.5),
    Glu("gelu_tanh"),
    Glu("relu"),
    Glu("silu", clamp=1.0, alpha=1.702),
)
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}  # of the largest number of a row


def matrices(dtype: str, form: str) -> list[tuple[Panels | Mxfp4, Float[np.ndarray, "E K C"]]]:
    """Return both matrices as they are held, and their numbers; the last expert's are NaN, as no token chooses it."""
    rng, found = np.random.default_rng(1), list[tuple[Panels | Mxfp4, Float[np.ndarray, "E K C"]]]()
    for inputs, outputs in ((WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)):
        if form == "mxfp4":
            blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // 2), np.uint8)
            scales = rng.integers(121, 124, (EXPERTS, outputs, inputs // 32)).astype(np.uint8)
            scales[-1] = 255
            held = Mxfp4(jnp.asarray(blocks), jnp.asarray(scales))
            found.append((held, np.asarray(unpack(held, jnp.dtype("float32")), np.float64).swapaxes(1, 2)))
            continue
        plain = rng.standard_normal((EXPERTS, inputs, outputs)) * inputs**-0.5
        plain[-1] = np.nan
        if form == "nvfp4":
            rounded = quantize(jnp.asarray(plain, jnp.float32))
            rounded = rounded._replace(factors=rounded.factors * rng.uniform(0.5, 1, rounded.factors.shape))
            numbers = np.asarray(dequantized(rounded, jnp.dtype("float32")), np.float64)
            found.append((in_panels(rounded), numbers))
            continue
        matrix = jnp.asarray(plain, dtype)
        found.append((in_panels(matrix), np.asarray(matrix.astype("float32"), np.float64)))
    return found


def expected(
    x: Array,
    chosen: Int[np.ndarray, "T k"],
    weights: Float[np.ndarray, "T k"],
    numbers: list[Float[np.ndarray, "E K C"]],
    biases: tuple[Array, Array] | None,
    gated: Glu,
    *,
    on_input: bool,
) -> Float[np.ndarray, "T M"]:
    """Return the same in float64, but for the activation, which is computed in float32."""
    rows, out = np.asarray(x.astype("float32"), np.float64), np.zeros(x.shape)
    up, down = (np.asarray(bias.astype("float32")) for bias in biases or (jnp.zeros((EXPERTS, 1)),) * 2)
    for token, choice in product(range(len(rows)), range(chosen.shape[1])):
        expert, weight = chosen[token, choice], weights[token, choice]
        if not 0 <= expert < EXPERTS:
            continue
        read = rows[token] * (weight if on_input else 1)
        gates = read @ numbers[0][expert] + up[expert]
        middle = np.asarray(glu(gated, *jnp.split(jnp.asarray(gates, jnp.float32), 2)), np.float64)
        done = middle @ numbers[1][expert] + down[expert]
        out[token] += done * (1 if on_input else weight)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["panels", "mxfp4", "nvfp4"])
def test_a_mixture_is_that_of_its_experts(dtype: str, form: str, subtests: pytest.Subtests) -> None:
    """With every activation, with and without biases; a row has equal bits alone, among others and again."""
    rng = np.random.default_rng(2)
    (gate_up, *_), (down, *_) = held = matrices(dtype, form)
    x = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), dtype)
    chosen = rng.permuted(np.tile(np.arange(EXPERTS - 1), (TOKENS, 1)), axis=1)[:, :CHOICES].astype(np.int32)
    chosen[5, 1], chosen[6] = EXPERTS, -1  # no experts
    weights = rng.uniform(0, 1, chosen.shape).astype(np.float32)
    both = tuple(jnp.asarray(rng.standard_normal((EXPERTS, n)), dtype) for n in (2 * HIDDEN, WIDTH))
    for number, unit in enumerate(GLUS):
        with subtests.test(str(unit)):
            biases = (both[0], both[1]) if number % 2 else None
            on_input = number == 2

            def run(rows: slice) -> Array:
                own = x[rows], jnp.asarray(chosen[rows]), jnp.asarray(weights[rows])
                return mixture(*own, gate_up, down, glu=unit, biases=biases, weight_on_input=on_input)  # noqa: B023

            found = run(slice(TOKENS))
            right = expected(x, chosen, weights, [numbers for _, numbers in held], biases, unit, on_input=on_input)
            error = np.abs(np.asarray(found.astype("float32")) - right)
            assert (error <= BOUNDS[dtype] * (np.abs(right).max(axis=1, keepdims=True) + 1)).all(), error.max()
            for rows in (slice(0, 1), slice(4, 7), slice(30, TOKENS), slice(TOKENS)):
                np.testing.assert_array_equal(np.asarray(run(rows)), np.asarray(found[rows]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_unit_is_that_of_its_halves(dtype: str, subtests: pytest.Subtests) -> None:
    """With every activation, of widths that fill no vector; a row has equal bits alone and among others."""
    for width in (1, 40, 257):
        rows = jnp.asarray(3 * np.random.default_rng(3).standard_normal((TOKENS, 2 * width)), dtype)
        for unit in GLUS:
            with subtests.test(f"{unit}, {width}"):
                run = jax.jit(lambda x: gated(unit, x))  # noqa: B023
                found = np.asarray(run(rows).astype("float32"))
                right = np.asarray(glu(unit, *jnp.split(rows.astype("float32"), 2, axis=1)))
                assert np.abs(found - right).max() <= BOUNDS[dtype] * np.abs(right).max()
                np.testing.assert_array_equal(np.asarray(run(rows[7:8]).astype("float32")), found[7:8])


def test_operands_that_do_not_fit_are_errors() -> None:
    """The C++ part reads no byte of them."""
    (gate_up, _), (down, _) = matrices("float32", "panels")
    x, one = jnp.ones((2, WIDTH)), jnp.zeros((2, CHOICES), jnp.int32)
    for rows, first, second in ((x[:, :-1], gate_up, down), (x, down, gate_up)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="jswa: the weights do not fit"):
            mixture(rows, one, jnp.ones((2, CHOICES)), first, second, glu=GLUS[0]).block_until_ready()

"""Tests of residual, norms, rotary embedding and KV write: every implementation on one list of cases."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import library
from pallas_kernels.elementwise.api import Implementation
from pallas_kernels.errors import NoElementwiseKernel
from tests.support.kernels.elementwise_calls import (
    Arrays,
    call_norms,
    call_rope,
    in_float32,
    norm_arrays,
    rope_arrays,
    rope_call,
)
from tools.cases.kernels.small.elementwise import GEMMA, LLAMA, NORMS, ROPES, ROPES_8, NormCase, RopeCase

NATIVE: tuple[Implementation, ...] = ("cpu",) if library.available() else ()
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "mosaic", *NATIVE)
ROUNDINGS = 6  # of a number on its way: the product, the bias, two norms, the sum, the rotation


def check(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Assert that numbers are those in float32 but for roundings, each of the largest number of the row."""
    most = np.abs(expected).max(axis=-1, keepdims=True)
    allowed = ROUNDINGS * float(jnp.finfo(dtype).eps) / 2 * most  # type: ignore[no-untyped-call]
    assert found.shape == expected.shape
    assert (np.abs(found - expected) <= allowed).all(), np.abs(found - expected).max()


def widened(arrays: Arrays, parts: int) -> Arrays:
    """The operands in float32; partial sums already are."""
    assert parts == 1 or arrays["values"].dtype == jnp.float32
    return in_float32(arrays)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_residual_and_norms_are_those_in_float32(case: NormCase, implementation: Implementation) -> None:
    """In 16 bits, of one part or several; without races."""
    arrays = norm_arrays(case)
    expected = call_norms(case, widened(arrays, case.parts), "xla")
    for found, right in zip(call_norms(case, arrays, implementation), expected, strict=True):
        check(found, right, case.dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ROPES, ids=lambda case: case.name)
def test_queries_and_pages_are_those_in_float32(case: RopeCase, implementation: Implementation) -> None:
    """In 16 bits; cells of no token, and of dropped ones, keep their bytes; without races."""
    arrays = rope_arrays(case)
    if implementation == "cpu" and (case.v_head_dim or case.interleaved):
        with pytest.raises(NoElementwiseKernel, match=r"V of|interleaved"):
            call_rope(case, arrays, implementation)
        return
    expected = call_rope(case, widened(arrays, case.parts), "xla")
    found = call_rope(case, arrays, implementation)
    for result, right in zip(found, expected, strict=True):
        check(result, right, case.dtype)
    before = np.asarray(arrays["kv"].astype(jnp.float32))
    changed = (found[1] != before).any(axis=(1, 2, 4))
    kept = np.asarray(arrays["pages"]) < case.pages
    cells = np.zeros_like(changed)
    cells[np.asarray(arrays["pages"])[kept], np.asarray(arrays["offsets"])[kept]] = True
    assert (changed == cells).all()
    assert (found[1][:, : case.layers_per_page - 1] == before[:, : case.layers_per_page - 1]).all()


@pytest.mark.parametrize("case", ROPES, ids=lambda case: case.name)
def test_rotation_and_writes_lower_for_hopper(case: RopeCase) -> None:
    """Found on an H100: sums along pieces of a head that had several numbers of columns lay in other registers."""
    traced = jax.jit(rope_call(case, "mosaic")).trace(rope_arrays(case))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", ROPES_8, ids=lambda case: case.name)
def test_pages_of_8_bits_hold_what_the_kernel_writes_in_16_divided_by_its_scale(case: RopeCase) -> None:
    """Bit for bit, as `write_kv` stores it; also numbers that are not finite, and those beyond the range."""
    arrays, plain = rope_arrays(case), replace(case, kv_dtype="", scaled=False, query_dtype="")
    values = arrays["values"]
    arrays["values"] = values.at[0, 1, -1].set(jnp.nan).at[0, 1, -3].set(jnp.inf)
    q, written = call_rope(plain, arrays | {"kv": rope_arrays(plain)["kv"], "scales": None}, "mosaic")
    scales = np.ones((2, case.kv_heads), np.float32) if arrays["scales"] is None else np.asarray(arrays["scales"])
    found_q, found = call_rope(case, arrays, "mosaic")
    expected, kept = np.array(arrays["kv"].astype(jnp.float32)), np.asarray(arrays["pages"]) < case.pages
    at = np.asarray(arrays["pages"])[kept], case.layers_per_page - 1, slice(None), np.asarray(arrays["offsets"])[kept]
    columns = np.repeat(scales, (case.head_dim, case.call.v_size), axis=0).T
    numbers = np.clip(written[at] / columns, -448, 448)
    expected[at] = jnp.asarray(numbers).astype(case.kv_dtype).astype(jnp.float32)
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found).any()
    assert not case.scaled or (np.abs(found) == 448).any()
    if case.query_dtype:
        q = np.clip(q * scales[0][:, None, None], -65_504, 65_504).astype(case.query_dtype).astype(np.float32)
    np.testing.assert_array_equal(found_q, q)


@pytest.mark.parametrize("case", ROPES_8, ids=lambda case: case.name)
def test_pages_of_8_bits_are_those_of_xla_but_for_roundings(case: RopeCase) -> None:
    """XLA need not round to 16 bits between two steps in float32, which may change a rounding to 8 bits."""
    arrays = rope_arrays(case)
    (q, found), (right_q, right) = (call_rope(case, arrays, name) for name in ("mosaic", "xla"))
    check(q, right_q, case.dtype)
    assert (np.abs(found - right) <= np.maximum(np.abs(right) / 8, 2.0**-9)).all(), "by more than one number of e4m3"
    assert (found != right).mean() < 0.05


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("gemma", "gemma"),
        ("packed queries, no", "llama"),
        ("V of another size, norms", "one expert, no weights, one of all"),
        ("interleaved pairs, norms", "experts, and one of all"),
    ],
)
def test_a_second_run_gives_equal_bits(name: str, norms: str) -> None:
    """Sums have one order."""
    case, other = rope_of(name), next(case for case in NORMS if case.name.startswith(norms))
    norm, rope = norm_arrays(other), rope_arrays(case)
    runs = [call_norms(other, norm, "mosaic") + call_rope(case, rope, "mosaic") for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("V of another size, a factor", {"v_scale": 1.0}),
        ("V of another size, norms", {"temperature": False}),
        ("interleaved pairs, five", {"interleaved": False}),
        ("interleaved pairs, norms", {"norms": (None, GEMMA, LLAMA)}),
    ],
)
def test_a_kernel_that_ignores_a_form_is_found(name: str, fault: dict[str, Any]) -> None:
    """The comparison with float32 would fail by far."""
    case = rope_of(name)
    arrays = rope_arrays(case)
    expected, wrong = call_rope(case, widened(arrays, case.parts), "xla"), replace(case, **fault)
    found = call_rope(wrong, arrays | ({} if wrong.temperature else {"temperature": None}), "mosaic")
    worst = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
    assert worst > 0.3


def rope_of(name: str) -> RopeCase:
    """The case whose name begins so."""
    return next(case for case in (*ROPES, *ROPES_8) if case.name.startswith(name))


def test_what_a_kernel_cannot_serve_is_an_error() -> None:
    """Nothing takes its place."""
    other = replace(ROPES[0], kv_dtype="float8_e5m2")
    with pytest.raises(NoElementwiseKernel, match="pages of float8_e5m2: must be bfloat16"):
        call_rope(other, rope_arrays(other), "mosaic")
    scaled = replace(ROPES[0], scaled=True)
    with pytest.raises(ValueError, match="scales are for pages of 8 bits, and these are bfloat16"):
        call_rope(scaled, rope_arrays(scaled), "mosaic")
    odd = replace(NORMS[0], width=100)
    with pytest.raises(NoElementwiseKernel, match="100 columns"):
        call_norms(odd, norm_arrays(odd), "mosaic")
    wide = replace(NORMS[0], dtype="float32")
    with pytest.raises(NoElementwiseKernel, match="float32"):
        call_norms(wide, norm_arrays(wide), "mosaic")
    narrow = replace(ROPES[0], half=12)
    with pytest.raises(NoElementwiseKernel, match="24 of it rotated"):
        call_rope(narrow, rope_arrays(narrow), "mosaic")
    partial = replace(ROPES[0], half=16, interleaved=True)
    with pytest.raises(NoElementwiseKernel, match="32 of 64 columns in interleaved pairs"):
        call_rope(partial, rope_arrays(partial), "mosaic")

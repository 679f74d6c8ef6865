"""Tests of residual, norms, rotary embedding and KV write: every implementation on one list of cases."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import library
from pallas_kernels.errors import NoGlueKernel
from pallas_kernels.glue.api import Implementation
from tests.support.kernels.glue_calls import Arrays, call_norms, call_rope, in_float32, norm_arrays, rope_arrays
from tools.cases.kernels.small.glue import GEMMA, LLAMA, NORMS, ROPES, NormCase, RopeCase

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
        with pytest.raises(NoGlueKernel, match=r"V of|interleaved"):
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


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("gemma", "gemma"),
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
    return next(case for case in ROPES if case.name.startswith(name))


def test_what_a_kernel_cannot_serve_is_an_error() -> None:
    """Nothing takes its place."""
    odd = replace(NORMS[0], width=100)
    with pytest.raises(NoGlueKernel, match="100 columns"):
        call_norms(odd, norm_arrays(odd), "mosaic")
    wide = replace(NORMS[0], dtype="float32")
    with pytest.raises(NoGlueKernel, match="float32"):
        call_norms(wide, norm_arrays(wide), "mosaic")
    narrow = replace(ROPES[0], half=12)
    with pytest.raises(NoGlueKernel, match="24 of it rotated"):
        call_rope(narrow, rope_arrays(narrow), "mosaic")
    partial = replace(ROPES[0], half=16, interleaved=True)
    with pytest.raises(NoGlueKernel, match="32 of 64 columns in interleaved pairs"):
        call_rope(partial, rope_arrays(partial), "mosaic")

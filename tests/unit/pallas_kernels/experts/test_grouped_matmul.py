"""Tests of `grouped_matmul` and `group_rows` against plain NumPy, for all implementations."""

import inspect
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.experts.api import HOPPER, Implementation, grouped_matmul
from pallas_kernels.experts.groups import ALIGN, Groups, group_rows, row_count
from pallas_kernels.experts.nvfp4 import Nvfp4, dequantized
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Quantized, QuantizedBlocks
from tests.support.kernels.grouped_calls import check, make_call, run
from tools.cases.kernels.experts import CASES, Case, Form


def served() -> list[ParameterSet]:
    """Return each case with each implementation that serves it. To interpret a Hopper kernel takes seconds.

    Triton is not in this environment: `test_triton`.
    """
    out = []
    for index, case in enumerate(CASES):
        for implementation in (name for name in get_args(Implementation) if name != "triton"):
            if case.served_by(implementation):
                slow = implementation in HOPPER and not (case.quick and index % 2 == 0)
                marks = [pytest.mark.nightly] if slow else []
                out.append(pytest.param(case, implementation, id=f"{implementation}: {case.name}", marks=marks))
    return out


@pytest.mark.parametrize(("case", "implementation"), served())
def test_a_row_is_multiplied_by_its_experts_matrix(case: Case, implementation: Implementation) -> None:
    """Rows that belong to no expert, and experts without rows, hold NaN. Two calls give equal bits."""
    call = make_call(case)
    out = run(call, case, implementation)
    check(out, call, case)
    np.testing.assert_array_equal(run(call, case, implementation)[call.owned], out[call.owned])


def test_one_missing_input_is_found() -> None:
    """In bfloat16, whichever of 128 inputs a row loses; so is another row's input. `check` fails for each of them."""
    case = next(case for case in CASES if case.name == "16 bits, edges")
    call = make_call(case)
    row = int(call.starts[5])
    for lost in range(0, case.inputs, 8):
        wrong = replace(call, x=call.x.at[row, lost].set(0))
        with pytest.raises(AssertionError, match="times what rounding may do"):
            check(run(wrong, case, "xla"), call, case)
    with pytest.raises(AssertionError, match="times what rounding may do"):
        check(run(replace(call, x=call.x.at[row].set(call.x[row + 1])), case, "xla"), call, case)


@pytest.mark.parametrize("form", ["fp8", "fp8_blocks", "int8", "int4", "nvfp4"])
def test_one_wrong_scale_or_zero_point_is_found(form: Form) -> None:
    """Of one output, one block, and one group of 32 or 16 inputs: the kernel takes those of a neighbour."""
    case = Case("", (5, 3), 256, 128, dtype="bfloat16", form=form)
    call = make_call(case)
    if isinstance(call.weights, Int4):
        zeros = call.weights.zeros
        wrong: Any = call.weights._replace(zeros=zeros.at[1, 2, 7].set((zeros[1, 2, 7] + 1) % 17))
    elif isinstance(call.weights, Nvfp4):
        codes = call.weights.codes.at[1, 16:24, 7].set(0x33)  # 1½, so that the group is not of zeros
        wrong = call.weights._replace(codes=codes, scales=call.weights.scales.at[1, 2, 7].add(1))
        call = replace(call, weights=call.weights._replace(codes=codes))
    elif isinstance(call.weights, QuantizedBlocks):
        scales = call.weights.scales
        wrong = call.weights._replace(scales=scales.at[1, 1, 0].set(scales[1, 1, 0] * 1.0625))
    else:
        assert isinstance(call.weights, Quantized)
        scales = call.weights.scales
        wrong = call.weights._replace(scales=scales.at[1, 7].set(scales[1, 7] * 1.0625))
    with pytest.raises(AssertionError, match="times what rounding may do"):
        check(run(replace(call, weights=wrong), case, "mosaic"), call, case)


def test_the_hopper_kernel_rounds_no_weight_in_blocks() -> None:
    """Scales of blocks are numbers of float32, which XLA's weights in bfloat16 cannot be products of."""
    case = Case("", (5, 30), 256, 192, dtype="bfloat16", form="fp8_blocks")
    call = make_call(case)
    assert isinstance(call.weights, QuantizedBlocks)
    factors = np.random.default_rng(0).uniform(1, 2, call.weights.scales.shape).astype(np.float32)
    call = replace(call, weights=call.weights._replace(scales=call.weights.scales * factors))
    check(run(call, case, "mosaic"), call, case)
    check(run(call, case, "reference"), call, case)
    with pytest.raises(AssertionError, match="times what rounding may do"):
        check(run(call, case, "xla"), call, case)


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic"])
def test_no_weight_in_nvfp4_is_rounded(implementation: Implementation) -> None:
    """Factors of 24 significant bits multiply the sums: weights that are rounded to bfloat16 before would be seen."""
    case = Case("", (5, 30), 256, 192, dtype="bfloat16", form="nvfp4")
    call = make_call(case)
    check(run(call, case, implementation), call, case)
    assert isinstance(call.weights, Nvfp4)
    rounded = dequantized(call.weights, jnp.dtype(jnp.bfloat16))
    with pytest.raises(AssertionError, match="times what rounding may do"):
        check(run(replace(call, weights=rounded), case, "xla"), call, case)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float32_is_multiplied_in_float32(implementation: Implementation) -> None:
    """Also on a GPU, which would otherwise take ten bits of fraction of each factor (TF32)."""
    call = make_call(Case("", (3,)))
    program = jax.jit(lambda x, w: grouped_matmul(x, w, call.groups, implementation=implementation))
    products = [line for line in program.lower(call.x, call.weights).as_text().splitlines() if "dot_general" in line]
    assert products
    assert all(line.count("HIGHEST") == 2 for line in products)


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu", "mosaic"])
def test_nan_in_one_row_stays_there(implementation: Implementation) -> None:
    """It does not reach rows of the same tile or of the next."""
    case = Case("", (3, 9), 64, 64, dtype="bfloat16")
    call = make_call(case)
    clean = run(call, case, implementation)
    object.__setattr__(call, "x", call.x.at[jnp.array([1, 16])].set(jnp.nan))
    dirty = run(call, case, implementation)
    rows = call.owned & ~np.isin(np.arange(len(clean)), [1, 16])
    np.testing.assert_array_equal(dirty[rows], clean[rows])
    assert np.isnan(dirty[[1, 16]]).all()


def test_an_unknown_implementation_is_an_error() -> None:
    """No other implementation takes over."""
    call = make_call(CASES[1])
    with pytest.raises(ValueError, match="implementation = 'cuda': must be one of"):
        inspect.unwrap(grouped_matmul)(call.x, call.weights, call.groups, implementation="cuda")


@given(data=st.data(), shape=st.sampled_from([(1, 1, 4), (2, 3, 5), (40, 2, 9), (90, 4, 16)]))
@settings(max_examples=25)
def test_pairs_are_sorted_by_expert(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    """Each pair has its own row in its expert's group, in order. Groups are aligned and fit the static bound."""
    tokens, top_k, experts = shape
    favourites = data.draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    chosen = rng.choice(favourites, (tokens, top_k)).astype(np.int32)
    (starts, sizes), rows, pair_of = group_rows(jnp.asarray(chosen), experts)
    check_groups(chosen, Groups(starts, sizes), np.asarray(rows), np.asarray(pair_of), experts)


@pytest.mark.parametrize(("tokens", "experts"), [(256, 3), (257, 8), (1700, 256)])
def test_pairs_of_several_blocks_are_sorted_by_expert(tokens: int, experts: int) -> None:
    """Pairs are compared with each other block by block."""
    chosen = np.random.default_rng(tokens).integers(0, experts, (tokens, 2)).astype(np.int32)
    groups, rows, pair_of = group_rows(jnp.asarray(chosen), experts)
    check_groups(chosen, groups, np.asarray(rows), np.asarray(pair_of), experts)


def check_groups(chosen: np.ndarray, groups: Groups, rows: np.ndarray, pair_of: np.ndarray, experts: int) -> None:
    """Check all that `group_rows` promises."""
    starts, sizes = (np.asarray(part) for part in groups)
    pairs = chosen.reshape(-1)
    assert sizes.tolist() == np.bincount(pairs, minlength=experts).tolist()
    assert (starts % ALIGN == 0).all()
    ends = starts + -(-sizes // ALIGN) * ALIGN
    assert (starts[1:] >= ends[:-1]).all()
    assert ends[-1] <= len(pair_of) == row_count(len(pairs), experts)
    assert len(pair_of) % ALIGN == 0
    expected = np.empty(len(pairs), np.int64)
    for expert in range(experts):
        mine = np.flatnonzero(pairs == expert)
        expected[mine] = starts[expert] + np.arange(len(mine))
    assert rows.reshape(-1).tolist() == expected.tolist()
    assert pair_of[expected].tolist() == list(range(len(pairs)))

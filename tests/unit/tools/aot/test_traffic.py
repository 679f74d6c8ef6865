"""Tests of the bytes that kernels of a compiled program move, and of what XLA adds up, on XLA's text form."""

import pytest

from tools.aot.measures.sums import float_sums
from tools.aot.measures.traffic import Array, Range, arrays_moved, bytes_moved, parse_program

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_gather (param_0: bf16[1000,64], param_1: s32[8]) -> f32[8,64] {
  %param_0 = bf16[1000,64]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  %gather.1 = bf16[8,64]{1,0} gather(%param_0, %param_1), offset_dims={1}, slice_sizes={1,64}
  ROOT %convert.1 = f32[8,64]{1,0} convert(%gather.1)
}

%fused_scatter (param_0.1: f32[1,500,64], param_1.1: s32[8], param_2.1: f32[8,64]) -> f32[500,64] {
  %param_0.1 = f32[1,500,64]{2,1,0} parameter(0)
  %bitcast.1 = f32[500,64]{1,0} bitcast(%param_0.1)
  %param_1.1 = s32[8]{0} parameter(1)
  %param_2.1 = f32[8,64]{1,0} parameter(2)
  ROOT %scatter.1 = f32[500,64]{1,0} scatter(%bitcast.1, %param_1.1, %param_2.1), to_apply=%region_0
}

%fused_both (param_0.2: f32[8,100]) -> (f32[8,100], f32[8]) {
  %param_0.2 = f32[8,100]{1,0} parameter(0)
  %reduce.1 = f32[8]{0} slice(%param_0.2), slice={[0:8], [0:1]}
  %exp.1 = f32[8,100]{1,0} exponential(%param_0.2)
  ROOT %tuple.2 = (f32[8,100]{1,0}, f32[8]{0}) tuple(%exp.1, %reduce.1)
}

%greedy (arg: (f32[8,100])) -> (f32[8,100]) {
  %arg = (f32[8,100]{1,0}) parameter(0)
  %get-tuple-element.1 = f32[8,100]{1,0} get-tuple-element(%arg), index=0
  %copy.1 = f32[8,100]{1,0} copy(%get-tuple-element.1)
  ROOT %tuple.1 = (f32[8,100]{1,0}) tuple(%copy.1)
}

%limited (arg.1: (f32[8,100])) -> (f32[8,100]) {
  %arg.1 = (f32[8,100]{1,0}) parameter(0)
  %second = f32[8,100]{1,0} get-tuple-element(%arg.1), index=0
  %fusion.3 = (f32[8,100]{1,0}, f32[8]) fusion(%second), calls=%fused_both, metadata={op_name="sampling/exp"}
  %copy.2 = f32[8,100]{1,0} copy(%second), metadata={op_name="sampling/copy"}
  ROOT %tuple.3 = (f32[8,100]{1,0}) tuple(%copy.2)
}

ENTRY %main.1 (p.1: bf16[1000,64], p.2: s32[8], p.3: f32[1,500,64], p.4: bf16[64,100], p.5: s32[]) -> (f32[8,100]) {
  %p.1 = bf16[1000,64]{1,0} parameter(0)
  %p.2 = s32[8]{0} parameter(1)
  %p.3 = f32[1,500,64]{2,1,0} parameter(2)
  %p.4 = bf16[64,100]{1,0} parameter(3)
  %p.5 = s32[] parameter(4)
  %fusion.1 = f32[8,64]{1,0} fusion(%p.1, %p.2), kind=kLoop, calls=%fused_gather
  %fusion.2 = f32[500,64]{1,0} fusion(%p.3, /*index=1*/%p.2, %fusion.1), kind=kInput, calls=%fused_scatter
  %call.1 = f32[8,100]{1,0} custom-call(%fusion.1, %p.4), custom_call_target="mosaic_gpu_v2", config={"a": "f(x)"}
  %tuple.4 = (f32[8,100]{1,0}) tuple(%call.1)
  ROOT %cond.1 = (f32[8,100]{1,0}) conditional(%p.5, %tuple.4, %tuple.4), branch_computations={%greedy, %limited}
}
"""
LOGITS = 4 * 8 * 100
GATHER = 2 * 8 * 64 + 4 * 8 + 4 * 8 * 64  # the rows, their indices, and the result
SCATTER = 4 * 8 + 2 * 4 * 8 * 64  # indices, updates, and cells


def test_only_what_kernels_touch_is_counted() -> None:
    """Of a table that is gathered from its rows, of an array that is updated in place the update."""
    call = 4 * 8 * 64 + 0.5 * 2 * 64 * 100 + LOGITS
    most = 2 * LOGITS + 4 * 8 + 2 * LOGITS
    found = bytes_moved(parse_program(PROGRAM), lambda array: array.size * (0.5 if array.kind == "bf16" else 1))
    assert found == Range(GATHER + SCATTER + call + 2 * LOGITS, GATHER + SCATTER + call + most)


SLICED = """
%dynamic-slice-fusion (p0: bf16[8,100], p1: f32[5000]) -> (bf16[1,100], f32[5000]) {
  %p1 = f32[5000]{0} parameter(1)
  %p0 = bf16[8,100]{1,0} parameter(0)
  %slice.1 = bf16[1,100]{1,0} slice(%p0), slice={[0:1], [0:100]}
  ROOT %call.2 = (bf16[1,100]{1,0}, f32[5000]{0}) custom-call(%p1, %slice.1), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main.2 (a: bf16[8,100], b: f32[5000]) -> (bf16[1,100], f32[5000]) {
  %a = bf16[8,100]{1,0} parameter(0)
  %b = f32[5000]{0} parameter(1)
  ROOT %fusion.4 = (bf16[1,100]{1,0}, f32[5000]{0}) fusion(%a, %b), kind=kCustom, calls=%dynamic-slice-fusion
}
"""


def test_a_call_that_is_given_a_slice_reads_no_more() -> None:
    """XLA passes the address; what the call reads of its other arrays is for its authors to say."""
    found = bytes_moved(parse_program(SLICED), lambda array: 0.0 if array.size == 4 * 5000 else array.size)
    assert found == Range(2 * 2 * 100, 2 * 2 * 100)


def test_large_arrays_in_a_scope_are_counted() -> None:
    """And those of copies without a scope, which XLA adds. Of a conditional one branch runs."""
    assert arrays_moved(parse_program(PROGRAM), "sampling", LOGITS) == Range(2 + 2, 2 + 4)


def test_a_type_has_its_bytes() -> None:
    """In bytes."""
    sizes = {"pred": 1, "bf16": 2, "s32": 4, "f8e4m3fn": 1, "u16": 2, "s64": 8}
    assert {kind: Array(kind, ()).size for kind in sizes} == sizes
    assert Array("s4", (4, 8)).size == 16


def test_another_text_is_an_error() -> None:
    """A program without kernels would pass all gates."""
    with pytest.raises(ValueError, match="no program: 'HloModule x'"):
        parse_program("HloModule x")


SUMS = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%most (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %maximum.1 = f32[] maximum(%c, %d)
}

%count (e: s32[], f: s32[]) -> s32[] {
  %e = s32[] parameter(0)
  %f = s32[] parameter(1)
  ROOT %add.2 = s32[] add(%e, %f)
}

%fused (p: f32[8,64]) -> f32[8] {
  %p = f32[8,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %reduce.1 = f32[8]{0} reduce(%p, %zero), dimensions={1}, to_apply=%add, metadata={op_name="jit(step)/moe/sum"}
}

ENTRY %main.1 (p.1: f32[8,64], p.2: bf16[64,64], p.3: s32[8,64]) -> f32[8] {
  %p.1 = f32[8,64]{1,0} parameter(0)
  %p.2 = bf16[64,64]{1,0} parameter(1)
  %p.3 = s32[8,64]{1,0} parameter(2)
  %low = f32[] constant(-inf)
  %none = s32[] constant(0)
  %dot.1 = f32[8,64]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, metadata={op_name="jit(step)/layer_0/dot"}
  %reduce.2 = f32[8]{0} reduce(%p.1, %low), dimensions={1}, to_apply=%most, metadata={op_name="jit(step)/max"}
  %reduce.3 = s32[8]{0} reduce(%p.3, %none), dimensions={1}, to_apply=%count, metadata={op_name="jit(step)/count"}
  ROOT %fusion.1 = f32[8]{0} fusion(%p.1), kind=kInput, calls=%fused
}
"""


def test_products_and_sums_of_floating_point_numbers_are_found() -> None:
    """Inside of fusions too; largest numbers and counts are in no order that matters."""
    assert float_sums(parse_program(SUMS)) == ["dot in jit(step)/layer_0/dot", "reduce in jit(step)/moe/sum"]

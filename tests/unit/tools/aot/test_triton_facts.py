"""Tests of the facts that `tools.aot.triton` reads from the compilers' output, and of its checks."""

from dataclasses import replace

import pytest

from tools.aot.triton_facts import TritonFacts, gpu

PTX = """
.visible .entry attend(
.reqntid 128
cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
cp.async.commit_group;
cp.async.wait_group 	1;
cp.async.wait_group 	3;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 };
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 };
cp.async.wait_group 	0;
"""
REPORT = """
ptxas info    : Compiling entry function 'attend' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 424 bytes cmem[0]
"""
GOOD = TritonFacts(registers=96, spills=0, smem=37_896, threads=128, products=2, under_way=3)
A100, L4, H200 = gpu("a100"), gpu("l4"), gpu("h200")


def test_facts_are_read() -> None:
    """They come from the PTX and from ptxas' report."""
    assert TritonFacts.of(PTX, REPORT, 37_896) == GOOD


@pytest.mark.parametrize(("ptx", "report"), [(PTX, ""), ("", REPORT)])
def test_output_of_another_form_is_an_error(ptx: str, report: str) -> None:
    """The output of another release must not be taken for a kernel without spills."""
    with pytest.raises(ValueError, match=r"^no .* in ''"):
        TritonFacts.of(ptx, report, 0)


def test_gpus_are_read_from_their_target_configurations() -> None:
    """XLA compiles with the same files."""
    assert [(card.name, card.arch) for card in (A100, L4, H200)] == [
        ("A100", "sm_80"),
        ("L4", "sm_89"),
        ("H200", "sm_90a"),
    ]
    assert (A100.smem, L4.smem, H200.smem) == (163 * 1024, 99 * 1024, 227 * 1024)


@pytest.mark.parametrize(
    ("facts", "blocks"),
    [
        (GOOD, (4, 2)),
        (replace(GOOD, registers=255), (2, 2)),
        (replace(GOOD, smem=1_000, registers=30), (16, 12)),
        (replace(GOOD, smem=101_376), (1, 1)),
        (replace(GOOD, smem=101_377), (1, 0)),
    ],
)
def test_registers_memory_and_threads_limit_the_blocks_of_each_card(
    facts: TritonFacts, blocks: tuple[int, int]
) -> None:
    """On an A100 and an L4, limited by registers, shared memory or threads."""
    assert (facts.blocks_per_sm(A100), facts.blocks_per_sm(L4)) == blocks


@pytest.mark.parametrize(
    ("facts", "faults"),
    [
        (GOOD, []),
        (replace(GOOD, spills=8), ["8 bytes spilled"]),
        (replace(GOOD, products=0), ["no matrix units"]),
        (replace(GOOD, under_way=0), ["no copy runs while the kernel computes"]),
        (
            replace(GOOD, smem=101_377),
            ["101377 bytes of shared memory, of 101376", "does not fit on a multiprocessor"],
        ),
    ],
)
def test_a_kernel_beyond_a_limit_has_a_fault(facts: TritonFacts, faults: list[str]) -> None:
    """Any fault makes the tool exit with 1."""
    assert facts.faults(L4) == faults


def test_float32_needs_no_matrix_units() -> None:
    """Matrix units would round its numbers to ten bits."""
    assert replace(GOOD, products=0).faults(A100, matrix_units=False) == []

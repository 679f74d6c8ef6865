"""What `make gpu-compile` reads from the compilers' output, and what it objects to."""

from dataclasses import replace

import pytest

from tools.compile_facts import KernelFacts, attention_by_command_buffer, copies, parse

PTX = """
.visible .entry {name}_mosaic_gpu_kernel(
.maxntid {threads}, 1, 1
mbarrier.arrive.expect_tx.shared.b64 %rd20, [__dynamic_shmem__0+114688], %r65;
mbarrier.arrive.expect_tx.shared.b64 %rd28, [__dynamic_shmem__0+114696], %r86;
@%p75 cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%r43], [%rd7, {{%r78}} ], [%r37];
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16
}}
"""
REPORT = """
ptxas info    : Compiling entry function '{name}_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 2 barriers, 1 bytes smem
"""
GOOD = KernelFacts("decode", registers=144, spills=0, smem=114_704, threads=128, wgmma=2, tma=1)


def test_facts_of_all_kernels_are_read() -> None:
    """A program may have several."""
    text = (PTX + REPORT).format(name="decode", threads=128, spills=0, registers=144)
    text += (PTX + REPORT).format(name="prefill", threads=384, spills=12, registers=168)
    assert list(parse(text)) == [GOOD, replace(GOOD, name="prefill", threads=384, spills=12, registers=168)]


def test_a_kernel_without_report_is_an_error() -> None:
    """Another format of another release must not pass for no spills."""
    with pytest.raises(ValueError, match="no report of a kernel that begins with"):
        list(parse(PTX.format(name="decode", threads=128)))


@pytest.mark.parametrize(
    ("facts", "blocks"),
    [
        (GOOD, 2),
        (replace(GOOD, registers=255, smem=1_000), 2),
        (replace(GOOD, registers=141, threads=256, smem=1_000), 1),
        (replace(GOOD, registers=30, smem=8), 16),
        (replace(GOOD, smem=232_448), 1),
    ],
)
def test_blocks_per_multiprocessor(facts: KernelFacts, blocks: int) -> None:
    """Registers, shared memory and threads, whichever ends first."""
    assert facts.blocks_per_sm == blocks


@pytest.mark.parametrize(
    ("facts", "faults"),
    [
        (GOOD, []),
        (replace(GOOD, spills=8), ["8 bytes spilled"]),
        (replace(GOOD, wgmma=0, tma=0), ["no WGMMA", "no TMA"]),
        (replace(GOOD, smem=232_449), ["232449 bytes of shared memory", "does not fit on a multiprocessor"]),
    ],
)
def test_faults(facts: KernelFacts, faults: list[str]) -> None:
    """What makes the target fail."""
    assert facts.faults() == faults


def test_copies_are_measured() -> None:
    """Of any type and rank, also asynchronous ones; copies of nothing but a number too."""
    program = """
      %copy.1 = bf16[1,2000,1310720]{2,1,0} copy(%p)
      %copy-start.2 = f32[64]{0} copy-start(%q)
      %copy.3 = s32[] copy(%r)
      %fusion = f32[64]{0} fusion(%copy.1)
    """
    assert copies(program) == [2 * 2000 * 1310720, 256, 4]


def test_attention_is_counted_by_command_buffer() -> None:
    """All in one is right; one outside, or in another buffer, shows."""
    buffer, call, kernel = "000: kCommandBuffer", "    001: kCustomCall", "    002: kCustomKernel"
    assert attention_by_command_buffer([buffer, call, kernel, call, "003: kConditional", buffer, kernel]) == [2]
    assert attention_by_command_buffer([buffer, call, "003: kCustomCall", buffer, call]) == [1, 1, 1]

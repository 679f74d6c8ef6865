"""Tests of the facts that `make gpu-compile` reads from the compilers' output, and of its checks."""

from dataclasses import replace

import pytest

from tools.aot.facts import KernelFacts, Launch, copies, launches, made_sizes, parse, top_level, widest

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
    """A program may have several kernels."""
    text = (PTX + REPORT).format(name="decode", threads=128, spills=0, registers=144)
    text += (PTX + REPORT).format(name="prefill", threads=384, spills=12, registers=168)
    assert list(parse(text)) == [GOOD, replace(GOOD, name="prefill", threads=384, spills=12, registers=168)]


def test_shared_memory_ends_behind_indexed_barriers() -> None:
    """The addresses of indexed barriers are sums."""
    text = PTX.replace("[__dynamic_shmem__0+114688]", "[%r7]").replace("[__dynamic_shmem__0+114696]", "[%r8]")
    text += "\tadd.s32 \t%r32, %r43, 114696;\n\t@%p2 mbarrier.init.shared::cta.b64 [%r32], %r26;"
    assert list(parse((text + REPORT).format(name="decode", threads=128, spills=0, registers=144))) == [GOOD]


def test_a_kernel_without_report_is_an_error() -> None:
    """The output of another release must not be taken for a kernel without spills."""
    with pytest.raises(ValueError, match="no report of a kernel that begins with"):
        list(parse(PTX.format(name="decode", threads=128)))


@pytest.mark.parametrize(
    "advice",
    [
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register "
        "resources for the wgmma pipeline in the function 'decode'",
        "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions defining accumulator registers of a wgmma between start and end of the pipeline stage",
        "'setmaxnreg' ignored to maintain minimum register requirements",
    ],
)
def test_advice_of_ptxas_is_a_fault(advice: str) -> None:
    """The kernel computes the right numbers, and waits for each product. setmaxnreg in the PTX is an instruction."""
    source = PTX.replace("wgmma.mma", "setmaxnreg.dec.sync.aligned.u32 24;\nwgmma.mma", 1) + f"ptxas info    : {advice}"
    (found,) = parse((source + REPORT).format(name="decode", threads=128, spills=0, registers=144))
    assert found == replace(GOOD, advice=(advice,))
    assert found.faults() == [advice]


def test_registers_that_are_written_too_early_are_a_fault() -> None:
    """The tensor cores would multiply other numbers."""
    assert replace(GOOD, overwritten=2).faults() == ["2 writes to registers of products under way"]


def test_a_stack_frame_is_a_fault() -> None:
    """Arrays with indices that are not constants lie there, in memory."""
    text = (PTX + REPORT).replace("0 bytes stack", "24 bytes stack")
    (found,) = parse(text.format(name="decode", threads=128, spills=0, registers=144))
    assert found.faults() == ["24 bytes of stack"]


def test_a_tuning_that_counts_with_more_thread_blocks_than_fit_is_a_fault() -> None:
    """Two of 384 threads need at most 80 registers."""
    assert replace(GOOD, threads=384, registers=80).faults(2) == []
    (fault,) = replace(GOOD, threads=384, registers=88).faults(2)
    assert fault == "1 thread blocks fit on a multiprocessor, and its tuning counts with 2"


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
def test_registers_memory_and_threads_limit_the_blocks_of_a_multiprocessor(facts: KernelFacts, blocks: int) -> None:
    """They are limited by registers, shared memory or threads."""
    assert facts.blocks_per_sm == blocks


@pytest.mark.parametrize(
    ("facts", "faults"),
    [
        (GOOD, []),
        (replace(GOOD, spills=16, stack=16), []),
        (replace(GOOD, spills=20), ["20 bytes spilled"]),
        (replace(GOOD, wgmma=0, tma=0), ["no WGMMA", "no TMA"]),
        (replace(GOOD, smem=232_449), ["232449 bytes of shared memory", "does not fit on a multiprocessor"]),
    ],
)
def test_a_kernel_beyond_a_limit_has_a_fault(facts: KernelFacts, faults: list[str]) -> None:
    """Any fault makes the target fail."""
    assert facts.faults() == faults


def test_copies_are_measured() -> None:
    """Copies of any type and rank count, asynchronous copies and scalars too."""
    program = """
      %copy.1 = bf16[1,2000,1310720]{2,1,0} copy(%p)
      %copy-start.2 = f32[64]{0} copy-start(%q)
      %copy.3 = s32[] copy(%r)
      %fusion = f32[64]{0} fusion(%copy.1)
    """
    assert copies(program) == [2 * 2000 * 1310720, 256, 4]


def test_launches_have_their_scope() -> None:
    """Fusions and custom calls are launches, with one result or several; other operations are not."""
    program = """
      %a = s32[64,2]{1,0} fusion(%p), kind=kLoop, calls=%f, metadata={op_name="jit(step)/indices/select_n" id=3}
      %b = (pred[], /*index=1*/s32[64]{0}) fusion(%p), kind=kInput, calls=%g, metadata={op_name="jit(step)/sampling/or"}
      %c = (s32[], bf16[64,128]{1,0}) custom-call(%p), metadata={op_name="jit(step)/layer_3/attention/paged"}
      %d = f32[64]{0} add(%a, %b), metadata={op_name="jit(step)/layer_3/add"}
    """
    assert launches(program) == [
        Launch(("jit(step)", "indices", "select_n"), integers=True),
        Launch(("jit(step)", "sampling", "or"), integers=True),
        Launch(("jit(step)", "layer_3", "attention", "paged"), integers=False),
    ]
    assert [launch.layer for launch in launches(program)] == [None, None, "layer_3"]


def test_the_host_launches_the_outermost_thunks() -> None:
    """It does not launch thunks inside of a command buffer or a conditional."""
    buffer, call = "000: kCommandBuffer [source | sink]\n", "    001: kCustomCall [source | sink]\n"
    assert top_level(buffer + call) == ["kCommandBuffer"]
    assert top_level(buffer + call + "003: kConditional\ncondition:\n" + call + buffer) == [
        "kCommandBuffer",
        "kConditional",
        "kCommandBuffer",
    ]


def test_the_largest_array_of_logits_is_one_that_a_kernel_writes() -> None:
    """Not what is inside of a fusion, a parameter, or a view of another array; bytes count, not numbers."""
    program = """
%fused_compare (p: f32[4,1000]) -> pred[4,3,1000] {
  %wide = u32[4,9,1000]{2,1,0} broadcast(%p), dimensions={0,2}
}
ENTRY %main (head: bf16[512,1000]) -> s32[4] {
  %head = bf16[512,1000]{1,0} parameter(0)
  %logits = f32[4,1000]{1,0} custom-call(%head), metadata={op_name="jit(step)/logits/dot"}
  %both = (pred[4,3,1000]{2,1,0}, s32[4]{0}) fusion(%logits), kind=kInput, calls=%fused_compare
  %view = f32[4,4,1000]{2,1,0} bitcast(%other)
}
"""
    assert widest(program, 1000) == 4 * 4 * 1000
    assert widest(program, 512) == 0


def test_sizes_of_arrays_are_those_that_kernels_write() -> None:
    """Of the types that are asked for; what is inside of a fusion of Triton's is never written."""
    program = """
%gemm_fusion_dot_computation (p: u8[64,32]) -> bf16[4,32] {
  %wide = u8[64,32]{1,0} copy(%p)
}
ENTRY %main (w: u8[64,48]) -> bf16[4] {
  %w = u8[64,48]{1,0} parameter(0)
  %turned = f8e4m3fn[48,64]{1,0} fusion(%w), kind=kLoop, calls=%fused_transpose
  %sums = (bf16[4,48]{1,0}, s8[4096]{0}) custom-call(%w)
  %view = u8[7,7]{1,0} bitcast(%w)
}
"""
    assert made_sizes(program, ("u8", "f8e4m3fn")) == {48 * 64}
    assert made_sizes(program, ("s8", "bf16")) == {4096, 4 * 48}

"""Facts about compiled kernels and programs, read from the output of the compilers. Imports no jax."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_REGISTERS, SM_SMEM_BYTES, SM_THREADS, SMEM_BYTES
from tools.aot.measures.products import overwritten

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
}
_INTEGERS = {"pred", "s8", "u8", "s32", "u32", "s64", "u64"}

_VIEWS = ("parameter", "get-tuple-element", "bitcast", "tuple", "constant", "call", "while", "conditional")

# Kernels without products, which load and store registers.
ELEMENTWISE = ("residual_norms", "rotate_and_write")
SPILLED = 16  # bytes, four registers: ptxas 13.5 stores so many in the prefill kernel of chunked layers
STACK = 16  # bytes


@dataclass(frozen=True)
class KernelFacts:
    """One compiled kernel.

    Attributes:
        registers: per thread, when the kernel starts.
        spills: bytes of registers stored in memory.
        stack: bytes of memory of each thread, for spilled registers or indexed arrays.
        smem: bytes of shared memory.
        threads: per thread block.
        wgmma, tma: instructions in the PTX: matrix products, and copies of boxes between global and shared memory.
        overwritten: instructions that write registers which a matrix product under way may still read; see
            `tools.aot.measures.products`.
        advice: ptxas' remarks that it waits for each WGMMA before it issues the next (C7510 to C7515), or ignores a
            setmaxnreg: the kernel is right, and much slower than it was written.
    """

    name: str
    registers: int
    spills: int
    smem: int
    threads: int
    wgmma: int
    tma: int
    stack: int = 0
    advice: tuple[str, ...] = ()
    overwritten: int = 0

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that fit on a multiprocessor. Registers are allocated eight at a time."""
        by_registers = SM_REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return min(by_registers, SM_SMEM_BYTES // (self.smem + BLOCK_SMEM_BYTES), SM_THREADS // self.threads)

    @property
    def figures(self) -> dict[str, float]:
        """What gates compare. Registers count only by the thread blocks that they leave room for."""
        return {"spills": self.spills, "stack": self.stack, "smem": self.smem, "blocks_per_sm": self.blocks_per_sm}

    def faults(self, blocks: int = 1) -> list[str]:
        """Return the checks of a Hopper kernel that fail. `blocks` must fit on a multiprocessor."""
        few = f"{self.blocks_per_sm} thread blocks fit on a multiprocessor, and its tuning counts with {blocks}"
        return [
            *([f"{self.spills} bytes spilled"] if self.spills > SPILLED else []),
            *([f"{self.stack} bytes of stack"] if self.stack > STACK else []),
            *self.advice,
            *([f"{self.overwritten} writes to registers of products under way"] if self.overwritten else []),
            *([f"{self.smem} bytes of shared memory"] if self.smem > SMEM_BYTES else []),
            *(["no WGMMA"] if not self.wgmma and self.name not in ELEMENTWISE else []),
            *(["no TMA"] if not self.tma and self.name not in ELEMENTWISE else []),
            *([few] if 0 < self.blocks_per_sm < blocks else []),
            *([] if self.blocks_per_sm else ["does not fit on a multiprocessor"]),
        ]


def parse(text: str) -> Iterator[KernelFacts]:
    """Yield the facts of each kernel in the output of MOSAIC_GPU_DUMP_PTX and MOSAIC_GPU_DUMP_PTXAS.

    That output is the PTX of a kernel, then ptxas' report. Raises ValueError if a report is missing.
    """
    for source in re.split(r"(?=\.visible \.entry )", text)[1:]:
        name, threads, spills, registers = (
            re.search(pattern, source)
            for pattern in (r"entry (\w+)", r"\.maxntid (\d+)", r"(\d+) bytes spill stores", r"Used (\d+) registers")
        )
        if name is None or threads is None or spills is None or registers is None:
            raise ValueError(f"no report of a kernel that begins with {source[:80]!r}")
        yield KernelFacts(
            name[1].removesuffix("_mosaic_gpu_kernel"),
            int(registers[1]),
            int(spills[1]),
            _smem(source),
            int(threads[1]),
            source.count("wgmma.mma_async.sync"),
            source.count("cp.async.bulk.tensor"),
            sum(map(int, re.findall(r"(\d+) bytes stack frame", source))),
            tuple(re.findall(r"^ptxas \w+\s*: (.*(?:C751[0-5]|serialized|setmaxnreg).*)$", source, re.MULTILINE)),
            overwritten(source),
        )


def _smem(source: str) -> int:
    """Return the end of the last barrier, which lies behind all arrays in shared memory and takes eight bytes.

    Its address is a constant; or, if barriers are indexed, a sum that is computed to initialise it.
    """
    offsets = re.findall(r"__dynamic_shmem__0\+(\d+)", source)
    for address in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", source):
        offsets += re.findall(rf"add\.s32\s+{address}, %r\d+, (\d+);", source)
    return max((int(offset) + 8 for offset in offsets), default=0)


def copies(program: str) -> list[int]:
    """Return the bytes of each `copy` of an optimised program, also inside of fusions."""
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", program)
    return [_BYTES[kind] * _size(shape) for kind, shape in found]


def made_sizes(program: str, kinds: Collection[str]) -> set[int]:
    """Return the sizes of the arrays of these types that kernels of an optimised program write."""
    found = set()
    for results in _results(program):
        found |= {_size(shape) for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", results) if kind in kinds}
    return found


def widest(program: str, length: int) -> int:
    """Return the bytes of the largest array with an axis of this length that kernels of an optimised program write.

    What is inside of a fusion is never written, and parameters and views are no kernel's.
    """
    found = 0
    for results in _results(program):
        for kind, shape in re.findall(r"(\w+)\[([\d,]+)\]", results):
            found = max(found, _BYTES.get(kind, 1) * _size(shape) if str(length) in shape.split(",") else 0)
    return found


def _results(program: str) -> Iterator[str]:
    """Yield the types of what each kernel writes."""
    fused = False
    for line in program.splitlines():
        if line.endswith("{"):
            fused = any(part in line.split("(")[0] for part in ("fused_", "wrapped_", "gemm_fusion_"))
        result = re.search(r"= (.*?) ([a-z][\w-]*)\(", line)
        if not fused and result is not None and result[2] not in _VIEWS:
            yield result[1]


def _size(shape: str) -> int:
    return math.prod(int(length) for length in shape.split(",") if length)


@dataclass(frozen=True)
class Launch:
    """A kernel of an optimised program: its name scopes, and whether all its results are integers or booleans."""

    scope: tuple[str, ...]
    integers: bool

    @property
    def layer(self) -> str | None:
        """The scope of the layer that the kernel belongs to."""
        return next((part for part in self.scope if part.startswith("layer_")), None)


def launches(program: str) -> list[Launch]:
    """Return the kernels of an optimised program: its fusions and custom calls that have a name scope."""
    found = re.findall(r"= (\S+|\([^()]*\)) (?:fusion|custom-call)\(.*?op_name=\"([^\"]*)\"", program)
    return [Launch(tuple(name.split("/")), {*re.findall(r"([a-z]\w*)\[", kind)} <= _INTEGERS) for kind, name in found]


def top_level(thunks: str) -> list[str]:
    """Return the kinds of the outermost of XLA's thunks, which the host launches; see `device.thunks`."""
    return re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE)

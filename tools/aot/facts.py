"""What compiled kernels and programs are made of, read from what the compilers print. Knows no jax."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

SMEM_BYTES = 232_448  # that one thread block may use on Hopper
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
_INTEGERS = {"pred", "s8", "u8", "s32", "u32", "s64", "u64"}
_SM_SMEM, _SM_REGISTERS, _SM_THREADS = 233_472, 65_536, 2_048


@dataclass(frozen=True)
class KernelFacts:
    """One compiled kernel.

    Attributes:
        registers: per thread, when the kernel starts.
        spills: bytes of registers stored in memory.
        smem: bytes of shared memory.
        threads: per thread block.
        wgmma, tma: instructions in PTX: matrix products, and copies of boxes between global and shared memory.
    """

    name: str
    registers: int
    spills: int
    smem: int
    threads: int
    wgmma: int
    tma: int

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that fit on a multiprocessor: registers go in lots of 8, each block takes 1 KB of its own."""
        by_registers = _SM_REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return min(by_registers, _SM_SMEM // (self.smem + 1_024), _SM_THREADS // self.threads)

    def faults(self) -> list[str]:
        """What a Hopper attention kernel must not be."""
        return [
            *([f"{self.spills} bytes spilled"] if self.spills else []),
            *([f"{self.smem} bytes of shared memory"] if self.smem > SMEM_BYTES else []),
            *([] if self.wgmma else ["no WGMMA"]),
            *([] if self.tma else ["no TMA"]),
            *([] if self.blocks_per_sm else ["does not fit on a multiprocessor"]),
        ]


def parse(text: str) -> Iterator[KernelFacts]:
    """Facts of each kernel in what MOSAIC_GPU_DUMP_PTX and MOSAIC_GPU_DUMP_PTXAS print: PTX, then ptxas' report.

    Raises ValueError where a kernel's report is missing.
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
            source.count("wgmma.mma_async"),
            source.count("cp.async.bulk.tensor"),
        )


def _smem(source: str) -> int:
    """The last barrier lies behind all arrays in shared memory, and takes eight bytes.

    Its address is a constant or, where barriers are found by index, a sum that is made to initialise it.
    """
    offsets = re.findall(r"__dynamic_shmem__0\+(\d+)", source)
    for address in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", source):
        offsets += re.findall(rf"add\.s32\s+{address}, %r\d+, (\d+);", source)
    return max((int(offset) + 8 for offset in offsets), default=0)


def copies(program: str) -> list[int]:
    """Bytes that each `copy` of an optimised program makes, those inside of fusions too."""
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", program)
    return [_BYTES[kind] * math.prod(int(length) for length in shape.split(",") if length) for kind, shape in found]


@dataclass(frozen=True)
class Launch:
    """A kernel that an optimised program launches: its name scopes, and whether it gives integers and booleans only."""

    scope: tuple[str, ...]
    integers: bool

    @property
    def layer(self) -> str | None:
        """The layer it belongs to."""
        return next((part for part in self.scope if part.startswith("layer_")), None)


def launches(program: str) -> list[Launch]:
    """Kernels by what they were in the source: fusions and custom calls of an optimised program, but for its tuples."""
    found = re.findall(r"= (\S+|\([^()]*\)) (?:fusion|custom-call)\(.*?op_name=\"([^\"]*)\"", program)
    return [Launch(tuple(name.split("/")), {*re.findall(r"([a-z]\w*)\[", kind)} <= _INTEGERS) for kind, name in found]


def top_level(thunks: str) -> list[str]:
    """Kinds of what the host launches: the outermost thunks of XLA's sequence, a thunk a line, inner ones indented."""
    return re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE)

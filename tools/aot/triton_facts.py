"""Facts about a compiled Triton kernel, and whether it fits a GPU. Imports no jax and no Triton."""

import re
from dataclasses import dataclass
from pathlib import Path

_TUNING = Path(__file__).parent.parent.parent / "pallas_kernels" / "tuning"


@dataclass(frozen=True)
class Gpu:
    """A GPU to compile for.

    Attributes:
        target: its target configuration for XLA.
        arch: its name for ptxas.
        smem: bytes of shared memory that one thread block may use.
        sm_smem, sm_registers, sm_threads: bytes of shared memory, registers and threads of a multiprocessor.
        sms: multiprocessors.
    """

    name: str
    target: str
    arch: str
    smem: int
    sm_smem: int
    sm_registers: int
    sm_threads: int
    sms: int

    @classmethod
    def of(cls, target: str) -> "Gpu":
        """Read the GPU's sizes from a target configuration."""

        def number(pattern: str) -> int:
            return int(_find(rf"{pattern}: (\d+)", target))

        capability = f"{number('major')}{number('minor')}"
        return cls(
            _find(r'device_description_str: "NVIDIA (\w+)"', target),
            target,
            f"sm_{capability}a" if capability in ("90", "100") else f"sm_{capability}",
            number("shared_memory_per_block_optin"),
            number("shared_memory_per_core"),
            number("registers_per_core_limit"),
            number("threads_per_core_limit"),
            number("core_count"),
        )


def gpu(name: str) -> Gpu:
    """Return the GPU of a file in pallas_kernels/tuning."""
    return Gpu.of((_TUNING / f"{name}.txtpb").read_text())


@dataclass(frozen=True)
class TritonFacts:
    """One compiled kernel.

    Attributes:
        registers: per thread.
        spills: bytes of registers stored in memory.
        smem: bytes of shared memory.
        threads: per thread block.
        products: instructions of the matrix units in the PTX: mma.sync, wgmma or tcgen05.
        under_way: groups of asynchronous copies that may be unfinished when the kernel waits for another. 0: no copy
            runs while the kernel computes.
    """

    registers: int
    spills: int
    smem: int
    threads: int
    products: int
    under_way: int

    @classmethod
    def of(cls, ptx: str, report: str, smem: int) -> "TritonFacts":
        """Read the facts from a kernel's PTX and the report of `ptxas -v`.

        Raises ValueError if one of them has another form.
        """
        return cls(
            int(_find(r"Used (\d+) registers", report)),
            int(_find(r"(\d+) bytes spill stores", report)),
            smem,
            int(_find(r"\.reqntid (\d+)", ptx)),
            len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
            max((int(groups) for groups in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
        )

    def blocks_per_sm(self, gpu: Gpu) -> int:
        """Return how many thread blocks fit on a multiprocessor.

        Registers are allocated eight at a time, and each block takes 1 KB of shared memory beside its own.
        """
        by_registers = gpu.sm_registers // (-(-self.registers // 8) * 8 * self.threads)
        return min(by_registers, gpu.sm_smem // (self.smem + 1_024), gpu.sm_threads // self.threads)

    def faults(self, gpu: Gpu, *, matrix_units: bool = True) -> list[str]:
        """Return the checks of an attention kernel that fail. Products in float32 do not use `matrix_units`."""
        return [
            *([f"{self.spills} bytes spilled"] if self.spills else []),
            *([f"{self.smem} bytes of shared memory, of {gpu.smem}"] if self.smem > gpu.smem else []),
            *(["no matrix units"] if matrix_units and not self.products else []),
            *([] if self.under_way else ["no copy runs while the kernel computes"]),
            *([] if self.blocks_per_sm(gpu) else ["does not fit on a multiprocessor"]),
        ]


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in {text[:80]!r}")
    return found[1]

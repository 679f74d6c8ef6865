"""The constants of the prediction, all of them: value, range, unit and source of each. Measurements alone change them.

No figure of jswa on a GPU exists. Two constants were measured on an H200 with other programs (a copy and a matrix
product). Kernel counts come from the compiler. All others are estimates, and their ranges say how far they are trusted.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

_ESTIMATE = "estimate"


def _constant(value: float, low: float, high: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"low": low, "high": high, "unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """The constants of one machine. A share is that of `copy` (bytes) or of `matmul` (FLOP)."""

    copy: float = _constant(4.3e12, 4.1e12, 4.5e12, "bytes/s", "a large copy, measured without jswa; data sheet: 4.8")
    matmul: float = _constant(
        790e12, 720e12, 830e12, "FLOP/s", "a large bfloat16 product, measured without jswa; data sheet: 989"
    )
    gemm_start: float = _constant(
        2e-6,
        1e-6,
        4e-6,
        "s per kernel",
        f"{_ESTIMATE}: first loads and last stores of a product in a CUDA graph",
    )
    gemm_bytes: float = _constant(0.90, 0.80, 0.95, "share", f"{_ESTIMATE}: dense matrices of 16 bits, few tokens")
    gemm_bytes_8: float = _constant(
        0.65, 0.40, 0.85, "share", f"{_ESTIMATE}: dense matrices of 8 bits, widened inside of XLA's Triton products"
    )
    gemm_flops: float = _constant(0.82, 0.70, 0.92, "share", f"{_ESTIMATE}: dense matrices, many tokens")
    attention_start: float = _constant(
        4e-6, 2.5e-6, 6e-6, "s per kernel", "published: 5.6 to 16 µs for one row of 1,024 keys"
    )
    attention_bytes: float = _constant(
        0.88, 0.75, 0.93, "share", f"{_ESTIMATE}; the best published figure on an H200 is 0.93 (TileOPs)"
    )
    attention_bytes_8: float = _constant(
        0.65, 0.50, 0.75, "share", f"{_ESTIMATE}: pages of 8 bits, one thread block on a multiprocessor"
    )
    attention_flops: float = _constant(
        0.68, 0.50, 0.80, "share", f"{_ESTIMATE}; tokamax on an H100, 16k causal, heads of 128: 636 TFLOP/s"
    )
    attention_flops_64: float = _constant(
        0.50, 0.35, 0.64, "share", f"{_ESTIMATE}; tokamax on an H100, 16k causal, heads of 64: 502 TFLOP/s"
    )
    attention_edge: float = _constant(
        128, 64, 192, "keys", "arithmetic: keys beside its window that a tile of prefill multiplies"
    )
    experts_bytes: float = _constant(0.85, 0.70, 0.92, "share", f"{_ESTIMATE}: experts of 16 bits, few tokens")
    experts_bytes_4: float = _constant(
        0.80, 0.65, 0.90, "share", f"{_ESTIMATE}: MXFP4 experts, tiles of at most 16 rows, copies of 6 KB"
    )
    experts_bytes_4_wide: float = _constant(
        0.54, 0.40, 0.67, "share", "cycles of loader and unpacking, wider tiles, copies of 2 KB"
    )
    experts_flops: float = _constant(0.60, 0.45, 0.75, "share", f"{_ESTIMATE}; tokamax on an H100: 400 to 461 TFLOP/s")
    experts_flops_4: float = _constant(
        0.44, 0.30, 0.55, "share", f"{_ESTIMATE}: MXFP4, many tokens; each tile of 128 rows unpacks"
    )
    small_kernel: float = _constant(
        2.7e-6, 1.7e-6, 4e-6, "s per kernel", f"{_ESTIMATE}: a small kernel in a CUDA graph, start to start"
    )
    small_bytes: float = _constant(0.75, 0.60, 0.90, "share", f"{_ESTIMATE}: elementwise kernels, many tokens")
    logits_bytes: float = _constant(0.88, 0.60, 0.95, "share", f"{_ESTIMATE}: kernels that read or write all logits")
    random_number: float = _constant(
        7.5e-12, 5e-12, 10e-12, "s per number", "arithmetic: 110 instructions of threefry and Gumbel"
    )
    between_steps: float = _constant(
        15e-6, 5e-6, 50e-6, "s per step", f"{_ESTIMATE}: the device idles between two command buffers"
    )


@dataclass(frozen=True)
class Machine:
    """A machine with constants: beginnings of its names in jax and torch, and bytes of memory as it reports them."""

    name: str
    devices: tuple[str, ...]
    memory: float
    constants: Constants


H200 = Machine("H200", ("NVIDIA H200", "H200"), 149e9, Constants())
MACHINES = {machine.name: machine for machine in (H200,)}


def machine_of(device: str) -> Machine | None:
    """Return the machine of a device's name; None for a CPU, for which there are no constants.

    Raises ValueError, which names the device, for any other.
    """
    for machine in MACHINES.values():
        if device.startswith(machine.devices):
            return machine
    if device.lower() in ("cpu", "x86_64", "aarch64", ""):
        return None
    raise ValueError(f"no constants for the device {device!r}: only for {', '.join(MACHINES)}; name one by --machine")


def at_each_end(constants: Constants) -> list[tuple[str, Constants, Constants]]:
    """Return (name, constants with it at its low end, and at its high end) for each constant."""
    return [
        (each.name, replace(constants, **{each.name: each.metadata["low"]}),
         replace(constants, **{each.name: each.metadata["high"]}))
        for each in fields(Constants)
    ]  # fmt: skip


def table() -> list[str]:
    """Return a table of all constants as lines of Markdown."""
    lines = ["| constant | value | range | unit | source |", "| --- | ---: | --- | --- | --- |"]
    for each in fields(Constants):
        low, high = (_number(each.metadata[end]) for end in ("low", "high"))
        unit, source = each.metadata["unit"], each.metadata["source"]
        lines.append(f"| `{each.name}` | {_number(each.default)} | {low} to {high} | {unit} | {source} |")
    return lines


def _number(value: Any) -> str:
    return f"{value:.3g}".replace("e+", "e").replace("e-0", "e-")

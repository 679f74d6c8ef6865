"""The constants of the prediction, all of them: value, range, unit and source of each. Measurements alone change them.

Two constants were measured on an H200 with other programs (a copy and a matrix product), and those that name "traces"
or "tunings" with jswa, in benchmarks/results/h200. Kernel counts come from the compiler. All others are estimates, and
their ranges say how far they are trusted.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

_ESTIMATE = "estimate"
_TRACES, _TUNINGS = "measured (traces)", "measured (tunings)"


def _constant(value: float, low: float, high: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"low": low, "high": high, "unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """The constants of one machine. A share is that of `copy` (bytes) or of `matmul` (FLOP)."""

    copy: float = _constant(4.3e12, 4.1e12, 4.5e12, "bytes/s", "a large copy, measured without jswa; data sheet: 4.8")
    matmul: float = _constant(
        790e12, 720e12, 830e12, "FLOP/s", "a large bfloat16 product, measured without jswa; data sheet: 989"
    )
    gemm_start: float = _constant(2e-6, 1e-6, 4e-6, "s per kernel", f"{_TRACES}: what a matrix of no bytes would take")
    gemm_bytes: float = _constant(
        0.90,
        0.66,
        0.96,
        "share",
        f"{_TRACES}, dense matrices of 16 bits: 0.66 of 24 MB, 0.82 of 29, 0.96 of 88 and 1,158",
    )
    gemm_bytes_8: float = _constant(
        0.65, 0.40, 0.85, "share", f"{_ESTIMATE}: dense matrices of 8 bits, widened inside of XLA's Triton products"
    )
    gemm_flops: float = _constant(0.82, 0.70, 0.92, "share", f"{_ESTIMATE}: dense matrices, many tokens")
    attention_start: float = _constant(
        4e-6, 3.6e-6, 5.4e-6, "s per kernel", f"{_TRACES}: one row of 1,536 keys 3.6, windows of 64 rows 5.4"
    )
    attention_bytes: float = _constant(
        0.82, 0.78, 0.87, "share", f"{_TRACES}, 64 rows of 1,536 keys: mosaic 0.78, mosaic_splits 0.87"
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
        0.60, 0.56, 0.61, "share", f"{_TUNINGS}, MXFP4 experts, 64 tokens: mosaic 0.60, mosaic_overlap 0.56 to 0.58"
    )
    experts_bytes_4_wide: float = _constant(
        0.456, 0.34, 0.47, "share", f"{_TUNINGS}, MXFP4 experts, 256 tokens: mosaic_overlap 0.456, mosaic 0.34"
    )
    experts_flops: float = _constant(0.60, 0.45, 0.75, "share", f"{_ESTIMATE}; tokamax on an H100: 400 to 461 TFLOP/s")
    experts_flops_4: float = _constant(
        0.44, 0.30, 0.55, "share", f"{_ESTIMATE}: MXFP4, many tokens; each tile of 128 rows unpacks"
    )
    small_kernel: float = _constant(
        1.9e-6, 1.7e-6, 3.5e-6, "s per kernel", f"{_TRACES}, start to start: XLA's 1.9, fewer kernels that do more 3.5"
    )
    small_bytes: float = _constant(0.75, 0.60, 0.90, "share", f"{_ESTIMATE}: elementwise kernels, many tokens")
    logits_bytes: float = _constant(0.88, 0.60, 0.95, "share", f"{_ESTIMATE}: kernels that read or write all logits")
    random_number: float = _constant(
        7.5e-12, 5e-12, 10e-12, "s per number", "arithmetic: 110 instructions of threefry and Gumbel"
    )
    between_steps: float = _constant(
        110e-6, 60e-6, 150e-6, "s per step", f"{_TRACES}: 85 before what two conditionals run, 25 between two steps"
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

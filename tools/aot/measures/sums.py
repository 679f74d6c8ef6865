"""What XLA itself adds up in an optimised program: products, and sums of floating-point numbers. Imports no jax."""

from tools.aot.measures.traffic import Instruction, Program

_FLOATS = ("f64", "f32", "f16", "bf16", "f8e4m3fn")
_PRODUCTS = ("dot", "convolution")
_SUMS = ("reduce", "reduce-window", "all-reduce", "sort")


def float_sums(program: Program) -> list[str]:
    """Return kind and scope of each operation in which XLA adds up floating-point numbers along an axis.

    Custom calls are not looked into. Scatters are left out: of a row's biases, which have distinct columns, a cell gets
    one.
    """
    every = [instruction for computation in program.computations.values() for instruction in computation.values()]
    return sorted(f"{one.kind} in {'/'.join(one.scope)}" for one in every if _adds(program, one))


def _adds(program: Program, instruction: Instruction) -> bool:
    if instruction.kind in _PRODUCTS:
        return instruction.results[0].kind in _FLOATS
    combines = (program.computations.get(name, {}) for name in instruction.calls)
    return instruction.kind in _SUMS and any(
        step.kind in ("add", "multiply") and step.results[0].kind in _FLOATS
        for computation in combines
        for step in computation.values()
    )

"""What the kernels of an optimised program read and write, array by array. Imports no jax.

XLA counts no bytes for a device that is not there, and would count the whole of an array of which a kernel reads a few
rows. Here a kernel reads each operand once, and writes each result once, but for

    gathers and slices      of an operand that nothing else in a fusion uses: they read what they return
    updates in place        of an operand by a scatter or a dynamic-update-slice: they write the update
    custom calls            their authors know: see `Reads`; also those that a fusion gives slices of arrays

Only one branch of a conditional runs, so all sums are ranges.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8e4m3fn": 8, "token": 0, "opaque": 0}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"}
_LINE = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


class Array(NamedTuple):
    """An array's type and shape."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        bits = _BITS.get(self.kind) if self.kind in _BITS else int(re.sub(r"\D", "", self.kind))
        return math.prod(self.shape) * (bits or 0) // 8


# Bytes that a custom call reads or writes of an array.
Reads = Callable[[Array], float]


class Range(NamedTuple):
    """A sum over the kernels that run: if conditionals take their cheapest branches, and their dearest."""

    least: float
    most: float


@dataclass(frozen=True)
class Instruction:
    """A line of a program: its results, and the names of its operands and of the computations that it calls."""

    name: str
    results: tuple[Array, ...]
    kind: str
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    scope: tuple[str, ...]


# The instructions of a computation by name, in order. The last one is its result.
Computation = dict[str, Instruction]


class Program(NamedTuple):
    """The computations of a program by name."""

    computations: dict[str, Computation]
    entry: str


def parse_program(text: str) -> Program:
    """Parse an optimised program. Raises ValueError if it has no entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in text.splitlines():
        begin = re.match(r"^(ENTRY )?%(\S+) \(.*\{$", line)
        if begin:
            current = computations.setdefault(begin[2], {})
            entry = begin[2] if begin[1] else entry
        elif found := _LINE.match(line):
            current[found[1]] = _instruction(found[1], found[2])
    if not entry:
        raise ValueError(f"no program: {text[:80]!r}")
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    """Parse `TYPE KIND(OPERANDS), ATTRIBUTES`, where a tuple's type is in brackets."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    kind, rest = text[end:].strip().split("(", 1)
    inside = _closing("(" + rest) - 1
    attributes = rest[inside:]
    called = re.search(r"branch_computations=\{([^}]*)\}", attributes)
    calls = (
        called[1]
        if called
        else " ".join(
            re.findall(r"(?:calls|true_computation|false_computation|to_apply|body)=(%\S+?)[,}\s]", attributes + " ")
        )
    )
    scope = re.search(r'op_name="([^"]*)"', attributes)
    return Instruction(
        name,
        _arrays(text[:end]),
        kind.strip(),
        tuple(re.findall(r"%([^\s,)]+)", rest[:inside])) if kind.strip() not in ("constant", "parameter") else (),
        tuple(re.findall(r"%([^\s,]+)", calls)),
        tuple(scope[1].split("/")) if scope else (),
    )


def _closing(text: str) -> int:
    """Return the index behind the bracket that closes the first one."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"a bracket is not closed in {text[:80]!r}")


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(Array(kind, tuple(map(int, filter(None, shape.split(","))))) for kind, shape in _ARRAY.findall(text))


def bytes_moved(program: Program, reads: Reads) -> Range:
    """Return the bytes that all kernels read and write."""
    return _sum(program, program.entry, lambda _, sizes: sum(sizes), reads)


def arrays_moved(program: Program, scope: str, size: int) -> Range:
    """Return how often kernels in a name scope, or in none, read or write an array of at least `size` bytes.

    Copies that XLA adds have no scope.
    """

    def count(instruction: Instruction, sizes: list[float]) -> float:
        return sum(found >= size for found in sizes) if scope in instruction.scope or not instruction.scope else 0

    return _sum(program, program.entry, count, lambda array: array.size)


def _sum(program: Program, name: str, cost: Callable[[Instruction, list[float]], float], reads: Reads) -> Range:
    """Sum the cost of a computation's kernels, from the instruction and the bytes of each of its accesses."""
    least = most = 0.0
    for instruction in program.computations[name].values():
        if instruction.kind in ("conditional", "call", "while", "async-start"):
            branches = [_sum(program, call, cost, reads) for call in instruction.calls]
            least += min(branch.least for branch in branches)
            most += max(branch.most for branch in branches)
        elif instruction.kind not in _FREE:
            own = cost(instruction, accesses(program, name, instruction, reads))
            least, most = least + own, most + own
    return Range(least, most)


def accesses(program: Program, computation: str, instruction: Instruction, reads: Reads) -> list[float]:
    """Return the bytes of each array that a kernel reads or writes."""
    inside = program.computations[computation]
    operands = [inside[name].results for name in instruction.operands]
    if instruction.kind == "custom-call":
        return [reads(array) for array in (*sum(operands, ()), *instruction.results)]
    if instruction.kind != "fusion":
        return [float(array.size) for array in (*sum(operands, ()), *instruction.results)]
    fused = program.computations[instruction.calls[0]]
    if (root := list(fused.values())[-1]).kind == "custom-call":  # of slices, which it is given by their addresses
        return accesses(program, instruction.calls[0], root, reads)
    parameters = [line for line in fused.values() if line.kind == "parameter"]
    assert len(parameters) == len(operands), instruction.name
    found = [_read(fused, parameter) for parameter in parameters]
    return found + _written(fused, list(fused.values())[-1])


def _read(fused: Computation, value: Instruction) -> float:
    """Return the bytes that a fusion reads of one of its values."""
    whole = float(sum(array.size for array in value.results))
    total = 0.0
    for user in (line for line in fused.values() if value.name in line.operands):
        first = user.operands[0] == value.name and user.operands.count(value.name) == 1
        if user.kind == "bitcast":
            total += _read(fused, user)
        elif user.kind in ("gather", "dynamic-slice", "slice") and first:
            total += sum(array.size for array in user.results)
        elif not (user.kind in ("scatter", "dynamic-update-slice") and first):
            return whole
    return min(whole, total)


def _written(fused: Computation, root: Instruction) -> list[float]:
    """Return the bytes that a fusion writes of each result. Updates in place write what they are given."""
    if root.kind == "tuple":
        return [size for name in root.operands for size in _written(fused, fused[name])]
    if root.kind == "bitcast":
        return _written(fused, fused[root.operands[0]])
    if root.kind in ("scatter", "dynamic-update-slice"):
        update = root.operands[2 if root.kind == "scatter" else 1]
        return [float(array.size) for array in fused[update].results]
    return [float(array.size) for array in root.results]

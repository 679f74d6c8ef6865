"""Runs the few lines of PTX by which a kernel unpacks weights, on numpy's integers: one thread, 32-bit registers."""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

_SCOPE = re.compile(r"^\{+|\}+$")
_AND_OR = 0xEA  # the table of (a & b) | c


def run(text: str, *operands: int) -> int:
    """Return what the instructions leave in $0; `operands` are $1, $2, ….

    Raises KeyError for an instruction or a register that it does not know, and AssertionError for another table of
    lop3 than that of (a & b) | c.
    """
    registers = {f"${number}": value for number, value in enumerate(operands, start=1)}
    for line in filter(None, (_SCOPE.sub("", part.strip()).strip() for part in text.split(";"))):
        name, rest = line.split(maxsplit=1)
        if name != ".reg":
            target, *sources = (word.strip() for word in rest.split(","))
            registers[target] = _INSTRUCTIONS[name](*(_value(word, registers) for word in sources)) & 0xFFFF_FFFF
    return registers["$0"]


def pair(word: int) -> tuple[float, float]:
    """Return the two bfloat16 of a word, the low one first."""
    low, high = np.array([word & 0xFFFF, word >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    return float(low), float(high)


def _value(word: str, registers: dict[str, int]) -> int:
    """Return a register, or a constant: a number, a product, or a difference of those."""
    if not word[0].isdigit():
        return registers[word]
    first, *others = (np.prod([int(factor, 0) for factor in term.split("*")]) for term in word.split("-"))
    return int(first - sum(others))


def _rounded(of: Callable[..., float]) -> Callable[..., int]:
    """Return an instruction on both halves of words, each rounded once to bfloat16."""

    def instruction(*words: int) -> int:
        exact = np.array([of(*numbers) for numbers in zip(*map(pair, words), strict=True)])
        low, high = exact.astype(ml_dtypes.bfloat16).view(np.uint16)
        return int(low) | int(high) << 16

    return instruction


def _lop3(a: int, b: int, c: int, table: int) -> int:
    assert table == _AND_OR, hex(table)
    return a & b | c


def _prmt(a: int, b: int, selector: int) -> int:
    both = a | b << 32
    return sum((both >> 8 * (selector >> 4 * byte & 7) & 255) << 8 * byte for byte in range(4))


_INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "prmt.b32": _prmt,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "mul.rn.bf16x2": _rounded(lambda a, b: a * b),
    "fma.rn.bf16x2": _rounded(lambda a, b, c: a * b + c),
    "sub.rn.bf16x2": _rounded(lambda a, b: a - b),
}

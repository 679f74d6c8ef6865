"""Bounds of numbers and of objects in a JSON Schema, as llguidance keeps them.

A value is checked by programs that read numbers as floating point, in which 18.00000000000000000001 is 18.
"""

import math
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any, TypeGuard

_FINEST = 2**10  # the denominator of a multipleOf
_STEP = 1e-9  # between an exclusive bound and the first number beyond it
_INT64 = 2**63
_EXACT = 2**53  # floating point has all whole numbers up to it
_RANGES = (_INT64 - 1, 2 * _INT64 - 1)  # the largest numbers of 64 bits, which generators write as bounds
_LEAST = 1024 - _INT64  # llguidance negates bounds, which -2**63 does not survive


class SchemaError(Exception):
    """A schema is refused: `pointer` is the place, `reason` says why."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"{f'at {pointer}: ' if pointer else ''}{reason}")
        self.pointer = pointer
        self.reason = reason


def make_exact(node: dict[str, Any], at: str) -> None:
    """Change the bounds of a schema into those that every checker sees kept. Raises SchemaError if there are none.

    Args:
        at: the pointer of the schema.
    """
    kinds = node.get("type")
    whole = {"integer", "number"} & set(kinds if isinstance(kinds, list) else [kinds]) == {"integer"}
    _check_numbers(node, at, whole=whole)
    for key, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        if _is_number(bound := node.get(key)):
            nearest = _next_whole(bound, sign) if whole else _next(bound, sign)
            other = node.get(inclusive)
            node[inclusive] = nearest if not _is_number(other) else max(other * sign, nearest * sign) * sign
            del node[key]
    for key, sign in (("minimum", 1), ("maximum", -1)):
        if _is_number(bound := node.get(key)):
            node[key] = _in_64_bits(bound, sign, f"{at}/{key}", whole=whole)
    step = node.get("multipleOf")
    if isinstance(step, float) and step.as_integer_ratio()[1] > _FINEST:
        reason = f"{step} is no whole number or binary fraction: its multiples are not exact"
        raise SchemaError(f"{at}/multipleOf", reason)
    least, required = node.get("minProperties"), node.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if _is_number(least) and least > named + 1:
        raise SchemaError(f"{at}/minProperties", "is more than the required properties and one: a key may come twice")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(node: dict[str, Any], at: str, *, whole: bool) -> None:
    """Raise SchemaError for bounds and constants that floating point does not have. `whole`: numbers are integers."""
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if _is_number(bound := node.get(key)) and not (whole and abs(bound) > 2 * _INT64):
            _check_exact(bound, f"{at}/{key}")
    for key in ("const", "enum"):
        for number in _numbers_in(node.get(key)):
            if not _LEAST <= number < _INT64:  # a smaller one would be the end of the process
                raise SchemaError(f"{at}/{key}", f"{str(number)[:40]} is beyond 64 bits")
            _check_exact(number, f"{at}/{key}", ranges=())
            if isinstance(number, float) and abs(number) >= _EXACT and _as_written(number) != int(number):
                raise SchemaError(f"{at}/{key}", f"{number} is written with fewer digits than the number has")


def _check_exact(number: float, at: str, ranges: Collection[int] = _RANGES) -> None:
    """Raise SchemaError for a number that floating point does not have. `ranges`: those that may be rounded."""
    try:
        exact = number in ranges or isinstance(number, float) or int(float(number)) == number
    except OverflowError:
        exact = False
    if not exact:
        raise SchemaError(at, f"{str(number)[:40]} is no number of floating point, in which texts are compared with it")


def _numbers_in(value: Any) -> Iterator[int | float]:
    left = [value]
    while left:
        one = left.pop()
        if _is_number(one):
            yield one
        elif isinstance(one, dict | list):
            left.extend(one.values() if isinstance(one, dict) else one)


def _inward(bound: float, sign: int, *, whole: bool) -> float:
    """Return the number of floating point that is nearest to a bound, and not beyond it.

    llguidance writes whole numbers with all of their digits, and others with as few as there may be.
    """
    rounded, value = float(bound), Decimal if whole else _as_written
    while (value(rounded) - Decimal(bound)) * sign < 0:
        rounded = math.nextafter(rounded, math.inf * sign)
    return rounded


def _as_written(number: float) -> Decimal:
    """Return what llguidance writes for a number: of the decimal numbers that are read as it, the shortest."""
    return Decimal(repr(number))


def _next_whole(bound: float, sign: int) -> int:
    """Return the first whole number above (`sign` = 1) or below (-1) a bound."""
    return math.floor(bound) + 1 if sign > 0 else math.ceil(bound) - 1


def _next(bound: float, sign: int) -> float:
    """Return a number a little above or below a bound, with few digits: llguidance reads 17 digits inexactly."""
    try:
        exact = float(bound)
    except OverflowError:
        return bound
    relative = abs(exact) * 1e-6 if exact else _STEP
    step = max(math.ulp(exact) * 8, min(_STEP, relative))
    digits = -math.floor(math.log10(step))
    return round(exact + sign * 10.0**-digits * (1 if 10.0**-digits >= step else 10), max(0, digits))


def _in_64_bits(bound: float, sign: int, at: str, *, whole: bool) -> float:
    """Return a bound as floating point has it, not beyond the given one. Raises SchemaError.

    Args:
        sign: 1 for the least value, -1 for the largest.
        whole: only whole numbers are meant.
    """
    if (sign > 0 and bound > _INT64 - 1) or (sign < 0 and bound < _LEAST):
        raise SchemaError(at, "is beyond 64 bits")
    if not whole:
        return max(_LEAST, _inward(bound, sign, whole=False))
    value = math.ceil(bound) if sign > 0 else math.floor(bound)
    value = max(_LEAST, min(_INT64 - 1, value))
    # llguidance rounds the largest whole number up to 2**63, and down again.
    return value if value == _INT64 - 1 else int(_inward(value, sign, whole=True))

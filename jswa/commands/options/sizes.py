"""Numbers of tokens and bytes as people write them: 8k, 32K, 64G, 1.5GiB."""

import re
from fractions import Fraction
from pathlib import Path

from jswa.errors import ConfigError

_POWERS = "kmgt"
_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT]?)")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:([kKmMgGtT])(i?B)?|B)?")
_DIGITS = 30  # so that no text makes a number that takes time


def tokens_in(text: str) -> int:
    """Return the number of a text such as 8192, 8k (8,000), 25.6k or 8K (8,192), as vLLM reads it.

    Raises ValueError.
    """
    found = _TOKENS.fullmatch(text) if len(text) <= _DIGITS else None
    if found is None:
        raise ValueError(f"{text:.40} must be a whole number, or a number with k, M or G after it, such as 8k or 32K")
    return _whole(text, found[1], found[2], binary=found[2].isupper())


def bytes_in(text: str) -> int:
    """Return the bytes of a text such as 64G or 64GiB (2^30 each), 64GB or 64g (10^9 each), 1.5GiB or 1000.

    Raises ValueError.
    """
    found = _BYTES.fullmatch(text) if len(text) <= _DIGITS else None
    if found is None:
        raise ValueError(f"{text:.40} must be a whole number, or a number with a unit, such as 64G, 64GB or 1.5GiB")
    unit, end = found[2] or "", found[3]
    return _whole(text, found[1], unit, binary=end == "iB" or (end is None and unit.isupper()))


def folder_and_bytes(name: str, given: object) -> tuple[Path, int] | None:
    """Return the folder and the bytes of an option PATH:BYTES; None if it is not given. Raises ConfigError."""
    if given is None:
        return None
    folder, colon, size = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    try:
        most = bytes_in(size) if folder and colon else 0
    except ValueError:
        most = 0
    if not 0 < most < 10**18:
        raise ConfigError(name, given, "must be PATH:BYTES, a folder and a size of at least 1, such as /kv:500G")
    return Path(folder).expanduser(), most


def _whole(text: str, number: str, unit: str, *, binary: bool) -> int:
    power = _POWERS.index(unit.lower()) + 1 if unit else 0
    found = Fraction(number) * (1024 if binary else 1000) ** power
    if found.denominator != 1:
        raise ValueError(f"{text:.40} is {float(found):g}, which is no whole number")
    return int(found)

"""Typed reading of a config's keys: a wrong type or range raises an error that names file, key, value and limit."""

from dataclasses import dataclass
from typing import Any

from jswa.errors import CheckpointError
from jswa.storage.json_object import shown

_HIGHEST = 2**31 - 1
_WIDEST = 2**20
_LARGEST = 1e300  # a whole number may be too large for a float at all


@dataclass(frozen=True)
class Fields:
    """A JSON object and what to call it in errors. A key that is null counts as absent, except in `optional_*`."""

    raw: dict[str, Any]
    where: str

    def integer(self, key: str, default: int | None, *, low: int = 1, high: int = _HIGHEST) -> int:
        """A whole number in [low, high]; the default must be given or the key present."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(key, value, f"must be a whole number from {low} to {high}")
        return value

    def width(self, key: str, default: int | None) -> int:
        """A size of one axis of a matrix."""
        return self.integer(key, default, high=_WIDEST)

    def optional_width(self, key: str, default: int | None) -> int | None:
        """A size of one axis, or None where the key is null (or absent, with a default of None)."""
        return self.optional_integer(key, default, high=_WIDEST)

    def optional_integer(self, key: str, default: int | None, *, low: int = 1, high: int = _HIGHEST) -> int | None:
        """A whole number, or None where the key is null (or absent, with a default of None)."""
        if key in self.raw and self.raw[key] is None:
            return None
        return None if key not in self.raw and default is None else self.integer(key, default, low=low, high=high)

    def number(self, key: str, default: float | None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise self._wrong(key, value, "must be a finite number above 0")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A finite number above 0, or None where the key is null or absent."""
        return default if self.raw.get(key) is None else self.number(key, default)

    def null_or_number(self, key: str, default: float) -> float | None:
        """A finite number above 0; None where the key is null, the default where it is absent."""
        return None if key in self.raw and self.raw[key] is None else self.number(key, default)

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` finite numbers above 0."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(key, value, f"must list {count} numbers")
        return [Fields({key: one}, self.where).number(key, None) for one in value]

    def boolean(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "must be true or false")
        return value

    def string(self, key: str, default: str | None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "must be a string")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A JSON object; empty where the key is absent or null."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "must be an object")
        return value

    def layer_types(self, default: list[str], *, allowed: tuple[str, ...]) -> list[str]:
        """`layer_types`, one of `allowed` per layer; the default's length is the number of layers."""
        value = self._get("layer_types", default)
        if not isinstance(value, list) or len(value) != len(default) or not set(map(str, value)) <= set(allowed):
            raise self._wrong("layer_types", value, f"must list {len(default)} of {', '.join(allowed)}")
        return value

    def wrong(self, key: str, limit: str) -> CheckpointError:
        """The error for what a key holds."""
        return self._wrong(key, self.raw.get(key), limit)

    def share(self, key: str, default: float | None) -> float | None:
        """A number in (0, 1], or the default where the key is null or absent."""
        value = self.optional_number(key, default)
        if value is not None and value > 1:
            raise self.wrong(key, "must be a number above 0 and at most 1")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: object, limit: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} = {shown(value)}: {limit}")

"""Typed reading of config keys: a wrong type or range raises an error that names file, key, value and limit."""

from dataclasses import dataclass
from typing import Any

from jswa.errors import CheckpointError
from jswa.storage.json_object import shown

_HIGHEST = 2**31 - 1
_WIDEST = 2**20
_LARGEST = 1e300  # larger whole numbers in JSON may overflow a float


@dataclass(frozen=True)
class Fields:
    """A JSON object and its name in errors. Null keys count as absent, except in `optional_*` and `null_or_number`."""

    raw: dict[str, Any]
    where: str

    def integer(self, key: str, default: int | None, *, low: int = 1, high: int = _HIGHEST) -> int:
        """Return a whole number in [low, high]; if the default is None, the key must be present.

        Raises CheckpointError for any other value.
        """
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(key, value, f"must be a whole number from {low} to {high}")
        return value

    def width(self, key: str, default: int | None) -> int:
        """Return the size of one axis of a matrix."""
        return self.integer(key, default, high=_WIDEST)

    def optional_width(self, key: str, default: int | None) -> int | None:
        """Return the size of one axis, or None if the key is null, or absent with a default of None."""
        return self.optional_integer(key, default, high=_WIDEST)

    def optional_integer(self, key: str, default: int | None, *, low: int = 1, high: int = _HIGHEST) -> int | None:
        """Return a whole number, or None if the key is null, or absent with a default of None."""
        if key in self.raw and self.raw[key] is None:
            return None
        return None if key not in self.raw and default is None else self.integer(key, default, low=low, high=high)

    def number(self, key: str, default: float | None) -> float:
        """Return a finite number above 0. Raises CheckpointError for any other value."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise self._wrong(key, value, "must be a finite number above 0")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """Return a finite number above 0, or the default if the key is null or absent."""
        return default if self.raw.get(key) is None else self.number(key, default)

    def null_or_number(self, key: str, default: float) -> float | None:
        """Return a finite number above 0, None if the key is null, or the default if it is absent."""
        return None if key in self.raw and self.raw[key] is None else self.number(key, default)

    def numbers(self, key: str, count: int) -> list[float]:
        """Return a list of `count` finite numbers above 0. Raises CheckpointError for any other value."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(key, value, f"must list {count} numbers")
        return [Fields({key: one}, self.where).number(key, None) for one in value]

    def boolean(self, key: str, default: bool) -> bool:
        """Return True or False. Raises CheckpointError for any other value."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "must be true or false")
        return value

    def string(self, key: str, default: str | None) -> str:
        """Return a string. Raises CheckpointError for any other value."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "must be a string")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return a JSON object, which is empty if the key is absent or null. Raises CheckpointError otherwise."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "must be an object")
        return value

    def layer_types(self, default: list[str], *, allowed: tuple[str, ...]) -> list[str]:
        """Return `layer_types`, one of `allowed` per layer; the default's length is the number of layers.

        Raises CheckpointError for any other value.
        """
        value = self._get("layer_types", default)
        if not isinstance(value, list) or len(value) != len(default) or not set(map(str, value)) <= set(allowed):
            raise self._wrong("layer_types", value, f"must list {len(default)} of {', '.join(allowed)}")
        return value

    def wrong(self, key: str, limit: str) -> CheckpointError:
        """Return the error for the value of a key."""
        return self._wrong(key, self.raw.get(key), limit)

    def share(self, key: str, default: float | None) -> float | None:
        """Return a number in (0, 1], or the default if the key is null or absent.

        Raises CheckpointError for any other value.
        """
        value = self.optional_number(key, default)
        if value is not None and value > 1:
            raise self.wrong(key, "must be a number above 0 and at most 1")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: object, limit: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} = {shown(value)}: {limit}")

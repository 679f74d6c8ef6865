"""The LoRA adapters that an engine has: their names, digests and numbers, and the slots of the reserved room."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jswa.errors import RequestError, UnknownAdapter
from jswa.options.lora import LoraRoom, wrong_adapter_name


class Known(NamedTuple):
    """A loaded adapter.

    Attributes:
        number: its number on the device, from 1. No other adapter of this engine ever gets the same number.
        digest: digest of the adapter's numbers, which is part of the prefix cache's keys (`root_key`).
    """

    number: int
    digest: str


class Adapters:
    """The loaded adapters by name. One thread changes them; other threads may read at any time.

    An adapter is loaded into a slot of the room. When it is unloaded, its name is gone at once, but its slot remains
    taken as long as a request that has the adapter's number is unfinished.

    Args:
        digests: digests of the adapters that the parameters contain from the start, by name, in their order.
        room: the room for further adapters; None: there is none.
    """

    def __init__(self, digests: Mapping[str, str] | None = None, room: LoraRoom | None = None) -> None:
        # Replaced, never changed, because other threads read it.
        self._known = {name: Known(n, digest) for n, (name, digest) in enumerate((digests or {}).items(), start=1)}
        self.room = room
        self._slots: list[int] = [0] * (0 if room is None else room.adapters)  # the number that each slot last had
        self._last = len(self._known)

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the loaded adapters by name, in the order in which they were loaded."""
        return {name: known.digest for name, known in self._known.items()}

    def find(self, name: str) -> Known:
        """Return a loaded adapter. Raises UnknownAdapter."""
        loaded = self._known
        if name not in loaded:
            raise UnknownAdapter("lora", name, self._choices(loaded))
        return loaded[name]

    def require_loaded(self, number: int) -> None:
        """Raise UnknownAdapter if the adapter with this number was unloaded; 0 means no adapter."""
        if number and all(known.number != number for known in self._known.values()):
            raise UnknownAdapter("lora", f"adapter {number}", "was unloaded before the request was queued")

    def require_room(self) -> LoraRoom:
        """Return the room for further adapters. Raises RequestError if there is none."""
        if self.room is None:
            raise RequestError("max_loras", None, "this engine reserves no room for adapters that are loaded later")
        return self.room

    def begin(self, name: str, used: Collection[int], *, replace: bool) -> tuple[int, int]:
        """Return a free slot and an unused number for a new adapter, which `add` then makes known.

        Args:
            used: numbers of the adapters of all unfinished requests.
            replace: the name may be that of a loaded adapter.

        Raises RequestError if the name is wrong or taken, or if no slot is free.
        """
        room, wrong = self.require_room(), wrong_adapter_name(name)
        if wrong is not None:
            raise RequestError("lora_name", name, wrong)
        if name in self._known and not replace:
            limit = "an adapter of this name is loaded: unload it first, or set load_inplace = true"
            raise RequestError("lora_name", name, limit)
        loaded = {known.number for known in self._known.values()}
        free = [slot for slot, number in enumerate(self._slots) if number not in loaded and number not in used]
        if not free:
            taken = f"{len(loaded)} are loaded, and unfinished requests use {room.adapters - len(loaded)} unloaded ones"
            raise RequestError("max_loras", room.adapters, f"no room is left for {name!r}: {taken}")
        self._last += 1
        return free[0], self._last

    def add(self, name: str, digest: str, slot: int, number: int) -> None:
        """Make an adapter known that is in its slot, instead of one of the same name."""
        self._slots[slot] = number
        self._known = {**self._known, name: Known(number, digest)}

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises UnknownAdapter, and RequestError if the engine has no room for other adapters."""
        self.require_room()
        if name not in self._known:
            raise UnknownAdapter("lora_name", name, self._choices(self._known))
        self._known = {other: known for other, known in self._known.items() if other != name}

    def _choices(self, loaded: Mapping[str, Known]) -> str:
        if loaded:
            return f"must be one of {', '.join(loaded)}"
        return "this engine has no lora_modules" if self.room is None else "no adapter is loaded"

"""Conversations that a later request of the Responses API may continue by `previous_response_id`."""

import time
from collections import Counter, OrderedDict

from ..core.fairness import Key
from ..http import limits
from ..http.errors import ApiError


class ResponseStore:
    """The last conversations of all API keys, in memory, each for `limits.STORED_SECONDS`.

    A key has no access to conversations of other keys. If there are too many, the key that uses most memory loses its
    oldest one.
    """

    def __init__(self, most: int = limits.STORED_BYTES) -> None:
        self._most = most
        self._used = Counter[Key]()  # bytes of a key's conversations as JSON
        self._stored: dict[Key, OrderedDict[str, tuple[float, bytes]]] = {}  # the oldest of a key first

    def __len__(self) -> int:
        """Return the number of conversations."""
        return sum(map(len, self._stored.values()))

    @property
    def used(self) -> int:
        """Bytes of all conversations as JSON."""
        return self._used.total()

    def put(self, key: Key, name: str, messages: bytes) -> None:
        """Store a conversation with its answer, as JSON. One that alone is too large for the store is not kept.

        Nothing (no bytes) takes the place of what was stored under the name, which is then unknown.
        """
        size = len(messages)
        self._expire()
        if name in self._stored.get(key, ()):
            self._drop(key, name)
        if not 0 < size <= self._most:
            return
        self._stored.setdefault(key, OrderedDict())[name] = (time.monotonic(), messages)
        self._used[key] += size
        while self.used > self._most:
            largest = max(self._used, key=self._used.__getitem__)
            self._drop(largest, next(iter(self._stored[largest])))

    def get(self, key: Key, name: str) -> bytes:
        """Return a conversation of a key, as JSON. Raises ApiError (404) if it is unknown, expired or another key's."""
        self._expire()
        if name not in self._stored.get(key, ()):
            raise ApiError(
                404,
                f"Previous response with id {name[:100]!r} not found: the server keeps the last responses for "
                f"{limits.STORED_SECONDS} s. Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._stored[key][name][1]

    def _expire(self) -> None:
        oldest = time.monotonic() - limits.STORED_SECONDS
        for key in list(self._stored):
            while key in self._stored:
                name, (stored, _) = next(iter(self._stored[key].items()))
                if stored >= oldest:
                    break
                self._drop(key, name)

    def _drop(self, key: Key, name: str) -> None:
        self._used[key] -= len(self._stored[key].pop(name)[1])
        if not self._stored[key]:
            del self._stored[key], self._used[key]

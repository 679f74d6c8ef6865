"""Conversations that a later request of the Responses API may continue by `previous_response_id`."""

import time
from collections import OrderedDict
from typing import Any

from ..http import limits
from ..http.errors import ApiError
from ..http.pieces import encode
from .fairness import Key

Messages = list[dict[str, Any]]


class ResponseStore:
    """The last conversations of all API keys, in memory. The oldest go first, and each after `limits.STORED_SECONDS`.

    A key has no access to conversations of other keys.
    """

    def __init__(self, most: int = limits.STORED_BYTES) -> None:
        self.used = 0  # bytes of all conversations as JSON
        self._most = most
        self._stored: OrderedDict[tuple[Key, str], tuple[float, int, Messages]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, key: Key, name: str, messages: Messages) -> None:
        """Store a conversation with its answer. One that alone is too large for the store is not kept."""
        size = len(encode(messages))
        self._expire()
        while self._stored and self.used + size > self._most:
            self._drop(next(iter(self._stored)))
        if size <= self._most:
            self._stored[key, name] = (time.monotonic(), size, messages)
            self.used += size

    def get(self, key: Key, name: str) -> Messages:
        """Return a conversation of a key. Raises ApiError (404) if it is unknown, expired or another key's."""
        self._expire()
        if (key, name) not in self._stored:
            raise ApiError(
                404,
                f"Previous response with id {name[:100]!r} not found: the server keeps the last responses for "
                f"{limits.STORED_SECONDS} s. Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._stored[key, name][2]

    def _expire(self) -> None:
        oldest = time.monotonic() - limits.STORED_SECONDS
        while self._stored and next(iter(self._stored.values()))[0] < oldest:
            self._drop(next(iter(self._stored)))

    def _drop(self, name: tuple[Key, str]) -> None:
        self.used -= self._stored.pop(name)[1]

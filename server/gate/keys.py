"""The keys of clients: users need an API key if there are any, and the operator needs the admin key."""

import hashlib
import secrets
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers

from ..http.errors import ApiError
from .table import Whose


class Keys:
    """The keys that a server accepts, as digests.

    Args:
        keys: API keys.
        admin: the admin key.
    """

    def __init__(self, keys: Collection[str], admin: str | None) -> None:
        self._keys = [_digest(key) for key in keys]
        self._admin = [] if admin is None else [_digest(admin)]

    def check(self, whose: Whose, headers: Headers) -> str | None:
        """Return the key of a request for a route of `whose`, None if it needs none. Raises ApiError (401, 403)."""
        if whose == "nobody":
            return None
        if whose == "operator":
            if not self._admin:
                raise ApiError(403, "admin endpoints are off; start the server with --admin-api-key")
            return _authorized(headers, self._admin)
        accepted = [*self._keys, *self._admin] if whose == "either" else self._keys
        return _authorized(headers, accepted) if self._keys else None


def _authorized(headers: Headers, accepted: Iterable[bytes]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if not scheme and "x-api-key" in headers:  # as Anthropic's clients send it
        scheme, key = "bearer", headers["x-api-key"]
    digest = _digest(key.strip())
    # Compare all keys, each in constant time, so that the response time reveals nothing about them.
    if scheme.lower() == "bearer" and sum([secrets.compare_digest(digest, one) for one in accepted]):
        return key.strip()
    raise ApiError(401, "Incorrect or missing API key.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

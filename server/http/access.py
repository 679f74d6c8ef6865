"""The outermost middleware: request ids, response counts, the access log, and the answer to unexpected errors."""

import logging
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.service import Service
from ..gate.table import found_in, path_of
from .errors import ApiError, error_response
from .limits import MAX_ID_CHARS

_log = logging.getLogger("jswa.server")
_GONE = 499  # nginx's status for a client that disconnects before its response
_OTHER = "other"  # the name by which responses are counted whose requests named no route


class Access:
    """ASGI middleware that sets the request's id and time of arrival in the scope, and counts and logs responses."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        scope["jswa.request_id"] = request_id
        scope["jswa.arrival"] = time.monotonic()
        status = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                status = message["status"]
                self._service.recorder.response(_route(scope), status)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request %s has failed", request_id, extra={"data": {"request_id": request_id}})
            if status is not None:
                raise  # the client has a part of a response, so the connection must be closed
            await error_response(ApiError(500, "internal error"), path_of(scope))(scope, receive, send_with_id)
        finally:
            if status is None:
                self._service.recorder.response(_route(scope), _GONE)
            if _log.isEnabledFor(logging.DEBUG):
                _log_access(scope, _GONE if status is None else status)


def _route(scope: Scope) -> str:
    found = found_in(scope)
    return _OTHER if found is None else found.route.name


def _log_access(scope: Scope, status: int) -> None:
    client = scope.get("client") or ("-",)
    seconds = time.monotonic() - scope["jswa.arrival"]
    data = {"client": client[0], "method": scope["method"], "path": quote(scope["path"][:200]), "status": status}
    data |= {"seconds": round(seconds, 4), "request_id": scope["jswa.request_id"]}
    _log.debug("access: %s", " ".join(f"{k}={v}" for k, v in data.items()), extra={"data": data})


def request_id_of(headers: Headers) -> str:
    """Return the request's x-request-id if that is valid, or a new id."""
    given = headers.get("x-request-id")
    if given and len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable() and " " not in given:
        return given
    return uuid.uuid4().hex

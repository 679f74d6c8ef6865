"""The receivers of the requests that have not ended. One that fails harms no other request."""

import logging
from collections.abc import Callable

from jswa.errors import InternalError, JswaError
from jswa.frontend.outputs import Receiver, distribute
from jswa.plan import StepEvents, TokenEvent

_log = logging.getLogger("jswa")


class Receivers:
    """The receivers by request id. All methods are for the thread that handles events.

    Args:
        abort: ends a request in the engine.
    """

    def __init__(self, abort: Callable[[str], object]) -> None:
        self._abort = abort
        self._found: dict[str, Receiver] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._found

    def add(self, request_id: str, receiver: Receiver) -> None:
        """Keep the receiver of a new request."""
        self._found[request_id] = receiver

    def forget(self, request_id: str) -> None:
        """Deliver no further event of a request."""
        self._found.pop(request_id, None)

    def deliver(self, events: StepEvents) -> None:
        """Deliver the events of a step. A request that cannot handle its own is aborted."""
        distribute(events, self._found, self._fail)

    def forget_ended(self, events: StepEvents) -> None:
        """Deliver no further event of the requests that end with a step."""
        for event in events.others:
            if event.finish_reason is not None:
                self.forget(event.request_id)

    def end(self, request_id: str, last: TokenEvent | JswaError) -> None:
        """Deliver the last event of a request, or its error."""
        receiver = self._found.pop(request_id, None)
        if receiver is None:
            return
        try:
            receiver.event(last)
        except Exception:
            _log.exception("request %s cannot be told its end", request_id)

    def end_all(self, error: Callable[[], JswaError]) -> None:
        """End all requests, each with an error of its own."""
        for request_id in list(self._found):
            self.end(request_id, error())

    def _fail(self, request_id: str, error: Exception) -> None:
        _log.error("request %s cannot handle its events, and is aborted", request_id, exc_info=error)
        self._abort(request_id)
        self.end(request_id, InternalError("the tokens of the request could not be handled"))

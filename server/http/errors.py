"""Errors as clients see them: in OpenAI's shape (Anthropic's on its routes), without details of this machine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jswa.errors import (
    EngineDead,
    EngineRestarting,
    FieldError,
    FormTooLarge,
    GenerationError,
    JswaError,
    NothingAllowed,
    PromptTooLong,
    RequestError,
    UnknownAdapter,
)

from .sse import JsonResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        message: text for people.
        param: the request's field that is wrong; None if no single field is.
        code: short name of the error, for programs.
        headers: headers of the response.
        details: what Anthropic's SDK reads besides the message; None if it reads nothing more.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        # The message may quote a request, and a lone surrogate in it cannot be encoded.
        message = message.encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the JSON object of the response in Anthropic's shape."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        more = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": self.message, **more}}

    @staticmethod
    def of(error: JswaError) -> "ApiError":
        """Return the response for an error of the engine. Status 500 has no details of an internal error."""
        if isinstance(error, PromptTooLong):
            return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
        if isinstance(error, UnknownAdapter):
            if error.field == "lora":  # a request names it as its model
                return ApiError(404, str(error), param="model", code="model_not_found")
            return ApiError(404, str(error), param=error.field, code="not_found")
        if isinstance(error, RequestError):
            return ApiError(400, str(error), param=error.field.split(" ")[0], code="invalid_value")
        if isinstance(error, FieldError):
            return ApiError(400, str(error), param=error.field)
        if isinstance(error, NothingAllowed):
            too_large = isinstance(error, FormTooLarge)
            return ApiError(400, str(error), code="form_too_large" if too_large else "nothing_allowed")
        if isinstance(error, GenerationError):
            return ApiError(500, f"{error}; other requests are not affected", code="generation_failed")
        if isinstance(error, EngineRestarting):
            return ApiError(503, str(error), code="engine_restarting", headers={"Retry-After": "5"})
        if isinstance(error, EngineDead):
            return ApiError(500, str(error), code="engine_dead")
        return ApiError(500, "internal error")


def error_response(error: ApiError, path: str = "") -> JsonResponse:
    """Return the response for an error, in the form that clients of the route expect."""
    body = error.anthropic() if path.startswith("/v1/messages") else error.body()
    return JsonResponse(body, status_code=error.status, headers=error.headers)


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error (400) for a wrong value of a request's field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error (400) for a field that asks for a feature that the server does not have."""
    return invalid(param, message, "unsupported_value")


def no_body_memory() -> ApiError:
    """Return the error (429) for a request whose body, or whose images, do not fit --max-body-memory."""
    return ApiError(
        429, "the bodies of other requests use all memory of --max-body-memory; try again later",
        code="body_memory_full", headers={"Retry-After": "1"},
    )  # fmt: skip


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise the engine's errors as ApiErrors."""
    try:
        yield
    except JswaError as error:
        raise ApiError.of(error) from error


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error (400) for the first of pydantic's errors about a body."""
    # A union has an error for each alternative; the one for the value's own type is the most precise.
    same = [one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]]
    first = max(same, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    param = _dotted(first["loc"][1:])
    if not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {first['msg']}", param=param, code=code)


def _dotted(where: Sequence[Any]) -> str:
    parts = ""
    for part in where:
        if isinstance(part, int):
            parts += f"[{part}]"
        elif part not in ("str", "constrained-str") and not part.startswith("list["):  # alternatives of a union
            parts += f".{part}" if parts else str(part)
    return parts[:200]

"""The form that a request asks for: `structured_outputs`, `response_format` and vLLM's older `guided_…` fields."""

from typing import Any, NamedTuple

from jswa.errors import InvalidSampling
from jswa.types import FORMS, StructuredOutputsParams

from ..http.errors import invalid, unsupported
from .schemas import Generation

_FIELDS = {*FORMS, "disable_any_whitespace", "whitespace_pattern"}
_IGNORED = {"disable_fallback", "backend"}  # they choose between libraries
_OLDER = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")}
_KINDS = 'must be {"type": "text"}, "json_object", "json_schema" or "structural_tag"'


class AskedForm(NamedTuple):
    """A form, and the field of the request that asks for it."""

    spec: StructuredOutputsParams
    field: str


def form_of(body: Generation) -> AskedForm | None:
    """Return the form that a request asks for; None if it asks for none. Raises ApiError."""
    extra = body.model_extra or {}
    older = {name: extra[name] for name in _OLDER if extra.get(name) not in (None, "", [])}
    asked = {
        "structured_outputs": body.structured_outputs is not None,
        "response_format": body.response_format is not None and _kind(body.response_format) != "text",
        next(iter(older), "guided_json"): bool(older.keys() - {"guided_whitespace_pattern"}),
    }
    several = [name for name, asks in asked.items() if asks]
    if len(several) > 1:
        raise invalid(several[1], f"cannot be combined with {several[0]}")
    if not several:
        return None
    if several == ["structured_outputs"]:
        return AskedForm(_given(body.structured_outputs, "structured_outputs"), "structured_outputs")
    if several == ["response_format"]:
        return form_of_format(body.response_format, "response_format")
    return AskedForm(_made({_OLDER[name]: value for name, value in older.items()}, several[0]), several[0])


def form_of_format(value: Any, field: str) -> AskedForm | None:
    """Return the form that OpenAI's `response_format` asks for. Raises ApiError."""
    kind = _kind(value, field)
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedForm(StructuredOutputsParams(json_object=True), field)
    if kind == "structural_tag":
        inner = {key: part for key, part in value.items() if key in ("structures", "triggers")}
        return AskedForm(_made({"structural_tag": inner}, field), field)
    if kind != "json_schema":
        raise unsupported(f"{field}.type", _KINDS)
    about = value.get("json_schema")
    if about is None and "schema" in value:
        about = value  # as in /v1/responses and /v1/messages
    else:
        field = f"{field}.json_schema"
    if not isinstance(about, dict) or not isinstance(about.get("schema"), dict):
        raise invalid(field, "must be an object with a `schema`")
    return AskedForm(_made({"json": about["schema"]}, f"{field}.schema"), f"{field}.schema")


def _kind(value: Any, field: str = "response_format") -> str:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str):
        raise invalid(field, _KINDS)
    return kind


def _given(value: Any, field: str) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        raise invalid(field, f"must be an object with one of {', '.join(FORMS)}")
    kept = {key: part for key, part in value.items() if key not in _IGNORED and part is not None}
    for key, part in list(kept.items()):
        if key not in _FIELDS:
            if part not in (False, ""):
                raise unsupported(f"{field}.{key[:100]}", "is not known")
            del kept[key]
    return _made({key: part for key, part in kept.items() if part is not False}, field)


def _made(fields: dict[str, Any], field: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except InvalidSampling as error:
        inner = error.field.removeprefix("structured_outputs")
        raise invalid(field if field != "structured_outputs" else f"{field}{inner}", error.limit) from error

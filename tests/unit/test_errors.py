"""The hierarchy of errors (jswa/errors.py)."""

import inspect

import pytest

from jswa import errors


def test_every_error_is_a_jswa_error_and_in_the_documented_tree() -> None:
    """So there is one base class to catch, and the documentation is complete."""
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert all(issubclass(cls, errors.JswaError) for cls in classes)
    drawing = errors.__doc__ or ""
    assert [cls.__name__ for cls in classes if cls.__name__ not in drawing] == []


@pytest.mark.parametrize("cls", [errors.ConfigError, *errors.RequestError.__subclasses__()])
def test_a_field_error_is_a_value_error_with_field_value_and_limit(cls: type[errors.FieldError]) -> None:
    """As attributes and in the text, where a huge value is shortened."""
    error = cls("field", [1] * 1000, "must be short")
    assert isinstance(error, ValueError)
    assert (error.field, error.value, error.limit) == ("field", [1] * 1000, "must be short")
    assert str(error).startswith("field = [1, 1, ")
    assert str(error).endswith("...: must be short")
    assert len(str(error)) < 120


def test_request_errors_do_not_share_their_lists() -> None:
    """Each error has its own lists of outputs and errors."""
    first, second = (errors.InvalidPrompt("prompt", "", "must not be empty") for _ in range(2))
    first.outputs.append(None)
    first.errors[0] = second
    assert (second.index, second.outputs, second.errors) == (None, [], {})

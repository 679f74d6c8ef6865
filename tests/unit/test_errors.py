"""The hierarchy of errors (jswa/errors.py)."""

import inspect
from collections.abc import Callable

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


@pytest.mark.parametrize(
    "value", [[], (1,), (1, "a"), {"a": [1, (2.5,)], 3: {}}, {}, "x", None, b"ab", [[[]]], {1, 2}], ids=repr
)
def test_a_short_value_is_shown_as_python_writes_it(value: object) -> None:
    """With nothing left out."""
    assert str(errors.ConfigError("field", value, "is wrong")) == f"field = {value!r}: is wrong"


class Printed:
    """A value that counts how often it is printed."""

    times = 0

    def __repr__(self) -> str:
        Printed.times += 1
        return "x"


@pytest.mark.parametrize("wrap", [list, tuple, lambda items: [[items]], lambda items: dict(enumerate(items))])
def test_only_the_beginning_of_a_long_value_is_looked_at(wrap: Callable[[list[Printed]], object]) -> None:
    """A client may send a list of millions of items; an error about it must not take long."""
    Printed.times = 0
    error = errors.ConfigError("field", wrap([Printed()] * 100_000), "is too long")
    assert str(error).endswith("...: is too long")
    assert Printed.times <= 100

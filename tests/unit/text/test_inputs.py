"""Token ids of callers are checked as arrays where they can be (jswa/text/inputs.py)."""

from typing import Any

import numpy as np
import pytest

from jswa.errors import InvalidPrompt, InvalidToken
from jswa.text.inputs import tokenize

FORMS: list[Any] = [
    list,
    tuple,
    np.array,
    lambda ids: [np.int64(one) for one in ids],
    lambda ids: np.array(ids, object),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_ids_is_checked_alike(form: Any) -> None:
    text, ids = tokenize(form([0, 7, 2**31 - 1]), None)
    assert text is None
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 7, 2**31 - 1]
    for wrong in (-1, 2**31, 2**40):
        with pytest.raises(InvalidToken, match=f"{wrong}: must be in the vocabulary"):
            tokenize(form([1, wrong, 2]), None)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.uint64])
def test_arrays_of_any_integers_are_ids(kind: Any) -> None:
    assert tokenize(np.array([3, 200], kind), None)[1].tolist() == [3, 200]


@pytest.mark.parametrize(
    "ids", [[1, True], np.array([True]), np.array([1.0]), [1, 2.0], [np.float32(1)], [[1]], np.array([["a"]]), [1, "a"]]
)
def test_what_is_no_integer_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidPrompt, match="list of token ids"):
        tokenize(ids, None)


def test_a_number_beyond_64_bits_is_named() -> None:
    with pytest.raises(InvalidToken, match=str(2**70)):
        tokenize([1, 2**70], None)


def test_long_lists_and_arrays_are_not_walked_in_python() -> None:
    """128k ids took 20 ms: the number of lines that run does not depend on the length."""
    import sys

    def lines(ids: Any) -> int:
        count = 0

        def tracer(*_: Any) -> Any:
            nonlocal count
            count += 1
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            tokenize(ids, None)
        finally:
            sys.settrace(before)
        return count

    for form in (list, np.array):
        assert lines(form(range(10))) == lines(form(range(10_000)))

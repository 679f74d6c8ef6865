"""Validation of sampling parameters, and other public types (jswa/types.py)."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.errors import InvalidSampling
from jswa.types import RequestMetrics, SamplingParams, StructuredOutputsParams

NAN, INF = math.nan, math.inf
HUGE = 10**400  # too large for a float
BAD: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -INF, -0.001, 100.1, HUGE, True, "1", None, [1.0], 1j, np.array([1.0])],
    "top_p": [NAN, INF, 0.0, 0, -0.5, 1.001, HUGE, True, "0.5", None],
    "top_k": [NAN, 1.0, -2, 2**31, 10**40, True, "3", None],
    "max_tokens": [NAN, 1.5, 0, -1, 2**31, 10**40, True, "16"],
    "seed": [NAN, 1.0, -1, 2**64, True, "7"],
    "stop_token_ids": [None, 5, "5", [1.0], [-1], [2**31], [True], ["5"], [None], {1, 2}],
    "ignore_eos": [None, 0, 1, "no"],
    "skip_special_tokens": [None, 0, 1, "yes"],
    "skip_reading_prefix_cache": [None, 0, "no"],
}
GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 100.0, np.float32(0.7), np.int64(2)],
    "top_p": [1, 1.0, 5e-324, np.float32(0.9)],
    "top_k": [-1, 0, 1, 2**31 - 1, np.int32(5)],
    "max_tokens": [None, 1, 2**31 - 1, np.int64(9)],
    "seed": [None, 0, 2**64 - 1, np.uint64(2**63)],
    "stop_token_ids": [(), [], [0], (1, 2), [2**31 - 1], [np.int32(3)]],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "skip_reading_prefix_cache": [True, False],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    """Return (name, value) pairs as test parameters with readable ids."""
    return [pytest.param(name, value, id=f"{name}={value!r:.30}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_bad_sampling_value_is_refused_with_name_value_and_limit(name: str, value: Any) -> None:
    """Values out of range or of a wrong type; the error is a ValueError, as in other engines."""
    with pytest.raises(InvalidSampling) as refused:
        SamplingParams(**{name: value})
    error = refused.value
    assert isinstance(error, ValueError)
    assert error.field == name
    assert error.value is value
    assert error.limit.startswith("must be ")
    assert str(error).startswith(f"{name} = ")
    assert str(error).endswith(error.limit)


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_a_good_sampling_value_is_accepted(name: str, value: Any) -> None:
    """Both ends of every range, and NumPy numbers."""
    assert getattr(SamplingParams(**{name: value}), name) is value


@given(st.sampled_from(["temperature", "top_p"]), st.floats() | st.integers())
def test_any_number_gives_parameters_or_invalid_sampling(name: str, value: Any) -> None:
    """No number raises another error."""
    low = value > 0 if name == "top_p" else value >= 0
    accepted = low and value <= {"temperature": 100, "top_p": 1}[name]
    try:
        SamplingParams(**{name: value})
    except InvalidSampling:
        assert not accepted
    else:
        assert accepted


def test_time_in_queue_is_known_once_the_request_has_run() -> None:
    """It is the time from arrival to the first step, in seconds."""
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.time_in_queue is None
    metrics.first_scheduled_time = 12.5
    assert metrics.time_in_queue == 2.5


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"grammar": 3}, "structured_outputs.grammar"),
        ({"structural_tag": []}, "structured_outputs.structural_tag"),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_a_form_that_is_wrong_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSampling) as found:
        StructuredOutputsParams(**fields)
    assert found.value.field == field


def test_a_form_has_a_name() -> None:
    assert StructuredOutputsParams(choice=("a",)).form == "choice"
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json="{}")).structured_outputs is not None
    with pytest.raises(InvalidSampling, match="None or a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]

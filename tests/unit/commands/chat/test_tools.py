"""The tools of `jswa chat --tools`."""

import json
from pathlib import Path

import pytest

from jswa.commands.chat.tools import CALCULATOR, calculate, find_tools
from jswa.errors import ConfigError


def test_a_file_has_tools(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([CALCULATOR]))
    assert list(find_tools(str(path))[0]) == [CALCULATOR]
    assert find_tools(None)[0] == ()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1234 * 57", "70338"), ("27 + 45", "72"), ("-(2 - 5) * 1.5", "4.5"), ("6 / 3", "2"), ("1 / 3", str(1 / 3)),
        ("2 ** 9", "error: only numbers"), ("__import__('os')", "error: only numbers"), ("1 +", "error: "),
        ("", "error: "), ("1" * 201, "error: expression must be a string of at most 200 characters"),
        ("1 / 0", "error: division by zero"), ("'a' * 9", "error: only numbers"), ("x", "error: only numbers"),
    ],
)  # fmt: skip
def test_the_calculator_computes_sums_and_nothing_else(expression: str, result: str) -> None:
    found = calculate("calculator", json.dumps({"expression": expression}))
    assert found.startswith(result) if result.startswith("error") else found == result


def test_a_call_that_is_none_gives_an_error_to_the_model() -> None:
    assert calculate("clock", "{}") == "error: there is no function clock"
    for arguments in ("", "[]", "{}", '{"expression": 3}', "{" * 99):
        assert calculate("calculator", arguments).startswith("error: ")


@pytest.mark.parametrize("text", ["", "{}", "[]", "[3]", '[{"name": "f"}]', "[{}]", '[{"function": {"name": 3}}]'])
def test_a_file_without_tools_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.json"
    with pytest.raises(ConfigError, match=r"tools = .*must be a JSON file or \"calculator\""):
        find_tools(str(path))
    path.write_text(text)
    with pytest.raises(ConfigError, match="tools = "):
        find_tools(str(path))

"""The tools of `jswa chat --tools`, and what gives the results of their calls."""

import ast
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jswa.errors import ConfigError

Tools = Sequence[Mapping[str, Any]]
RunTool = Callable[[str, str], str | None]
MOST_CHARACTERS = 200  # of an expression to compute
CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
BUILT_IN = "calculator"
_SIGNS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def find_tools(wanted: str | None) -> tuple[Tools, RunTool]:
    """Return the tools of `--tools`, and the function that runs them.

    Args:
        wanted: a JSON file, which holds a list in OpenAI's form, whose results the user types; "calculator", which is
            built in; or None.

    Raises ConfigError.
    """
    if wanted is None:
        return (), typed_result
    if wanted == BUILT_IN:
        return (CALCULATOR,), _calculated
    try:
        found = json.loads(Path(wanted).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tools", wanted, f'must be a JSON file or "{BUILT_IN}": {error}') from error
    if not isinstance(found, list) or not found or not all(map(_is_tool, found)):
        raise ConfigError("tools", wanted, 'must hold a list of {"type": "function", "function": {"name": …}}')
    return found, typed_result


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def calculate(name: str, arguments: str) -> str:
    """Return the result of a call of `calculator`, or what is wrong with it, for the model to read."""
    try:
        if name != BUILT_IN:
            raise ValueError(f"there is no function {name:.80}")
        expression = json.loads(arguments)["expression"]
        if not isinstance(expression, str) or len(expression) > MOST_CHARACTERS:
            raise ValueError(f"expression must be a string of at most {MOST_CHARACTERS} characters")
        result = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(result) if isinstance(result, float) and result.is_integer() else result)
    except (ValueError, TypeError, KeyError, ArithmeticError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(left), _value(right))
    raise ValueError("only numbers, + - * / and parentheses can be computed")


def _calculated(name: str, arguments: str) -> str:
    result = calculate(name, arguments)
    print(f"result {result}", flush=True)
    return result


def typed_result(name: str, arguments: str) -> str | None:
    """Return the result of a call, which the user types; None at the end of input."""
    try:
        return input("result " if sys.stdin.isatty() else "")
    except EOFError:
        return None

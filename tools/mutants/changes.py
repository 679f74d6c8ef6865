"""The changes that a mutant may make to a function, by operator: what a slip of the hand would make."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from tools.mutants.places import Function, code

_COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_OPPOSITES = (("min", "max"), ("minimum", "maximum"), ("any", "all"), ("argmin", "argmax"))
_OPPOSITE = {name: other for pair in _OPPOSITES for name, other in (pair, pair[::-1])}
_CHOOSES = ("where", "select", "cond")
# Keywords that check or hasten what is done; JAX's default integers have 32 bits.
_SAME_WITHOUT = ("strict", "unique_indices", "indices_are_sorted", "dtype")
_EMPTY = {"list": "[]", "dict": "{}", "set": "set()", "tuple": "()", "str": "''", "bytes": "b''"}


class Change(NamedTuple):
    """Other code for a node of the tree."""

    node: ast.stmt | ast.expr
    operator: str
    after: str


def changes(function: Function) -> Iterator[Change]:
    """Yield all changes of a function's own body."""
    returns = ast.unparse(function.returns) if function.returns else ""
    for node in code(function):
        if isinstance(node, ast.expr):
            for some in (_of_operator, _of_number, _of_logic, _of_call, _of_choice):
                yield from some(node)
        else:
            yield from _of_statement(node, returns)


def _of_operator(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                others = [*ops[:index], _COMPARE[type(op)](), *ops[index + 1 :]]
                yield _change(node, "compare", ast.Compare(left, others, comparators))
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC and not (_is_text(left) or _is_text(right)):
            yield _change(node, "arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right))
        case ast.UnaryOp(ast.USub(), operand):
            yield _change(node, "arithmetic", operand)


def _of_number(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            yield Change(node, "off by one", str(value + 1))
            yield Change(node, "off by one", str(value - 1))
        case ast.Subscript(_, ast.Slice(lower, upper)):
            for bound in (lower, upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield Change(bound, "off by one", f"({ast.unparse(bound)}) + 1")


def _of_logic(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.BoolOp(op, values):
            yield _change(node, "boolean", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
            for index in range(len(values)):
                yield _change(node, "boolean", ast.BoolOp(op, values[:index] + values[index + 1 :]))
        case ast.UnaryOp(ast.Not(), operand):
            yield _change(node, "boolean", operand)


def _of_call(node: ast.expr) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _OPPOSITE:
        other = _OPPOSITE[name]
        func = ast.Attribute(node.func.value, other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
        yield _change(node, "opposite", ast.Call(func, node.args, node.keywords))
    if name in _CHOOSES and len(node.args) >= 3:
        condition, first, second, *rest = node.args
        yield _change(node, "swap", ast.Call(node.func, [condition, second, first, *rest], node.keywords))
    if not name[:1].isupper():  # a constructor needs most of its arguments
        for index, keyword in enumerate(node.keywords):
            if keyword.arg and keyword.arg not in _SAME_WITHOUT:
                others = node.keywords[:index] + node.keywords[index + 1 :]
                yield _change(node, "keyword", ast.Call(node.func, node.args, others))


def _of_choice(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.IfExp(test, body, orelse):
            yield _change(node, "swap", ast.IfExp(test, orelse, body))
            yield from _constant(test)
        case ast.ListComp(_, generators) | ast.SetComp(_, generators) | ast.GeneratorExp(_, generators):
            for test in (test for part in generators for test in part.ifs):
                yield Change(test, "condition", "True")


def _of_statement(node: ast.stmt, returns: str) -> Iterator[Change]:
    match node:
        case ast.If(test):
            yield from _constant(test)
        case ast.Continue():
            yield from (Change(node, "jump", other) for other in ("pass", "break"))
        case ast.Break():
            yield from (Change(node, "jump", other) for other in ("pass", "continue"))
        case ast.Return(ast.expr() as value):
            yield from (Change(node, "return", f"return {other}") for other in _other_values(value, returns))
        case ast.AugAssign(target, op, value):
            yield Change(node, "remove", "pass")
            if type(op) in _ARITHMETIC and not _is_text(value):
                yield _change(node, "arithmetic", ast.AugAssign(target, _ARITHMETIC[type(op)](), value))
        case ast.Expr(ast.Call()) | ast.Delete():
            yield Change(node, "remove", "pass")
        case ast.Assign(targets) if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            yield Change(node, "remove", "pass")


def _other_values(value: ast.expr, returns: str) -> Iterator[str]:
    """Yield other values that a function with this annotation may return."""
    text, kind = ast.unparse(value), returns.split("[")[0]
    if kind == "bool":
        yield f"not ({text})"
    if kind in ("int", "float"):
        yield f"{text} + 1"
    if returns.endswith("| None") and text != "None":
        yield "None"
    if kind in _EMPTY and not (kind == "tuple" and "..." not in returns) and text not in ("[]", "()", "''", '""', "{}"):
        yield _EMPTY[kind]


def _constant(test: ast.expr) -> Iterator[Change]:
    yield from (Change(test, "condition", value) for value in ("True", "False"))


def _change(node: ast.stmt | ast.expr, operator: str, after: ast.AST) -> Change:
    return Change(node, operator, ast.unparse(after))


def _is_text(node: ast.expr) -> bool:
    """Whether a value can only be added: a text, a list or a tuple."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

"""Operations of traced and compiled programs, read from the jaxpr or from the text of the optimised program."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

_COLLECTIVE = re.compile(
    r"= \S.* (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)


def collectives(program: str) -> list[list[str]]:
    """Return kind and name scope of every collective operation of an optimised program."""
    found = []
    for line in program.splitlines():
        kind = _COLLECTIVE.search(line)
        if kind is not None:
            scope = re.search(r'op_name="([^"]*)"', line)
            found.append([kind[1], scope[1] if scope else ""])
    return found


def equations(jaxpr: Any, scope: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every equation with its name scope. Inner programs inherit the scope of the equation that runs them."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner_scope = f"{scope}/{equation.source_info.name_stack}"
        yield inner_scope, equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from equations(value, inner_scope)


def integer_gathers(jaxpr: Any) -> list[str]:
    """Return the scopes of the integer gathers that belong to no layer's attention or experts."""
    found = []
    for scope, equation in equations(jaxpr):
        gathers = equation.primitive.name in ("gather", "dynamic_slice")
        integer = gathers and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
        if integer and not {"attention", "moe"} & set(scope.split("/")):
            found.append(scope)
    return found

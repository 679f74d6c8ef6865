"""A schema that was tidied allows the values that it allowed before, and alternatives that are apart share none."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from jswa.grammar.exact.apart import Alternatives
from jswa.grammar.schema import SchemaError, check_schema
from jswa.grammar.size.walk import reachable

ATOMS: list[Any] = [None, True, False, 0, 1, 1.5, -1, "", "a", "b", "ab", [], [1], ["a", 1], {}]
VALUES = [*ATOMS, *({"a": one} for one in ATOMS), *({"a": one, "b": "x"} for one in ATOMS), {"ab": 1}, [1, 1, "a"]]
KINDS: list[Any] = ["null", "boolean", "integer", "number", "string", "array", "object", ["string", "null"]]
NAMES = ["a", "b", "ab"]
REFUSED = {"if", "not", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
           "unevaluatedItems", "propertyNames"}  # fmt: skip


class Odd:
    """Draws schemas with keywords that often restrict nothing."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def document(self) -> dict[str, Any]:
        parts = [self.part(1), {"type": "object", "properties": {"a": {"const": "b"}}, "required": ["a"]}]
        plain = [part for part in parts if isinstance(part, dict) and "$ref" not in json.dumps(part)]
        return {"$defs": {"x": plain[0], "y": plain[-1]}}

    def part(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.2:
            return rng.choice([True, False, {}, {"not": {}}, {"not": False}, {"description": "Free."}])

        def several() -> list[Any]:
            return [self.part(depth - 1) for _ in range(rng.randint(1, 2))]

        def one() -> Any:
            return self.part(depth - 1)

        plain: dict[str, Callable[[], Any]] = {
            "type": lambda: rng.choice(KINDS), "const": lambda: rng.choice(ATOMS), "enum": lambda: rng.sample(ATOMS, 3),
            "required": lambda: rng.sample(NAMES, 1), "minLength": lambda: rng.choice([0, 1.0]),
            "maxItems": lambda: rng.randint(0, 2), "uniqueItems": lambda: rng.random() < 0.5,
            "format": lambda: rng.choice(["password", "path"]), "minContains": lambda: rng.randint(0, 2),
            "maxContains": lambda: rng.randint(0, 2), "deprecated": lambda: True,
            "$ref": lambda: f"#/$defs/{rng.choice('xy')}",
            "dependentRequired": lambda: {rng.choice(NAMES): rng.sample(NAMES, rng.randint(0, 1))},
        }  # fmt: skip
        nested: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(["not", "if", "then", "else", "contains", "items", "additionalProperties"], one),
            **dict.fromkeys(["unevaluatedProperties", "unevaluatedItems"], one),
            **dict.fromkeys(["allOf", "anyOf", "oneOf"], several), "prefixItems": several,
            "properties": lambda: {name: one() for name in rng.sample(NAMES, 2)},
            "dependentSchemas": lambda: {rng.choice(NAMES): one()},
            "propertyNames": lambda: rng.choice([{"type": "string"}, {"enum": ["a", "b"]}, {"maxLength": 1}, one()]),
        }  # fmt: skip
        keys = [key for key in plain if rng.random() < 0.15] + [key for key in nested if depth and rng.random() < 0.12]
        return {key: (plain | nested)[key]() for key in keys}


def values_of(schema: Any) -> list[Any]:
    return [value for value in VALUES if jsonschema.Draft202012Validator(schema).is_valid(value)]


def is_refused(checked: Any) -> bool:
    """Whether a schema has a keyword that llguidance refuses: the same values are not asked for then."""
    nodes = [node for node in reachable(checked).values() if isinstance(node, dict)]
    return any(node.keys() & REFUSED for node in nodes)


@pytest.mark.parametrize("block", range(4))
def test_a_tidied_schema_allows_the_same_values(block: int) -> None:
    tidied = 0
    for seed in range(block * 300, block * 300 + 300):
        odd = Odd(seed)
        schema = odd.document() | {"allOf": [odd.part(2)]}
        try:
            checked = check_schema(copy.deepcopy(schema))
        except SchemaError:
            continue
        if not is_refused(checked):
            assert values_of(checked) == values_of(schema), schema
            tidied += checked != schema
    assert tidied > 50


def test_alternatives_that_are_apart_share_no_value() -> None:
    apart = 0
    for seed in range(600):
        odd = Odd(seed)
        document, one, other = odd.document(), odd.part(2), odd.part(2)
        if Alternatives(document).exclude_each_other([one, other]):
            apart += bool(values_of(document | {"allOf": [one]}))
            assert not values_of(document | {"allOf": [one, other]}), (document, one, other)
    assert apart > 50

"""Schemas that are refused: with a reason, the place in the schema, and in little time."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import allowed_by


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(Path(__file__).parents[3] / "jswa/assets/tiny")
    assert tokenizer is not None
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 6))


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def nested(schema: Any, depth: int) -> Any:
    for _ in range(depth):
        schema = record(a=schema)
    return schema


def chain(links: int) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    defined = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "type": "object"} for i in range(links)}
    return {"$defs": {**defined, f"d{links}": {}}, "$ref": "#/$defs/d0"}


CASES: dict[str, tuple[Any, str]] = {
    "no JSON": ('{"type": ', "must be JSON"),
    "not a number": ('{"const": NaN}', "NaN is not JSON"),
    "no schema": ("[1]", "must be an object, true or false"),
    "nothing": ("false", "allows no value"),
    "large": ({"enum": ["x" * 1_000 + str(i) for i in range(300)]}, "has more than 262144 bytes"),
    "brackets": ('{"not":' * 200 + "1" + "}" * 200, "more than 100 levels"),
    "deep": (nested({}, 60), "more than 100 levels"),
    "many schemas": ({"anyOf": [{}] * 20_000}, "more than 10000 schemas"),
    "foreign": (record(a={"$ref": "https://example.com/a.json"}), r"at /properties/a/\$ref: 'https://example"),
    "foreign file": (record(a={"$ref": "other.json#/x"}), r"at /properties/a/\$ref"),
    "nowhere": (record(a={"items": {"$ref": "#/$defs/b"}}), r"at /properties/a/items/\$ref: .* leads nowhere"),
    "no schema there": (record(a={"$ref": "#/required"}), "is not a schema"),
    "itself": ({"$ref": "#"}, "refers to itself without an end"),
    "two": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        r"at /\$defs/[ab]:",
    ),
    "no base": (
        {"$defs": {"t": record(t={"$ref": "#/$defs/t"})}, "$ref": "#/$defs/t"},
        r"at /\$defs/t: refers to itself",
    ),
    "full list": (
        {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 1}}, "$ref": "#/$defs/t"},
        "refers to itself",
    ),
    "bounds": (
        record(a=record(b={"type": "integer", "minimum": 5, "maximum": 3})),
        "at /properties/a/properties/b: .*5.*3",
    ),
    "lengths": ({"type": "string", "minLength": 5, "maxLength": 3}, r"minLength \(5\)"),
    "items": (record(a={"type": "array", "minItems": 3, "maxItems": 2}), "at /properties/a: "),
    "64 bits": (record(a={"type": "integer", "minimum": 10**30}), "at /properties/a/minimum: is beyond 64 bits"),
    "never": (record(a=False), "unsatisfiable"),
    "unknown type": (record(a={"type": "float"}), "at /properties/a: Invalid type"),
    "keyword": (
        record(a={"if": {"type": "string"}, "then": {"minLength": 1}}),
        "at /properties/a: if, then are not supported",
    ),
    "unique": (record(a={"type": "array", "uniqueItems": True}), "at /properties/a: uniqueItems is not supported"),
    "one of": (record(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "at /properties/a: oneOf"),
    "pattern": (record(a={"type": "string", "pattern": "(a"}), "at /properties/a: regular expression: unclosed"),
    "look ahead": (record(a={"type": "string", "pattern": "(?=a)b"}), "at /properties/a: .*look-ahead"),
    "joined patterns": ({"allOf": [{"pattern": f"a.*{i}.*b"} for i in range(20)]}, "at /allOf/8/pattern"),
    "decimal steps": (record(a={"type": "number", "multipleOf": 0.01}), "at /properties/a/multipleOf"),
    "distinct keys": ({"type": "object", "minProperties": 2}, "at /minProperties"),
    "overlapping": ({"patternProperties": {"^a": {}, "^ab": {}}}, "not disjoint"),
    "unions of unions": (
        {"allOf": [{"anyOf": [record(**{f"k{i}{j}": {}}) for j in range(30)]} for i in range(4)]},
        "too large",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_schema_is_refused_with_its_place(grammars: Grammars, name: str) -> None:
    schema, reason = CASES[name]
    begin = time.thread_time()
    with pytest.raises(InvalidSampling, match=reason) as found:
        grammars.compile(StructuredOutputsParams(json=schema))
    assert found.value.field == "structured_outputs.json"
    assert len(str(found.value)) < 600
    assert time.thread_time() - begin < 2


HEAVY: dict[str, dict[str, Any]] = {
    "enum": {"json": {"enum": [f"value number {i}" for i in range(8_000)]}},
    "properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(500)}}},
    "long string": {"json": {"type": "string", "minLength": 10**5, "maxLength": 10**6}},
    "long array": {"json": {"type": "array", "minItems": 10**6}},
    "arrays of arrays": {"json": {"type": "array", "minItems": 999, "items": {"type": "array", "minItems": 999}}},
    "chain": {"json": chain(1_500)},
    "deep": {"json": nested({"type": "integer"}, 40)},
    "binary tree": {
        "json": {"$defs": {"t": record(l={"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]})}, "$ref": "#/$defs/t"}
    },
    "nested repetition": {"regex": "((a{1,100}){1,100}){1,100}"},
    "exponential": {"regex": "(x+x+)+y"},
    "backtracking": {"regex": "(.*a){20}"},
    "many states": {"regex": "[ab]*a[ab]{1000}"},
    "words": {"choice": [f"{i * 7919 % 10**6:06}" for i in range(5_000)]},
    "left": {"grammar": 'start: start "a" | "b"'},
    "repeated rules": {"grammar": 'start: a{3000}\na: b{3000}\nb: "x"{3000}'},
    "repeated terminals": {"grammar": 'start: A\nA: B{3000}\nB: C{3000}\nC: "x"'},
    "calculator": {"grammar": 'start: e\ne: e "+" e | e "*" e | /[a-z]/ | e e'},
    "constant": {"json": {"const": "ab" * 100_000}},
    "ambiguous": {"grammar": 'start: start start | "a"'},
    "rules": {"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(1_900)) + 'r1900: "b"\n'},
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_grammar_takes_bounded_time(grammars: Grammars, name: str) -> None:
    """It is compiled or refused, and its first masks are quick; several steps are taken, as tokens of a text are."""
    begin = time.monotonic()
    try:
        grammar = grammars.compile(StructuredOutputsParams(**HEAVY[name]))
    except InvalidSampling:
        grammar = None
    matcher = None if grammar is None else grammar.matcher()
    for _ in range(20):
        if matcher is None or matcher.finished or not (mask := allowed_by(matcher)):
            break
        if not matcher.accept([mask[len(mask) // 2]]):  # a limit was reached, and the text ends with an error
            assert matcher.error is not None
            assert not allowed_by(matcher)
    assert time.monotonic() - begin < 10


OTHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "("}, "regex", "unclosed group"),
    ({"regex": "a" * 300_000}, "regex", "more than 262144 bytes"),
    ({"regex": "a?" * 5_000}, "regex", "more than 8192 characters"),
    ({"regex": "(a{1000}b){1000}"}, "regex", "texts of more than 4096 characters"),
    ({"regex": "[]ab]{30000}"}, "regex", "texts of more than 4096 characters"),
    ({"json": {"type": "string", "pattern": "^a{30000}$"}}, "json", "at /pattern: .*4096"),
    ({"json": {"patternProperties": {"^(ab){30000}$": {}}}}, "json", "at /patternProperties: .*4096"),
    ({"json": {"type": "string"}, "whitespace_pattern": "a?" * 5_000}, "json", "more than 8192"),
    ({"grammar": 'start: "' + "a" * 17_000 + '"'}, "grammar", "more than 16384 characters"),
    ({"grammar": 'start: %json {"pattern": "a{30000}"}'}, "grammar", "4096"),
    ({"grammar": "start: %json {x"}, "grammar", "no JSON"),
    ({"grammar": '{"grammars": []}'}, "grammar", "must be in Lark or GBNF"),
    ({"regex": "\ud800"}, "regex", "no valid Unicode"),
    ({"grammar": "start: missing"}, "grammar", "missing"),
    ({"grammar": 'start: start "a"'}, "grammar", "it allows no text"),
    ({"grammar": "start: " + "(" * 1_000 + '"a"' + ")" * 1_000}, "grammar", "too deeply nested"),
    ({"grammar": "\n" * 3_000 + 'start: "a"'}, "grammar", "more than 2000 lines"),
    ({"grammar": "start: <|nothing|>"}, "grammar", "nothing"),
    ({"structural_tag": {"type": "structural_tag"}}, "structural_tag", "must have `structures` and `triggers`"),
    ({"structural_tag": {"structures": [], "triggers": ["<f"]}}, "structural_tag", "at /structures"),
    ({"structural_tag": {"structures": [{}], "triggers": [""]}}, "structural_tag", "at /triggers"),
    (
        {"structural_tag": {"structures": [{"begin": "<g>", "end": ""}], "triggers": ["<f"]}},
        "structural_tag",
        "at /structures/0/begin",
    ),
    (
        {"structural_tag": {"structures": [{"begin": "<f>", "end": "", "schema": {"$ref": "x"}}], "triggers": ["<f"]}},
        "structural_tag",
        r"at /structures/0/schema/\$ref",
    ),
]


@pytest.mark.parametrize(("spec", "field", "reason"), OTHERS)
def test_other_forms_are_refused_with_a_reason(
    grammars: Grammars, spec: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidSampling, match=reason) as found:
        grammars.compile(StructuredOutputsParams(**spec))
    assert found.value.field == f"structured_outputs.{field}"


def test_what_needs_itself_is_left_out(grammars: Grammars) -> None:
    """An optional property without an end would be a trap."""
    endless = {"$ref": "#/$defs/t"}
    schema = {"$defs": {"t": record(t=endless)}, "type": "object", "properties": {"t": endless, "u": {"const": 1}}}
    matcher = grammars.compile(StructuredOutputsParams(json={**schema, "additionalProperties": False})).matcher()
    ids = [int(token) for token in Tokenizer.load(TINY).encode('{"', add_special_tokens=False)]  # type: ignore[union-attr]
    assert matcher.accept(ids)
    assert not matcher.accept([int(token) for token in Tokenizer.load(TINY).encode("t", add_special_tokens=False)])  # type: ignore[union-attr]


def test_a_circle_with_an_end_is_compiled(grammars: Grammars) -> None:
    tree = record(v={"type": "integer"}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    grammars.compile(StructuredOutputsParams(json=tree))
    named = {"$defs": {"größe /~": {"type": "integer"}}, "$ref": "#/$defs/größe ~1~0"}
    grammars.compile(StructuredOutputsParams(json=json.dumps(named)))


TINY = Path(__file__).parents[3] / "jswa/assets/tiny"

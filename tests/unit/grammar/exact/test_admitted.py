"""What a schema's grammar admits is what jsonschema says of the value: each schema with texts of both kinds."""

import json
from typing import Any

import jsonschema
import pytest

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import admits
from tests.support.text.transcripts import tokenizer_of

BYTES = tokenizer_of(("<|end|>",))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(BYTES, BYTES.vocab_size, (BYTES.vocab_size - 1,))


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def record(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


CAT = record("kind", kind={"const": "cat"}, lives={"type": "integer"})
DOG = record("kind", kind={"const": "dog"})
LAX = {"cat": {**CAT, "required": []}, "dog": {**DOG, "required": []}}
PETS = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
NAMES = {"type": "object", "additionalProperties": {"type": "integer"}}
DATES = jsonschema.FormatChecker(("date",))

# A schema, texts that are values of it, and texts that are not.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "all but a quotation mark": (text(pattern='^[^"]+$'), ['"ab\\\\"', '"\\n"'], [r'"a\"b"', '"\\""', '""']),
    "all but a backslash": (text(pattern=r"^[^\\]+$"), [r'"a\"b"'], [r'"a\\b"']),
    "all but a quotation mark and a line feed": (text(pattern='^[^"\\n]$'), ['"a"', '"\\t"'], [r'"\""', '"\\n"']),
    "control characters": (text(pattern=r"^[\x00-\x1f]$"), ['"\\u0001"', '"\\t"'], [r'"\""', r'"\\"']),
    "two classes of control characters": (text(pattern=r"^([\0-\x0f]|[\x10-\x1f])$"), ['"\\n"'], [r'"\""', r'"\\"']),
    "any character": (text(pattern=r"^[\s\S]$"), [r'"\""', r'"\\"', '"\\n"', '"é"'], ['""', '"ab"']),
    "brackets in brackets": (text(pattern=r"^[[\]]$"), ['"["', '"]"'], ['"a"']),
    "signs that are operators elsewhere": (text(pattern="^[a&&b]$"), ['"a"', '"&"'], ['"c"']),
    "a range of signs": (text(pattern="^[+--]$"), ['","', '"+"'], ['"."']),
    "a group with a name": (text(pattern="^(?P<stop>a)b$"), ['"ab"'], ['"a"', '"b"']),
    "braces": (text(pattern="^{.*}$"), ['"{a}"'], ['"a"']),
    "words": (text(pattern=r"^\w\W$"), ['"a-"'], ['"aé"', '"ab"']),
    "digits": (text(pattern=r"^\D$"), ['"a"'], ['"1"', '"٣"']),
    "spaces": (text(pattern=r"^\s\S$"), ['" a"'], ['"aa"', '" \\u001c"']),
    "a name spelled with an escape": (
        record(a={"type": "integer"}), ['{"a": 1, "b": "x"}', '{"\\n": "\\u0001"}'], [r'{"\u0061": "x"}'],
    ),
    "a name with a line feed": (record(**{"a\nb": NAMES}), ['{"a\\nb": {}, "c": 1}'], [r'{"a\u000ab": 1}']),
    "other properties of a type": (
        {**record(a=text()), "additionalProperties": {"type": "integer"}}, ['{"a": "x", "b": 1}'], [r'{"\u0061": 1}'],
    ),
    "a pattern of names and an escape": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, ['{"a": 1, "b": "x"}'],
        [r'{"\u0061": "x"}', '{"a": "x"}'],
    ),
    "a pattern of names and a line feed": (
        {**record(**{"a\n": text()}), "patternProperties": {"^[ab]": {}}, "additionalProperties": False},
        ['{"a\\n": "x", "b": 1}'], [r'{"a\u000a": 1}'],
    ),
    "joined objects, one with a pattern of names": (
        {"allOf": [record(a={"type": "integer"}), {"patternProperties": {"^x-": text()}}]},
        ['{"a": 1, "x-b": "c"}', '{"b": 1}'], ['{"a": "x"}', '{"x-b": 1}', r'{"\u0061": "x"}'],
    ),
    "names of any kind": ({**NAMES, "propertyNames": text()}, ['{"a": 1, "": 2}'], ['{"a": "x"}']),
    "names that are longer": (
        {**NAMES, "propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}'],
    ),
    "names with a pattern": ({**NAMES, "propertyNames": text(pattern="^x")}, ['{"xa": 1}'], ['{"a": 1}', '{"x": ""}']),
    "names with a format": (
        {**NAMES, "propertyNames": {"format": "date"}}, ['{"2024-02-28": 1}'], ['{"2024-02-31": 1}'],
    ),
    "names of a list": (
        {**record("a", a={"minimum": 1}, c={}), "propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": text(),
         "$defs": {"n": {"type": "string", "enum": ["a", 'b"', "é"]}}},
        ['{"a": 1}', '{"a": 1, "b\\"": "x", "é": "y"}'], ['{"a": 0}', '{"a": 1, "c": 1}', '{"a": 1, "b\\"": 1}'],
    ),
    "dates": (
        text(format="date"), ['"2024-02-29"', '"2000-02-29"', '"0001-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"', '"2024-04-31"', '"2024-13-01"'],
    ),
    "dates with a pattern": (text(format="date", pattern="^(?=.*9$)2"), ['"2024-02-29"'], ['"2024-02-28"', '"29"']),
    "formats that are notes": (text(format="password"), ['"a"'], ["1"]),
    "nothing forbidden": ({"not": {"not": {}}, "type": "integer"}, ["1"], ['"a"']),
    "no null": ({"not": {"type": "null"}}, ["1", '"a"', "{}"], ["null"]),
    "a property that may not be there": (record(a={"not": {}}, b={}), ['{"b": 1}'], ['{"a": 1}']),
    "items that are some": (
        {"type": "array", "contains": {}, "maxContains": 2}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"],
    ),
    "no further items": (
        {"type": "array", "prefixItems": [text()], "unevaluatedItems": False, "additionalItems": True},
        ['["a"]'], ["[1]", '["a", 1]'],
    ),
    "no further properties": ({**record(a={}), "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
    "one property asks for another": (
        {**record("a", a={}, b={}), "dependentRequired": {"a": ["b"], "b": ["a"]}}, ['{"a": 1, "b": 2}'], ['{"a": 1}'],
    ),
    "a condition that always holds": ({"if": True, "then": text(), "else": False}, ['"a"'], ["1"]),
    "a condition without consequences": ({"if": {"const": 1}, "then": {}, "type": "integer"}, ["1", "2"], ['"a"']),
    "a note beside a reference to itself": (
        {**record(a={"$ref": "#", "deprecated": True, "x-note": 1}), "additionalProperties": False},
        ['{"a": {"a": {}}}'], ['{"a": 1}'],
    ),
    "counts with a point": (text(minLength=1.0, maxLength=2.0), ['"a"'], ['""', '"abc"']),
    "alternatives by reference": (
        {**PETS, "$defs": {"cat": CAT, "dog": DOG}}, ['{"kind": "dog"}', '{"kind": "cat", "lives": 9}'],
        ['{"kind": "cow"}', '{"kind": "cat", "lives": "x"}'],
    ),
    "alternatives that a property tells apart": (
        {**PETS, "$defs": LAX, "discriminator": {"propertyName": "kind"}}, ['{"kind": "dog"}'], ["{}", '{"lives": 9}'],
    ),
    "alternatives of types": (
        {"oneOf": [{"$ref": "#/$defs/t"}, {"type": ["integer", "null"]}], "$defs": {"t": text()}},
        ['"a"', "1"], ["1.5"],
    ),
    "64 bits": (
        {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**64 - 1}, ["1", str(2**62)], [str(2**64)],
    ),
    "numbers that are written short": ({"type": "number", "maximum": 2**60}, [str(2**53)], [str(2**60 + 1)]),
    "an exclusive bound": ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53)]),
    "an exclusive bound of many digits": (
        {"type": "integer", "exclusiveMinimum": 2**60, "maximum": 2**61}, [str(2**60 + 256), str(2**61)],
        [str(2**60), str(2**61 + 1)],
    ),
    "a control character where only one of two values has it": (
        {**record(a={"type": "null"}), "additionalProperties": {"enum": ["\a", "\\u0007", "\n"]}},
        [r'{"b": "\\u0007"}', r'{"b": "\n"}'], ['{"b": "a"}'],
    ),
    "a boolean that makes a bound exclusive": ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], []),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Possible")  # of `re`, for signs in brackets that other programs read otherwise
@pytest.mark.parametrize("name", CASES)
def test_a_text_is_admitted_if_it_is_a_value(grammars: Grammars, name: str) -> None:
    schema, right, wrong = CASES[name]
    grammar = grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))
    told_apart = "discriminator" in schema  # objects then have the property, which JSON Schema does not ask for
    if "exclusiveMinimum" not in schema or schema["exclusiveMinimum"] is not True:  # which is draft 4
        valid = jsonschema.Draft202012Validator(schema, format_checker=DATES).is_valid
        assert all(valid(json.loads(one)) for one in right)
        assert told_apart or not any(valid(json.loads(one)) for one in wrong)
    for one in right:
        assert admits(grammar, BYTES, one), one
    for one in wrong:
        assert not admits(grammar, BYTES, one), one


# Names beside `a` have a schema of their own.
CODED: dict[str, Any] = {**record(a={"type": "null"}), "additionalProperties": {"type": "integer"}}
REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": 2**53 + 1}, "at /minimum: 9007199254740993 is no number of floating point"),
    ({"type": "number", "exclusiveMaximum": 2**53 + 1}, "at /exclusiveMaximum: 9007199254740993 is no number"),
    ({"type": "number", "minimum": 10**400}, "at /minimum: 1000"),
    ({"type": "number", "maximum": 2**63 - 1}, "Failed to generate regex for float range"),
    ({"type": "number", "minimum": 1e30}, "at /minimum: is beyond 64 bits"),
    ({"const": 123456789012345678}, "at /const: 123456789012345678 is no number of floating point"),
    ({"enum": [1, {"a": [2**53 + 1]}]}, "at /enum: 9007199254740993 is no number"),
    ({"const": -(2**63)}, "at /const: -9223372036854775808 is beyond 64 bits"),
    ({"type": "integer", "enum": [-1e19]}, r"at /enum: -1e\+19 is beyond 64 bits"),
    ({"const": 1.152921504606847e18}, "at /const: .* is written with fewer digits"),
    (
        {**CODED, "additionalProperties": {"const": "\a"}},
        "at /additionalProperties: needs .* control characters cannot",
    ),
    ({**CODED, "additionalProperties": {"enum": ["\a", "\\\x1f"]}}, "at /additionalProperties: needs .* control char"),
    ({**CODED, "required": ["\a"]}, "needs .* control characters cannot be written where other names have schemas"),
    (text(pattern="a++"), "at /pattern: has a repetition of a repetition"),
    (text(pattern="(?x)a b"), "at /pattern: has the flags 'x'"),
    (text(pattern="[z-a]"), "at /pattern: has a range in brackets whose end comes before its beginning"),
    (text(pattern="[a"), "at /pattern: has an unclosed bracket"),
    (text(pattern=r"[\q]"), r"at /pattern: has '\\\\q' in brackets"),
    (text(pattern=r"\ud800"), r"at /pattern: has '\\\\ud800', which is no character"),
    (text(pattern="a\0"), "NUL|no character"),
    (text(pattern=r"a\x00"), "at /pattern: names the character NUL"),
    ({"patternProperties": {"[a": {}}}, "at /patternProperties: has an unclosed bracket"),
    ({**NAMES, "propertyNames": {"not": {"const": "a"}}}, "at /propertyNames/not: restricts names"),
    ({**NAMES, "propertyNames": {"format": "email"}}, "at /propertyNames/format: restricts names"),
    ({**NAMES, "propertyNames": {"pattern": "^a", "maxLength": 3}}, "at /propertyNames/maxLength: restricts names"),
    ({**NAMES, "propertyNames": {"type": "integer"}}, "at /propertyNames/type: allows no name"),
    ({**record(a={}), "propertyNames": {"pattern": "^a"}}, "at /propertyNames: .*`properties` too"),
    ({"patternProperties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "at /propertyNames: .*`patternProperties`"),
    ({"not": {}}, "allows no value"),
    (record("a", a={"not": {}}), "unsatisfiable"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains is not supported"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired is not supported"),
    ({**PETS, "$defs": LAX}, "oneOf constraints are not supported"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
]


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("date-time", ["2024-02-29T23:59:59Z", "2023-01-01t00:00:00.5+01:00"], ["2023-02-29T00:00:00Z", "2023-01-01"]),
        ("time", ["23:59:59.123z", "00:00:00-12:30"], ["23:59:60Z", "24:00:00Z", "00:00:00"]),
    ],
)
def test_a_time_is_one_that_python_has(grammars: Grammars, kind: str, right: list[str], wrong: list[str]) -> None:
    grammar = grammars.compile(StructuredOutputsParams(json=text(format=kind)))
    assert all(admits(grammar, BYTES, json.dumps(one)) for one in right)
    assert not any(admits(grammar, BYTES, json.dumps(one)) for one in wrong)


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_cannot_be_held_is_refused_by_name(grammars: Grammars, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidSampling, match=reason):
        grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))


def test_a_schema_inside_of_a_grammar_is_held_too(grammars: Grammars) -> None:
    schema = {**record(a={"type": "integer"}, b=text(pattern='^[^"]$')), "x-guidance": {"whitespace_flexible": False}}
    grammar = grammars.compile(StructuredOutputsParams(grammar=f'start: "=" %json {json.dumps(schema)} "."'))
    assert admits(grammar, BYTES, '={"a":1,"b":"c"}.')
    for wrong in ('={"a":1,"b":"\\""}.', '={"\\u0061":"x"}.'):
        assert not admits(grammar, BYTES, wrong)


def test_a_property_that_is_forbidden_in_an_alternative_is_no_error(grammars: Grammars) -> None:
    """The count of alternatives failed for it."""
    schema = {"anyOf": [record(a=False, b={}), record(a={}, b={"type": "integer"})]}
    assert admits(grammars.compile(StructuredOutputsParams(json=schema)), BYTES, '{"b": "x"}')

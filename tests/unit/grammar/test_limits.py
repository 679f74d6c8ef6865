"""What is too large for llguidance is refused by arithmetic, and what real programs ask for is not."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.grammar.forms import AnswerFamily, ToolError, forced_calls
from jswa.grammar.schema import SchemaError
from jswa.grammar.size import limits
from jswa.text.answers.template import compile_template, shipped
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.support.text.transcripts import tokenizer_of

ROOT = Path(__file__).parents[3]
NUMBER = {"type": "integer"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(ROOT / "jswa/assets/tiny")
    assert tokenizer is not None
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 6))


def record(names: int, schema: Any = NUMBER, **more: Any) -> dict[str, Any]:
    """An object of so many properties."""
    return {"type": "object", "properties": {f"p{i}": schema for i in range(names)}, **more}


def array(least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": NUMBER, "minItems": least}


def steps(*several: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "multipleOf": step} for step in several]}


def united(schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def doubled(links: int, key: str) -> dict[str, Any]:
    """Definitions that each name the next one twice."""
    nodes = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(links)}
    return {"$defs": {**nodes, f"d{links}": record(3)}, "$ref": "#/$defs/d0"}


def words(count: int, offset: int = 0) -> dict[str, Any]:
    return {"enum": [f"word {i + offset}" for i in range(count)]}


LARGE: dict[str, tuple[Any, str]] = {
    "a step": ({"type": "integer", "multipleOf": 999_983}, "at /multipleOf: .*10000"),
    "a step below": (
        record(2, {"type": "number", "multipleOf": 1.0009765625}),
        "at /properties/p0/multipleOf: .*10000",
    ),
    "steps": (steps(997, 991), "common multiple is more than 10000"),
    "steps of references": (
        {"$defs": {"a": {"type": "integer", "multipleOf": 997}}, "$ref": "#/$defs/a", "multipleOf": 991},
        "common multiple",
    ),
    "steps inside": (
        {
            "allOf": [
                record(1, {"type": "integer", "multipleOf": 997}),
                record(1, {"type": "integer", "multipleOf": 991}),
            ]
        },
        "common multiple",
    ),
    "many steps": (
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": 900 + i} for i in range(100)}},
        "30000 as the sum of its `multipleOf`",
    ),
    "optional properties": (record(4_000), "3900 places"),
    "of an inner object": (record(1, record(2_000)), "at /properties/p0: .*3900 places"),
    "of several objects": (united(record(300, title=str(i)) for i in range(4)), "3900 places"),
    "one of many": (record(2_000, maxProperties=2_000), "3900 places"),
    "at least one": (record(100, minProperties=1, additionalProperties=False), "3900 places"),
    "required names": ({"type": "object", "required": [f"p{i}" for i in range(15_000)]}, "10000 schemas and required"),
    "values": ({"const": [1] * 80_000}, "at /const: .*20000 values"),
    "a long value": (record(1, {"const": "a" * 40_000}), "at /properties/p0/const: .*32768"),
    "a long name": ({"properties": {"a" * 40_000: {}}}, "32768"),
    "copies of values": ({**united([{"type": "null"}] * 2_000), "const": [1] * 9_000}, "copies of schemas"),
    "copies of objects": (
        {"allOf": [united(record(1, {}, title=str(i)) for i in range(190)), {"properties": {"b": record(900)}}]},
        "too large",
    ),
    "copies for names": ({"allOf": [{"additionalProperties": record(900)}, record(900)]}, "copies of schemas"),
    "copies for patterns": (record(700, {}, patternProperties={"^p": record(700, {})}), "copies of schemas"),
    "references that double": (doubled(30, "allOf"), "too large"),
    "alternatives that double": (doubled(30, "anyOf"), "200 objects and arrays"),
    "a circle of copies": (
        {"$defs": {"a": record(1, {"$ref": "#/$defs/a"})}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        "on more than 120 levels",
    ),
    "alternatives": (united(array(i) for i in range(900)), "200 objects and arrays"),
    "nested alternatives": (
        united(record(1, united(array(i % 5) for i in range(60)), required=["p0"]) for _ in range(20)),
        "at /.*200 objects and arrays",
    ),
    "alternatives of items": (
        united({"type": "array", "items": united(array(i % 5) for i in range(60))} for _ in range(20)),
        "at /.*200 objects and arrays",
    ),
    "constants that are objects": ({"enum": [{"a": i} for i in range(2_000)]}, "200 objects and arrays"),
    "comparisons": (
        {"oneOf": [{"const": f"v{i}"} for i in range(9_000)]},
        "comparisons of the parts of a `oneOf`",
    ),
    "patterns of names": (
        {"type": "object", "patternProperties": {f"^x{i}_": {} for i in range(100)}},
        "at /patternProperties: .*5000 pairs",
    ),
    "patterns and names": (
        record(500, {}, patternProperties={f"^x{i}_": {} for i in range(20)}),
        "at /patternProperties: .*5000 pairs",
    ),
    "patterns and lengths": (
        {"$defs": {f"d{i}": record(20, {"type": "string", "pattern": f"a{i}", "maxLength": 60}) for i in range(60)}}
        | record(60, {})
        | {"properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(60)}},
        "1000 patterns and formats",
    ),
    "patterns and values": ({"type": "string", "pattern": "^w", **words(2_000)}, "1000 patterns and formats"),
    "not finite": ('{"type": "array", "minItems": 1e400}', "too large"),
    "a surrogate": (record(1, {"const": "\ud800"}), r"lone surrogate, '\\ud800'"),
    "a surrogate as a name": ({"properties": {"\ud800": {"$ref": "#/properties/\ud800"}}}, "lone surrogate"),
    "a surrogate that is escaped": ('{"const": "\\udfff"}', "lone surrogate"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_schema_is_refused_in_little_time(grammars: Grammars, name: str) -> None:
    schema, reason = LARGE[name]
    begin = time.process_time()
    with pytest.raises(InvalidSampling, match=reason) as found:
        grammars.compile(StructuredOutputsParams(json=schema))
    assert time.process_time() - begin < 5
    assert found.value.field == "structured_outputs.json"


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["a" * 200_000]}, "32768 characters"),
    ({"choice": [f"c{i}" for i in range(40_000)]}, "10000 strings"),
    ({"choice": ["\ud800"]}, "no valid Unicode"),
    ({"json_object": True, "whitespace_pattern": "\ud800"}, "no valid Unicode"),
    ({"grammar": "\n" * 250_000 + "a"}, "16384"),
    ({"grammar": "root ::= " + '"a" ' * 10_000}, "16384 characters of GBNF"),
    (
        {"grammar": "start: " + "| ".join(f"%json {json.dumps(steps(9_001 + i))}" for i in range(10))},
        "30000 as the sum",
    ),
    ({"grammar": 'start: %json {"const": "\\ud800"}'}, "lone surrogate"),
    (
        {
            "structural_tag": {
                "structures": [{"begin": f"<f{i}>", "end": "", "schema": steps(9_001 + i)} for i in range(10)],
                "triggers": ["<f"],
            }
        },
        "at /structures/3/schema.*30000 as the sum",
    ),
    ({"structural_tag": {"structures": [{}], "triggers": [f"<{i}" for i in range(2_000)]}}, "at /triggers: .*1000"),
    ({"structural_tag": {"structures": [{}] * 2_000, "triggers": ["<"]}}, "at /structures: .*1000"),
]


@pytest.mark.parametrize(("spec", "reason"), OTHERS)
def test_other_large_forms_are_refused_in_little_time(grammars: Grammars, spec: dict[str, Any], reason: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidSampling, match=reason):
        grammars.compile(StructuredOutputsParams(**spec))
    assert time.process_time() - begin < 5


def test_an_object_that_names_itself_often_is_not_written_out(grammars: Grammars) -> None:
    """The text of this one would have 2^80 lists."""
    schema: Any = [1]
    for _ in range(80):
        schema = [schema, schema]
    with pytest.raises(InvalidSampling, match="more than 262144 bytes of JSON"):
        grammars.compile(StructuredOutputsParams(json={"enum": schema}))


@pytest.mark.parametrize("choice", [1, True, 2.5, {"a": 1}, "abc", [], [1], [""]])
def test_a_choice_that_is_no_list_of_strings_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidSampling, match="a list of strings"):
        StructuredOutputsParams(choice=choice)


def test_the_tools_of_a_request_count_together(grammars: Grammars) -> None:
    template = compile_template(shipped()["hermes"], tokenizer_of(()))
    family = AnswerFamily(template.writes, grammars.vocabulary.special, frozenset(grammars.vocabulary.end_ids))
    tools = [{"name": f"f{i}", "parameters": record(1, {"type": "integer", "multipleOf": 9_001})} for i in range(10)]
    forced_calls(family, tools[:3], "done", parallel=True)
    with pytest.raises(ToolError, match="30000 as the sum") as found:
        forced_calls(family, tools, "done", parallel=True)
    assert found.value.index == 3
    with pytest.raises(ToolError, match="must be an object"):
        forced_calls(family, [{"name": "f", "parameters": [1]}], "done", parallel=True)


def tool(i: int) -> dict[str, Any]:
    arguments = record(12, {"type": "string", "maxLength": 200}, required=["p0", "p1"], additionalProperties=False)
    name = {"type": "object", "properties": {"name": {"const": f"tool_{i}"}, "arguments": arguments}}
    return {**name, "required": ["name", "arguments"], "additionalProperties": False}


# What agents and published schemas have, several times over.
REAL: dict[str, Any] = {
    "900 optional properties": record(900, {"type": "string"}),
    "properties that are required": record(3_000, required=[f"p{i}" for i in range(3_000)]),
    "values": record(3, words(1_000)),
    "many values": words(8_000),
    "tools": {"type": "array", "items": united(map(tool, range(150)))},
    "tools that exclude each other": {"oneOf": [tool(i) for i in range(150)]},
    "a large document": {
        "$defs": {f"part {i}": record(10, {"$ref": f"#/$defs/part {i + 1}"}, title="x" * 400) for i in range(120)}
        | {"part 120": words(200)},
        "allOf": [{"$ref": "#/$defs/part 0"}, {"description": "No more than that."}],
    },
    "values of a type": {"type": ["string", "null"], "enum": [*words(900)["enum"], None]},
    "patterns": record(300, {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 64}),
    "steps": record(20, {"type": "number", "multipleOf": 0.5}),
    "steps of many": {
        "properties": {f"p{i}": {"type": "integer", "multipleOf": n} for i, n in enumerate((5, 60, 1_000))}
    },
    "any name": {"type": "object", "patternProperties": {f"^x-{i}": {} for i in range(10)}, **record(200, {})},
    "at least one": record(20, minProperties=1, additionalProperties=False),
    "tree": {"anyOf": [record(2, {"$ref": "#"}), {"type": "array", "items": {"$ref": "#"}}, {"type": "string"}]},
}


@pytest.mark.parametrize("name", REAL)
def test_what_real_programs_ask_for_is_compiled(grammars: Grammars, name: str) -> None:
    matcher = grammars.compile(StructuredOutputsParams(json=REAL[name])).matcher()
    out = np.zeros(matcher.grammar.vocabulary.words, np.int32)
    for _ in range(12):
        matcher.fill(out)
        allowed = np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))
        assert len(allowed), matcher.error
        assert matcher.accept([int(allowed[len(allowed) // 2])]), matcher.error
        if matcher.finished:
            break


class Heavy:
    """Draws schemas whose parts are each near a bound."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def schema(self, depth: int) -> Any:
        number, draw = self._draw(st.sampled_from([2, 7, 30, 90])), self._draw
        inner = self.schema(depth - 1) if depth else draw(st.sampled_from([NUMBER, {"type": "string"}, words(number)]))
        kind = draw(st.integers(0, 11))
        return [
            lambda: record(number, inner),
            lambda: record(number, inner, required=[f"p{i}" for i in range(number // 2)]),
            lambda: united({"type": "array", "items": inner, "minItems": i % 3} for i in range(number)),
            lambda: united(record(2, inner, title=str(i)) for i in range(number)),
            lambda: {"allOf": [record(number, inner), {"additionalProperties": inner}]},
            lambda: {"allOf": [united([inner, words(number)]), united([inner, words(number, 5)])]},
            lambda: {"type": "string", "pattern": f"^[ab]*a[ab]{{{number // 4}}}$", "maxLength": number},
            lambda: {"oneOf": [record(1, {"const": i}, required=["p0"]) for i in range(number)]},
            lambda: {"type": "object", "patternProperties": {f"^x{i}.*a.{{3}}$": inner for i in range(number // 3)}},
            lambda: {"type": "integer", "multipleOf": number * 100, "minimum": -(10**15), "maximum": 10**15},
            lambda: {"$defs": {"a": inner}, "items": {"$ref": "#/$defs/a"}, "prefixItems": [inner] * (number // 5)},
            lambda: {"type": "string", "minLength": number, "maxLength": number * number},
        ][kind]()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_schema_within_the_bounds_takes_long(grammars: Grammars, data: st.DataObject) -> None:
    """To compile, to take a token, or to fill a mask. Seconds are processor time, with room for slow machines."""
    schema = Heavy(data.draw).schema(data.draw(st.integers(0, 2)))
    begin = time.process_time()
    try:
        grammar = grammars.compile(StructuredOutputsParams(json=schema))
    except InvalidSampling:
        return
    finally:
        assert time.process_time() - begin < 20
    matcher, out = grammar.matcher(), np.zeros(grammar.vocabulary.words, np.int32)
    for _ in range(20):
        begin = time.thread_time()
        matcher.fill(out)
        allowed = np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))
        if not len(allowed) or matcher.finished:
            break
        matcher.accept([int(data.draw(st.sampled_from(allowed.tolist())))])
        assert time.thread_time() - begin < 2


KEYWORDS = [
    "type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "enum", "const", "$ref",
    "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "multipleOf", "minimum", "exclusiveMaximum",
    "additionalProperties", "patternProperties", "minProperties", "maxProperties", "$defs", "exclusiveMinimum",
    "propertyNames", "not", "if", "then", "contains", "minContains", "maxContains", "uniqueItems", "additionalItems",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "discriminator",
]  # fmt: skip
ODD: list[Any] = [
    1, -1, 1.5, True, None, "x", "#", "#/properties/a", [], [1], ["a"], [{}], {}, {"a": {}}, {"a": 1}, [None], 1e308,
    10**30, -(2**63), 2.0, {"propertyName": "a"}, "object", "array", "string", ["string", "null"], [[]], {"a": [1]},
]  # fmt: skip
ODD_SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(KEYWORDS), st.sampled_from(ODD), max_size=4),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYWORDS),
        inner | st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner) | st.sampled_from(ODD),
        max_size=4,
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(ODD_SCHEMAS, st.sampled_from(["hermes", "gemma4", "qwen_xml", "olmo3"]), st.booleans())
def test_what_is_no_schema_is_refused(grammars: Grammars, schema: dict[str, Any], family: str, inside: bool) -> None:
    """As the schema of a text, and as the arguments of a tool."""
    with suppress(InvalidSampling):
        grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))
    writes = compile_template(shipped()[family], tokenizer_of(())).writes
    tools = [{"name": "f", "parameters": {"properties": {"a": schema}} if inside else schema}]
    with suppress(SchemaError):
        forced_calls(AnswerFamily(writes, {}, frozenset()), tools, "done", parallel=True)


def test_the_documentation_lists_the_limits() -> None:
    text = (ROOT / "docs/structured-outputs.md").read_text(encoding="utf-8")
    table = text[text.index("| limit of a form |") :].split("\n\n")[0]
    listed = [float(number) for number in re.findall(r"^\| .* \| ([\d.]+) \|$", table, re.MULTILINE)]
    single = [value for name, value in vars(limits).items() if name.startswith("MAX_")]
    assert sorted(listed) == sorted([*single, *(most for kind, (most, _) in limits.MOST.items() if kind != "schemas")])

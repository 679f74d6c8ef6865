"""The forms of benchmarks.hostile are what they say: new, valid, and just under the limits or just over."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.hostile import draw, forms
from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.grammar.schema import SchemaError, check_schema
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams

ROOT = Path(__file__).parents[4]
SCHEMAS: dict[str, Callable[[int], forms.Schema]] = {**forms.KINDS, "ordinary": forms.ordinary}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(ROOT / "jswa/assets/tiny")
    assert tokenizer is not None
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 6))


def names(schema: Any) -> set[str]:
    """The names of all properties in a schema."""
    if isinstance(schema, list):
        return set().union(*map(names, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", ())) | set().union(*(names(part) for part in schema.values()))


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schemas_are_valid_and_share_no_name_of_their_outer_properties(kind: str) -> None:
    number = next(forms.numbers())
    one, other = SCHEMAS[kind](number), SCHEMAS[kind](number + 1)
    for schema in (one, other):
        jsonschema.Draft202012Validator.check_schema(schema)
    shared = names(one) & names(other)
    assert all(name.startswith("field_") for name in shared)
    assert names(one) - shared


def test_numbers_are_new() -> None:
    first = list(islice(forms.numbers(), 1_000))
    later = next(forms.numbers())
    assert first == list(range(first[0], first[0] + 1_000))
    assert later > first[0]  # the clock has gone on


@pytest.mark.parametrize(("kind", "count"), [("optional", 970), ("over", 1_000), ("required", 2_000), ("ordinary", 30)])
def test_objects_have_their_number_of_properties(kind: str, count: int) -> None:
    assert len(SCHEMAS[kind](7)["properties"]) == count


@pytest.mark.parametrize("kind", [kind for kind in SCHEMAS if kind not in ("over", "mixed")])
def test_hostile_schemas_pass_the_limits(kind: str) -> None:
    check_schema(SCHEMAS[kind](7))


def test_one_schema_is_refused_by_arithmetic() -> None:
    with pytest.raises(SchemaError, match="3900 places"):
        check_schema(forms.over(7))


def test_mixed_schemas_are_of_all_other_kinds_in_turn() -> None:
    others = [make(number) for number, make in enumerate(forms.KINDS[kind] for kind in forms.KINDS if kind != "mixed")]
    assert [forms.mixed(number) for number in range(5)] == others


@pytest.mark.parametrize(
    "form",
    [lambda n: {"regex": forms.regex(n)}, lambda n: {"grammar": forms.lark(n)}, lambda n: {"json": forms.ordinary(n)}],
)
def test_each_form_is_compiled_anew(grammars: Grammars, form: Callable[[int], dict[str, Any]]) -> None:
    for number in (1, 2):
        before = grammars.compiled
        grammars.compile(StructuredOutputsParams(**form(number)))
        assert grammars.compiled == before + 1


def test_bodies_are_json_of_a_form() -> None:
    body = json.loads(forms.completion(3, {"regex": "a"}, stream=True))
    assert body["structured_outputs"] == {"regex": "a"}
    assert body["stream"]
    assert "structured_outputs" not in json.loads(forms.completion(3))
    chat = json.loads(forms.tools_chat(3))
    assert chat["tools"][0]["function"]["parameters"] == forms.ordinary(3)


def test_drawn_schemas_are_many_different_and_mostly_accepted(grammars: Grammars) -> None:
    found = draw.schemas(120, 1, None)
    assert len(set(found)) == 120
    assert draw.schemas(120, 1, None) == found
    refused = 0
    for text in found:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
        try:
            grammars.compile(StructuredOutputsParams(json=text))
        except InvalidSampling:
            refused += 1
    assert 0 < refused < 40


def test_a_few_schemas_are_drawn_too() -> None:
    """Few draws are the simplest examples alone, which are always the same."""
    assert len(draw.schemas(5, 1, None)) == 5


def test_the_schemas_of_the_suite_come_first_and_once(tmp_path: Path) -> None:
    (tmp_path / "draft7").mkdir()
    cases: list[dict[str, Any]] = [{"schema": {"const": 1}, "tests": []}, {"schema": {"const": 2}, "tests": []}]
    (tmp_path / "draft7" / "const.json").write_text(json.dumps(cases))
    (tmp_path / "const.json").write_text(json.dumps([*cases, {"schema": False}]))
    assert draw.schemas(3, 1, tmp_path) == ['{"const": 1}', '{"const": 2}', "false"]
    assert len(draw.schemas(6, 1, tmp_path)) == 6

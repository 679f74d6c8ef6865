"""Write the schemas that `benchmarks.hostile.schemas` sends, one a line: those of a test suite, and random ones.

    pip download --no-binary :all: --no-deps jsonschema && tar xzf jsonschema-*.tar.gz
    python -m benchmarks.hostile.draw schemas.jsonl --suite jsonschema-*/json/tests [--count 10000] [--seed 1]

The suite is JSON-Schema-Test-Suite, of which jsonschema's source has a copy. Most random schemas are such as
programs write; others have any keywords beside each other. No two lines are equal, and their order is random, so that a
part of the file is a sample of it.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

NAMES = st.sampled_from(["name", "size", "a", "b", "ab", "kind"]) | st.text(max_size=6)
SIZES = st.integers(0, 40)
EDGES = st.integers(-100, 100) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([2**53, -(2**63)])
PLAIN = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=20)
VALUES = st.recursive(PLAIN, lambda one: st.lists(one, max_size=3) | st.dictionaries(NAMES, one, max_size=3))
PIECES = ["a", "[a-z]", "[^b]", ".", r"\d", r"\w+", r"\s*", "(x|yz)", "(ab)*", "c?", "[0-9]{2,5}", "é"]
PATTERNS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
FORMATS = st.sampled_from(["date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"])
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
ENUM, RATIO = st.lists(VALUES, min_size=1, max_size=6), st.integers(1, 300) | st.sampled_from([0.5, 0.01, 9_973])
BOUNDS = {"minimum": st.integers(-100, 0), "maximum": st.integers(1, 200)}


def _of(kind: str, **keywords: Strategy) -> Strategy:
    """Return schemas of a type that have some of these keywords."""
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=keywords)


def _usual(inner: Strategy) -> list[Strategy]:
    """Return schemas as programs write them, whose parts are drawn from `inner`."""
    few, named = st.integers(0, 3), st.dictionaries(NAMES, inner, max_size=6)
    joined = [st.fixed_dictionaries({key: st.lists(inner, min_size=1, max_size=4)}) for key in ("anyOf", "oneOf")]
    return [
        _of("string", minLength=few, maxLength=SIZES.map(lambda size: size + 3)),
        *(_of("string", pattern=PATTERNS), _of("string", format=FORMATS)),
        *(_of("integer", **BOUNDS), _of("number", **BOUNDS), _of("integer", multipleOf=RATIO)),
        *(_of("boolean"), _of("null"), st.fixed_dictionaries({"enum": ENUM}), st.fixed_dictionaries({"const": VALUES})),
        _of("array", items=inner, minItems=few, maxItems=st.integers(3, 12)),
        _of("array", prefixItems=st.lists(inner, min_size=1, max_size=4), items=inner),
        _of("object", properties=named, required=st.lists(NAMES, max_size=3, unique=True)),
        _of("object", properties=named, additionalProperties=st.booleans() | inner),
        _of("object", patternProperties=st.dictionaries(PATTERNS, inner, max_size=2), additionalProperties=inner),
        *joined,
    ]  # fmt: skip


def _odd(inner: Strategy) -> Strategy:
    """Return schemas of any keywords beside each other: of no type or of several, and with bounds that contradict."""
    several, named = st.lists(inner, min_size=1, max_size=4), st.dictionaries(NAMES, inner, max_size=4)
    sizes = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    edges = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    parts = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
    every: dict[str, Strategy] = {
        **dict.fromkeys(sizes, SIZES), **dict.fromkeys(edges, EDGES), **dict.fromkeys(parts, inner),
        **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), several), "properties": named, "enum": ENUM,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2), "required": st.lists(NAMES, unique=True),
        "const": VALUES, "multipleOf": RATIO, "pattern": PATTERNS, "format": FORMATS, "uniqueItems": st.booleans(),
    }  # fmt: skip
    kinds = {"type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True)}
    names = st.lists(st.sampled_from(sorted(every)), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda few: st.fixed_dictionaries({name: every[name] for name in few}, optional=kinds))


def _schemas(inner: Strategy) -> Strategy:
    return st.one_of(*_usual(inner), _odd(inner))


SCHEMAS = st.recursive(_schemas(st.booleans()), _schemas, max_leaves=12)


def drawn(count: int, start: int) -> Iterator[Any]:
    """Yield random schemas; `start` is the seed. Some of them may be equal."""
    found: list[Any] = []

    @seed(start)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SCHEMAS)
    def collect(schema: Any) -> None:
        found.append(schema)

    collect()
    yield from found


def suite(folder: Path) -> Iterator[Any]:
    """Yield the schemas of JSON-Schema-Test-Suite, whose files are lists of {"schema": …, "tests": …}."""
    for path in sorted(folder.rglob("*.json")):
        yield from (case["schema"] for case in json.loads(path.read_text(encoding="utf-8")))


def schemas(count: int, start: int, folder: Path | None) -> list[str]:
    """Return `count` different schemas as JSON, those of the suite first."""
    found = dict.fromkeys(map(json.dumps, () if folder is None else suite(folder)))
    while len(found) < count:
        found |= dict.fromkeys(map(json.dumps, drawn(max(count, 100), start)))  # few draws are the simplest alone
        start += 1
    return list(found)[:count]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--suite", type=Path, help="the suite's folder of tests")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = schemas(given.count, given.seed, given.suite)
    random.Random(given.seed).shuffle(found)
    given.file.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    print(f"{len(found)} schemas, the longest of {max(map(len, found))} characters")


if __name__ == "__main__":
    main()

"""Schemas that generators write are compiled: pydantic's of many types of fields, and those of zod and OpenAPI."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Optional

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, Json, SecretStr, StringConstraints, create_model

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.types import StructuredOutputsParams
from tests.support.text.transcripts import tokenizer_of

BYTES = tokenizer_of(("<|end|>",))


class Color(enum.StrEnum):
    """Strings, one with a quotation mark."""

    RED = "red"
    BLUE = 'b"lue'


class Level(enum.Enum):
    """Values of several types."""

    LOW = 1
    NAMED = "x"
    NONE = None


class Cat(BaseModel):
    """A model whose discriminator has a default."""

    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    """A model whose discriminator has two values."""

    kind: Literal["dog", "puppy"]
    bark: str | None = None


class Tree(BaseModel):
    """A model that refers to itself."""

    value: int
    left: Optional["Tree"] = None
    branches: list["Tree"] = []


class Closed(BaseModel):
    """A model without other properties."""

    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    """A model with other properties of a type."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    a: str


class Pair(NamedTuple):
    """A tuple with names."""

    a: int
    b: str = "x"


FIELDS: list[Any] = [
    pathlib.Path, pydantic.FilePath, SecretStr, pydantic.SecretBytes, Json, Json[list[int]], decimal.Decimal, bytes,
    pydantic.Base64Bytes, pydantic.Base64UrlStr, pydantic.condecimal(max_digits=5, decimal_places=2),
    pydantic.constr(min_length=1, max_length=4, pattern=r"^[^\"\\]+$"), pydantic.conlist(int, min_length=1),
    pydantic.conint(ge=1, lt=10), pydantic.confloat(gt=0, le=1), dict[str, int], dict[int, str], dict[Color, int],
    dict[Literal["a", "b"], int], dict[uuid.UUID, int], dict[datetime.date, str],
    dict[Annotated[str, StringConstraints(pattern="^x")], int],
    dict[Annotated[str, StringConstraints(min_length=2)], int], dict[str, Any], Literal["a", 1, None, True],
    Annotated[Cat | Dog, Field(discriminator="kind")], Cat | Dog,
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta, pydantic.AwareDatetime, pydantic.PastDate,
    ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Interface,
    pydantic.IPvAnyAddress, uuid.UUID, pydantic.UUID4, pydantic.UUID7, tuple[int, str], tuple[int, ...], tuple[()],
    Color, Level, Tree, Closed, Open, Pair, pydantic.HttpUrl, pydantic.PostgresDsn, pydantic.ByteSize, re.Pattern,
    int | None, pydantic.PositiveInt, Annotated[int, Field(multiple_of=5)], deque[int], Sequence[int], Counter[str],
    None, object,
    Annotated[str, Field(examples=["a"], json_schema_extra={"x-note": {}, "format": "markdown", "deprecated": True})],
]  # fmt: skip

INTEGER = {"type": "integer", "minimum": -(2**53 - 1), "maximum": 2**53 - 1}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's
UUID = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
# As zod's toJSONSchema and zod-to-json-schema, OpenAPI and servers of tools write them.
WRITTEN: dict[str, dict[str, Any]] = {
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "record of names": {
        "type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER,
        "required": ["a", "b"],
    },
    "loose": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {}},
    "strict": {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "additionalProperties": False},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, INTEGER], "items": {"type": "boolean"}},
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 1, "maxItems": 1,
        "items": [{"type": "string"}], "additionalItems": False,
    },
    "formats": {
        "type": "object",
        "properties": {
            "e": {"type": "string", "format": "email", "pattern": EMAIL},
            "u": {"type": "string", "format": "uuid", "pattern": UUID},
            "b": {"type": "string", "format": "base64", "contentEncoding": "base64"},
            "i": {"type": "integer", "format": "int64"},
            "n": {"type": "number", "format": "double"},
            "f": {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"},
        },
    },
    "positive in OpenAPI 3.0": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "nullable": True},
    "discriminator of OpenAPI": {
        "oneOf": [{"$ref": "#/components/schemas/A"}, {"$ref": "#/components/schemas/B"}],
        "discriminator": {"propertyName": "t", "mapping": {"a": "#/components/schemas/A"}},
        "components": {"schemas": {
            "A": {"type": "object", "properties": {"t": {"type": "string", "enum": ["a"]}}},
            "B": {"type": "object", "properties": {"t": {"type": "string", "enum": ["b"]}}},
        }},
    },
    "server of tools": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/tool", "type": "object",
        "properties": {"path": {"type": "string", "description": "Where.", "format": "uri-reference", "example": "a"}},
        "required": ["path"], "additionalProperties": False, "x-order": 1, "examples": [{"path": "b"}],
        "dependentRequired": {}, "uniqueItems": False, "if": {"properties": {"path": {"const": "a"}}},
    },
    "password": {"type": "string", "pattern": r"^(?=.*[a-z])(?=.*\d)[A-Za-z\d@$!%*?&]{8,}$"},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(BYTES, BYTES.vocab_size, (BYTES.vocab_size - 1,))


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_a_model_of_pydantic_is_compiled(grammars: Grammars, field: Any, mode: Any) -> None:
    schema = create_model("Model", a=(field, ...), b=(list[field], [])).model_json_schema(mode=mode)
    grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_others_write_is_compiled(grammars: Grammars, name: str) -> None:
    grammars.compile(StructuredOutputsParams(json=WRITTEN[name]))


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (set[int], "at /properties/a: uniqueItems is not supported"),
        (Annotated[float, Field(multiple_of=0.1)], "at /properties/a/multipleOf: 0.1 is no whole number"),
        (Annotated[int, Field(le=2**53 + 1)], "at /properties/a/maximum: 9007199254740993 is no number"),
    ],
)
def test_what_cannot_be_held_is_named(grammars: Grammars, field: Any, reason: str) -> None:
    schema = create_model("Model", a=(field, ...)).model_json_schema()
    with pytest.raises(InvalidSampling, match=reason):
        grammars.compile(StructuredOutputsParams(json=json.dumps(schema)))

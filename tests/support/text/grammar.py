"""Random schemas, and texts that follow a grammar's masks at random."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jswa.grammar.matching.llg import Grammar, Matcher
from jswa.text.tokenizer import Tokenizer

_CLOSING = '"}]),'
_NAMES = ["a", "b", "name", "größe", "x y", "日本", "$id", "a/b", "~", ""]


def allowed_by(matcher: Matcher) -> list[int]:
    """Return the tokens that a matcher's mask allows."""
    out = np.zeros(matcher.grammar.vocabulary.words, np.int32)
    matcher.fill(out)
    return np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist()


def admits(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text may be the whole text of a grammar."""
    matcher = grammar.matcher()
    if not matcher.accept([int(token) for token in tokenizer.encode(text, add_special_tokens=False)]):
        return False
    return matcher.finished or bool({*allowed_by(matcher)} & {*grammar.vocabulary.end_ids})


def follow(
    matcher: Matcher, tokenizer: Tokenizer, rng: random.Random, *, closers: Sequence[str] = (), most: int = 1_000
) -> list[int]:
    """Return random tokens that the masks allow, up to the end of a text, or `most` of them.

    Tokens that end parts of a text are likelier than others: a random string would hardly end.

    Args:
        closers: texts that are taken now and then where they may follow.
    """
    close = {int(token) for token in tokenizer.encode(_CLOSING, add_special_tokens=False)}
    close |= {*matcher.grammar.vocabulary.special.values(), *matcher.grammar.vocabulary.end_ids}
    ids: list[int] = []
    while not matcher.finished and len(ids) < most:
        if closers and rng.random() < 0.1:
            text = [int(token) for token in tokenizer.encode(rng.choice(closers), add_special_tokens=False)]
            copy = matcher.copy()
            if copy.accept(text):
                matcher, ids = copy, [*ids, *text]
                continue
        mask = allowed_by(matcher)
        assert mask, f"no token is allowed: {matcher.error}"
        nearer = [token for token in mask if token in close]
        token = rng.choice(nearer if nearer and rng.random() < min(0.9, 0.5 + len(ids) / most) else mask)
        assert matcher.accept([token]), matcher.error
        if token in matcher.grammar.vocabulary.end_ids:
            break
        ids.append(token)
    return ids


class Schemas:
    """Draws JSON Schemas of what llguidance knows: bounds, formats, patterns, unions, references and recursion."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._defined: dict[str, Any] = {}

    def draw(self) -> dict[str, Any]:
        """Return a schema. A third of them refer to definitions, which may refer to themselves."""
        rng = self._rng
        if rng.random() < 1 / 3:
            self._defined = {"leaf": self._part(1), "tree": {}}
            inner = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}, {"$ref": "#/$defs/leaf"}]}
            self._defined["tree"] = self._object(2, extra={"next": inner})
            if rng.random() < 0.5:
                array = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
                self._defined["tree"]["properties"]["parts"] = array
        whole = self._object(3) if rng.random() < 0.7 else self._part(3)
        return {**whole, "$defs": self._defined} if self._defined else whole

    def _part(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        simple: list[Callable[[], dict[str, Any]]] = [self._string, self._integer, self._number, self._constant]
        if depth <= 0 or rng.random() < 0.4:
            return rng.choice(simple)()
        if self._defined and rng.random() < 0.3:
            return {"$ref": f"#/$defs/{rng.choice(sorted(self._defined))}"}
        return rng.choice([self._object, self._array, self._union, self._map])(depth - 1)

    def _object(self, depth: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0 if extra else 1, 4))
        properties = {name: self._part(depth - 1) for name in names} | (extra or {})
        required = [name for name in names if rng.random() < 0.6]
        closed = {"additionalProperties": False} if rng.random() < 0.7 else {}
        return {"type": "object", "properties": properties, "required": required, **closed}

    def _map(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.3:
            parts = {"^x": self._part(depth - 1), "^\\d+$": self._part(depth - 1)}
            return {"type": "object", "patternProperties": parts, "additionalProperties": False}
        if rng.random() < 0.3:
            names = [{"type": "string"}, {"pattern": '^[^"]+$'}, {"maxLength": 3}, {"enum": ["a", 'b"', "c\nd"]}]
            return {"type": "object", "propertyNames": rng.choice(names), "additionalProperties": self._part(depth - 1)}
        most = rng.randint(1, 3)
        bounds = {"minProperties": rng.randint(0, 1), "maxProperties": most} if rng.random() < 0.5 else {}
        return {"type": "object", "additionalProperties": self._part(depth - 1), **bounds}

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {"type": "array", "items": self._part(depth - 1)}
        if rng.random() < 0.3:
            found |= {"prefixItems": [self._part(depth - 1) for _ in range(rng.randint(1, 2))]}
        if rng.random() < 0.6:
            least = rng.randint(0, 3)
            found |= {"minItems": least, "maxItems": least + rng.randint(0, 3)}
        return found

    def _union(self, depth: int) -> dict[str, Any]:
        parts = [self._part(depth - 1) for _ in range(self._rng.randint(2, 3))]
        if self._rng.random() < 0.3:
            return {
                "oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "array", "items": parts[0]}]
            }
        if self._rng.random() < 0.3:
            return {"allOf": [self._object(depth), self._object(depth)]}
        return {"anyOf": parts}

    def _string(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.randrange(5)
        if kind == 0:
            formats = [
                "date",
                "date-time",
                "time",
                "email",
                "ipv4",
                "ipv6",
                "uuid",
                "hostname",
                "duration",
                "uri",
                "path",
            ]
            return {"type": "string", "format": rng.choice(formats)}
        if kind == 1:
            patterns = ["^[a-z]{2,5}$", "^(foo|bär)+$", "[0-9]", "^\\d{3}-\\w+$", "^日.本?$", '^[^"\\\\]*$', "a|b$",
                        '^[^"]+$', r"^[^\\]+$", r"^\W\S$", r"^(?!\.)[^\n]*$"]  # fmt: skip
            return {"type": "string", "pattern": rng.choice(patterns)}
        if kind == 2:
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
        return {"type": ["string", "null"]} if kind == 3 else {"type": "string"}

    def _integer(self) -> dict[str, Any]:
        rng = self._rng
        low = rng.randint(-1000, 1000)
        bounds: list[dict[str, Any]] = [
                  {}, {"minimum": low}, {"maximum": low}, {"minimum": 0, "maximum": 2**40}, {"exclusiveMinimum": low},
                  {"minimum": low, "exclusiveMaximum": low + rng.randint(1, 500)},
                  {"multipleOf": rng.choice([2, 3, 7, 10])}]  # fmt: skip
        return {"type": "integer", **rng.choice(bounds)}

    def _number(self) -> dict[str, Any]:
        rng = self._rng
        low = round(rng.uniform(-50, 50), rng.randint(0, 3))
        bounds: list[dict[str, Any]] = [
                  {}, {"minimum": low}, {"exclusiveMaximum": low}, {"minimum": low, "maximum": low + 2.5},
                  {"exclusiveMinimum": low, "exclusiveMaximum": low + 0.125}, {"exclusiveMinimum": round(low)},
                  {"multipleOf": rng.choice([0.5, 0.25, 2])}]  # fmt: skip
        return {"type": "number", **rng.choice(bounds)}

    def _constant(self) -> dict[str, Any]:
        values = ["a", 'ä\n"\\', "日本", "</s>", 0, -1, 2.5, True, None, [1, "x"], {"k": [None]}, "\u0007", "😀", False]
        chosen = self._rng.sample(values, self._rng.randint(1, 4))
        return {"enum": chosen} if len(chosen) > 1 else {"const": chosen[0]}

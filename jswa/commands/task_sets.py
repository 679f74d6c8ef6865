"""Read the task sets of `jswa eval`, and score answers. Imports neither jax nor the engine.

A folder holds one set per task, such as `passkey.jsonl` for the task "passkey". Each line is a JSON object:

    {"task": "passkey", "distance": 512, "prompt": "…", "answer": "71294", "score": "exact"}
    {"task": "json", "distance": null, "messages": [{"role": "user", "content": "…"}], "answer": "", "score": "json",
     "schema": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}}
    {"task": "calls", "distance": null, "tools": [{"type": "function", "function": {"name": "f", …}}],
     "messages": [{"role": "user", "content": "…"}], "answer": "", "score": "call"}
    {"task": "stories", "distance": null, "prompt": "…", "answer": "", "score": "bits"}

* task: the name of the file without `.jsonl`.
* distance: number of tokens between a fact and the question about it, counted with the tokenizer of `tiny`; null if the
  task has no such distance. Results are reported per distance.
* prompt or messages: a text to continue, or a conversation that the model's chat template renders with a generation
  prompt.
* score: `exact`: the first line of the greedy text, stripped, equals the answer. `json`: the whole greedy text is JSON,
  satisfies the schema and, if the answer is not empty, equals the answer as a JSON value. `call`: the model makes one
  tool call, whose name and arguments equal the answer, {"name": "…", "arguments": {…}}, as a JSON value; if the answer
  is empty, it makes none. `bits`: bits per UTF-8 byte of the prompt; the model generates nothing, and the answer is
  empty.
* tools: in OpenAI's form; required if the score is `call`, otherwise not allowed.
* schema: required if the score is `json`, otherwise not allowed. The JSON Schema keywords type, properties, required,
  enum and additionalProperties (true or false) are known; other keywords are refused, not ignored.
"""

import json
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Never, cast

from jswa.errors import CheckpointError, TaskSetError
from jswa.storage.json_object import MAX_BYTES, parse_object

Score = Literal["exact", "json", "call", "bits"]
FOLDER = Path(__file__).parent.parent / "assets" / "eval"
MAX_DISTANCE = 2**31 - 1
MAX_DEPTH = 32  # nesting of a schema, or of an answer in JSON
_SCORES = ("exact", "json", "call", "bits")
_FIELDS = ("task", "distance", "prompt", "messages", "answer", "score", "schema", "tools")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# The accepted value of each keyword, in words and as a check.
_KEYWORDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one of {', '.join(_TYPES)}", lambda value: isinstance(value, str) and value in _TYPES),
    "properties": ("an object of schemas", lambda value: isinstance(value, dict)),
    "required": ("a list of names", _is_names),
    "enum": ("a list of values, at least one", lambda value: isinstance(value, list) and len(value) > 0),
    "additionalProperties": ("true or false", lambda value: isinstance(value, bool)),
}


@dataclass(frozen=True)
class Item:
    """One line of a set. `prompt` is None if there are messages; `line` counts from 1."""

    task: str
    distance: int | None
    prompt: str | None
    messages: Sequence[Mapping[str, str]]
    answer: str
    score: Score
    schema: Mapping[str, Any]
    line: int
    tools: Sequence[Mapping[str, Any]] = ()


def read_sets(folder: Path, tasks: Sequence[str] = (), limit: int | None = None) -> dict[str, list[Item]]:
    """Return the items by task, of all sets in a folder or of the named `tasks`.

    `limit`: keep only the first items of each task and distance, this many. Raises TaskSetError if a set is missing or
    malformed.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.jsonl"))} if folder.is_dir() else {}
    if not found:
        raise TaskSetError(
            folder, None, "sets", str(folder), "must be a folder with task sets, one NAME.jsonl per task"
        )
    for name in tasks:
        if name not in found:
            raise TaskSetError(folder, None, "tasks", name, f"must be one of {', '.join(found)}")
    return {name: _first(read_set(found[name]), limit) for name in (tasks or found)}


def read_set(path: Path) -> list[Item]:
    """Return the items of a file, at least one. Raises TaskSetError, which names the line and the field."""
    items = []
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            raw = parse_object(line, "the line")
        except CheckpointError as error:
            shown = line[:80].decode("utf-8", "replace")
            raise TaskSetError(path, number, "line", shown, f"must be a JSON object; {error}") from error
        entry = _Line(path, number, raw)
        items.append(entry.item())
        if (items[-1].score == "bits") != (items[0].score == "bits"):
            entry.refuse(
                "score",
                items[-1].score,
                f"must be bits in all items of a set or in none; the first is {items[0].score}",
            )
    if not items:
        raise TaskSetError(path, None, "items", 0, "must be at least 1")
    return items


def is_correct(item: Item, text: str) -> bool:
    """Whether a generated text is correct, for an item with the score `exact`, `json` or `call`.

    The text of a call is JSON: an object with `name` and `arguments`, a list of them, or empty if there is none.
    """
    if item.score == "call" and not item.answer:
        return not text
    if item.score == "exact":
        return text.strip().split("\n")[0].strip() == item.answer
    try:
        value = parse_json(text)
    except ValueError:
        return False
    return satisfies(value, item.schema) and (not item.answer or same(value, parse_json(item.answer)))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for NaN and infinities and for too deep nesting."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def satisfies(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value satisfies a schema, which may use the keywords of _KEYWORDS only."""
    if "type" in schema and not _has_type(value, schema["type"]):
        return False
    if "enum" in schema and not any(same(value, one) for one in schema["enum"]):
        return False
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    if not all(name in value for name in schema.get("required", ())):
        return False
    if not schema.get("additionalProperties", True) and not value.keys() <= properties.keys():
        return False
    return all(satisfies(value[name], part) for name, part in properties.items() if name in value)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but 1 does not equal true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


@dataclass(frozen=True)
class _Line:
    """A line of a file, parsed but not checked. Its methods return the checked fields or raise TaskSetError."""

    path: Path
    number: int
    raw: Mapping[str, Any]

    def item(self) -> Item:
        for name in self.raw:
            if name not in _FIELDS:
                self.refuse(name, self.raw[name], f"is not a field; the fields are {', '.join(_FIELDS)}")
        score = self.raw.get("score")
        if score not in _SCORES:
            self.refuse("score", score, f"must be one of {', '.join(_SCORES)}")
        if self.raw.get("task") != self.path.stem:
            self.refuse("task", self.raw.get("task"), f"must be the name of the file without .jsonl, {self.path.stem}")
        prompt = self.text("prompt") if "prompt" in self.raw else None
        return Item(
            self.path.stem,
            self.distance(),
            prompt,
            self.messages(score),
            self.answer(score),
            cast(Score, score),
            self.schema(score),
            self.number,
            self.tools(score),
        )

    def distance(self) -> int | None:
        value = self.raw.get("distance", "")
        if value is None or (type(value) is int and 0 <= value <= MAX_DISTANCE):
            return value
        self.refuse("distance", self.raw.get("distance"), f"must be null or a whole number in [0, {MAX_DISTANCE}]")

    def messages(self, score: str) -> Sequence[Mapping[str, str]]:
        given = [name for name in ("prompt", "messages") if name in self.raw]
        if len(given) != 1:
            self.refuse("prompt", self.raw.get("prompt"), "must be present, or messages, but not both")
        if given == ["prompt"]:
            if score == "call":
                self.refuse("prompt", self.raw["prompt"], "must be messages if the score is call")
            return ()
        value = self.raw["messages"]
        if score == "bits":
            self.refuse("messages", value, "must be a prompt if the score is bits")
        if not isinstance(value, list) or not value or not all(_is_message(one) for one in value):
            self.refuse("messages", value, "must be a non-empty list of objects with the strings role and content")
        return value

    def answer(self, score: str) -> str:
        answer = self.text("answer", empty=score != "exact")
        if score == "exact" and (answer != answer.strip() or "\n" in answer):
            self.refuse("answer", answer, "must be one line without surrounding white space if the score is exact")
        if score == "bits" and answer:
            self.refuse("answer", answer, "must be empty if the score is bits")
        if score in ("json", "call") and answer:
            try:
                value = parse_json(answer)
            except ValueError as error:
                self.refuse("answer", answer, f"must be empty or JSON if the score is {score}; {error}")
            if _depth(value) > MAX_DEPTH:
                self.refuse("answer", answer, f"must be nested at most {MAX_DEPTH} deep")
            if score == "call" and not (isinstance(value, dict) and value.keys() == {"name", "arguments"}):
                self.refuse("answer", answer, "must be empty or an object with name and arguments if the score is call")
        return answer

    def tools(self, score: str) -> Sequence[Mapping[str, Any]]:
        value = self.raw.get("tools")
        if score != "call":
            if "tools" in self.raw:
                self.refuse("tools", value, "must be absent unless the score is call")
            return ()
        if _depth(value) > MAX_DEPTH:
            self.refuse("tools", value, f"must be nested at most {MAX_DEPTH} deep")
        if not isinstance(value, list) or not value or not all(map(_is_tool, value)):
            self.refuse("tools", value, "must be a non-empty list of functions in OpenAI's form if the score is call")
        return value

    def schema(self, score: str) -> Mapping[str, Any]:
        value = self.raw.get("schema")
        if score != "json":
            if "schema" in self.raw:
                self.refuse("schema", value, "must be absent unless the score is json")
            return {}
        if _depth(value) > MAX_DEPTH:
            self.refuse("schema", value, f"must be nested at most {MAX_DEPTH} deep")
        self.check_schema("schema", value)
        assert isinstance(value, dict)
        return value

    def check_schema(self, field: str, schema: Any) -> None:
        if not isinstance(schema, dict):
            self.refuse(field, schema, "must be an object if the score is json")
        for name, value in schema.items():
            if name not in _KEYWORDS:
                self.refuse(
                    f"{field}.{name:.80}",
                    value,
                    f"is not a known keyword; the known keywords are {', '.join(_KEYWORDS)}",
                )
            words, fits = _KEYWORDS[name]
            if not fits(value):
                self.refuse(f"{field}.{name}", value, f"must be {words}")
        for name, part in schema.get("properties", {}).items():
            self.check_schema(f"{field}.properties.{name:.80}", part)

    def text(self, name: str, *, empty: bool = False) -> str:
        value = self.raw.get(name)
        if not _is_text(value) or (not value and not empty):
            self.refuse(name, value, "must be a string" + ("" if empty else ", not empty"))
        return cast(str, value)

    def refuse(self, field: str, value: object, limit: str) -> Never:
        if _depth(value) > MAX_DEPTH:  # perhaps too deep for `repr`
            value = f"nested {_depth(value)} deep"
        raise TaskSetError(self.path, self.number, field, value, limit)


def _read(path: Path) -> bytes:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would block for ever, reading a device would never end
            raise TaskSetError(path, None, "sets", str(path), "must be a regular file")
        if info.st_size > MAX_BYTES:
            raise TaskSetError(path, None, "bytes", info.st_size, f"must be at most {MAX_BYTES}")
        with path.open("rb") as file:
            return file.read(info.st_size)
    except OSError as error:
        raise TaskSetError(path, None, "sets", str(path), f"must be a readable file; {error}") from error


def _first(items: list[Item], limit: int | None) -> list[Item]:
    if limit is None:
        return items
    counts: dict[int | None, int] = {}
    first: list[Item] = []
    for item in items:
        counts[item.distance] = counts.get(item.distance, 0) + 1
        first += [item] if counts[item.distance] <= limit else []
    return first


def _is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can encode: JSON may contain half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"role", "content"} and all(map(_is_text, value.values()))


def _is_tool(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and _is_text(function.get("name"))


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
    return depth


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")

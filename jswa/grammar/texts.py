"""The text of a grammar for llguidance, from what a request asks for."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jswa.grammar.exact.admitted import admitted
from jswa.grammar.matching.llg import GrammarError, is_gbnf, lark_of
from jswa.grammar.patterns import check_lark, check_pattern
from jswa.grammar.schema import Schema, SchemaError, check_schema, read_json
from jswa.grammar.size.limits import MAX_BYTES, MAX_CHOICES, MAX_LARK, MAX_TAGS, SchemaCounts
from jswa.grammar.size.work import check_text
from jswa.types import StructuredOutputsParams

# One space may follow "," and ":": weak models fill a place where any white space may be with hundreds of blanks.
SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
COMPACT = {"whitespace_flexible": False}
UNFORCED = '%llguidance {"no_forcing": true}'  # rules that repeat each other may force texts without end
_CODE = re.compile(r"\\x\{([0-9a-f]+)\}")  # of a character, as `escaped` writes it
_CONTROLS = re.compile("[\x7f-\x9f]")
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*+"|/(?:[^/\\\n]|\\.)*+/', re.DOTALL)
ANY_TEXT = r"/(?s:.*)/"


def grammar_text(spec: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """Return the grammar of a specification, in Lark or in llguidance's JSON.

    Args:
        special: ids of the vocabulary's special tokens by their text.

    Raises SchemaError, whose pointer leads into a schema or a structural tag.
    """
    spaces = json_options(spec)
    if spec.json is not None:
        return schema_grammar(check_schema(read_json(spec.json)), spaces)
    if spec.json_object:
        return schema_grammar({"type": "object"}, spaces)
    if spec.structural_tag is not None:
        return _tags(read_json(spec.structural_tag), special, spaces)
    if spec.choice is not None:
        _check_choice(spec.choice)
        return _regex_grammar("|".join(map(escaped, spec.choice)))
    text = spec.regex if spec.regex is not None else spec.grammar
    assert text is not None
    _check_size(text)
    if spec.grammar is None:
        check_pattern(text)
        return _regex_grammar(text)
    counts = SchemaCounts()
    text, behind = check_lark(_lark(text))
    for schema, rest in behind:
        text += f"%json {_inner(check_schema(schema, counts))}{rest}"
    return f"{UNFORCED}\n{text}"


def grammar_behind(begin: str, spec: StructuredOutputsParams, end: str, lines: Sequence[str]) -> str:
    """Return the grammar of a text that has a form behind and before other parts. Raises SchemaError.

    Args:
        begin, end: the other parts, as of a rule in Lark.
        lines: the rules that they name.
    """
    spaces = json_options(spec)
    if spec.json is not None or spec.json_object:
        schema = {"type": "object"} if spec.json is None else check_schema(read_json(spec.json))
        return "\n".join([f"start: {begin} {schema_rule(schema, spaces)} {end}", *lines])
    text = grammar_text(spec, {})
    if spec.form in ("regex", "choice"):
        return "\n".join([f"start: {begin} {text.removeprefix('start: ')} {end}", *lines])
    whole = "\n".join([f"start: {begin} @form {end}", *lines])
    return json.dumps({"grammars": [{"lark_grammar": whole}, {"name": "form", "lark_grammar": text}]})


def unforced(text: str, special: Iterable[str]) -> str:
    """Return a grammar that forces no tokens, if it has the text of a special token; else the grammar as it is.

    Where a text is forced, llguidance takes the tokenizer's tokens of it. Of a special token's text that is the token
    itself, which is no text in a grammar: nothing could follow.
    """
    grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    for one in grammars:
        if "json_schema" in one:
            one["lark_grammar"] = f"start: %json {_quoted(one.pop('json_schema'))}"
    written = "\0".join(part for one in grammars for part in _LITERAL.findall(one["lark_grammar"]))
    plain = _CODE.sub(lambda found: chr(int(found[1], 16)), written).replace("\\", "")
    if UNFORCED in text or not any(one in plain for one in special):
        return text
    for one in grammars:
        one["lark_grammar"] = f"{UNFORCED}\n{one['lark_grammar']}"
    return json.dumps({"grammars": grammars})


def json_options(spec: StructuredOutputsParams) -> Mapping[str, Any]:
    """Return llguidance's options for the white space of JSON."""
    if spec.whitespace_pattern is not None:
        check_pattern(spec.whitespace_pattern)
        return {"whitespace_pattern": spec.whitespace_pattern}
    return COMPACT if spec.disable_any_whitespace else SPACED


def schema_grammar(schema: Schema, spaces: Mapping[str, Any]) -> str:
    """Return the grammar of a schema in llguidance's JSON."""
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, spaces)}]})


def schema_rule(schema: Schema, spaces: Mapping[str, Any] = SPACED) -> str:
    """Return a schema as part of a rule in Lark."""
    return f"%json {json.dumps(_with_options(schema, spaces))}"


def _inner(schema: Schema) -> str:
    """Return a schema inside of a grammar, with the options of llguidance that it has itself."""
    made, options = admitted(schema)
    own = made.get("x-guidance") if isinstance(made, Mapping) else None
    if isinstance(made, Mapping) and options:
        made = {**made, "x-guidance": {**(own if isinstance(own, Mapping) else {}), **options}}
    return json.dumps(made)


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a text as part of a rule in Lark, its special tokens as tokens; the empty text has the empty rule."""
    if not special:
        return _quoted(text)
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(f"<[{special[p]}]>" if p in special else _quoted(p) for p in parts) or '""'


def _quoted(value: Any) -> str:
    """Return a text, or other JSON, as it stands in Lark: without control characters, of which JSON may have some."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def escaped(text: str) -> str:
    """Return a regular expression, in the syntax of Rust's crate, that matches a text and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _lark(text: str) -> str:
    """Return a grammar in Lark that may be written in GBNF. Raises SchemaError."""
    if not is_gbnf(text):
        return text
    if len(text) > MAX_LARK:
        raise SchemaError("", f"has more than {MAX_LARK} characters of GBNF")
    try:
        return lark_of(text)
    except GrammarError as error:
        raise SchemaError("", str(error)) from error


def _check_choice(choice: Sequence[str]) -> None:
    if len(choice) > MAX_CHOICES:
        raise SchemaError("", f"has more than {MAX_CHOICES} strings")
    _check_size("".join(choice))
    for text in choice:
        check_text(text)


def _check_size(text: str) -> None:
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise SchemaError("", f"has more than {MAX_BYTES} bytes")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SchemaError("", "is no valid Unicode") from error


def _with_options(schema: Schema, spaces: Mapping[str, Any]) -> Schema:
    """Return a schema with llguidance's options, in place of any that it has itself."""
    if schema is False:
        raise SchemaError("", "allows no value")
    made, options = admitted(schema)
    return {**(made if isinstance(made, Mapping) else {}), "x-guidance": {**spaces, **options}}


def _regex_grammar(pattern: str) -> str:
    return f"start: /{_in_slashes(pattern)}/"


def _in_slashes(pattern: str) -> str:
    """Return a regular expression as it stands between slashes, on one line."""
    blanks = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"\\?([/\n\r])|\\.", lambda found: blanks.get(found[1], found[0]), pattern, flags=re.DOTALL)


def _tags(value: Any, special: Mapping[str, int], spaces: Mapping[str, Any]) -> str:
    """Return the grammar of free text in which each trigger begins one of the tags that start with it."""
    if not isinstance(value, dict) or not {"structures", "triggers"} <= value.keys():
        raise SchemaError("", "must have `structures` and `triggers`; other forms of structural tags are not known")
    structures, triggers = value["structures"], value["triggers"]
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise SchemaError("/triggers", "must be a list of strings, none of them empty")
    if not isinstance(structures, list) or not structures:
        raise SchemaError("/structures", "must be a list of objects")
    for name, several in (("triggers", triggers), ("structures", structures)):
        if len(several) > MAX_TAGS:
            raise SchemaError(f"/{name}", f"has more than {MAX_TAGS} entries")
    rules: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    longest, counts = sorted(triggers, key=len, reverse=True), SchemaCounts()
    for i, one in enumerate(structures):
        trigger, rule = _tag(one, f"/structures/{i}", longest, special, spaces, counts)
        rules[trigger].append(rule)
    lines = ["start: tag* TEXT", f"TEXT: {ANY_TEXT}"]
    used = [trigger for trigger in triggers if rules[trigger]]
    lines.append("tag: " + " | ".join(f"tag_{i}" for i in range(len(used))))
    for i, trigger in enumerate(used):
        begin = f"TEXT <[{special[trigger]}]>" if trigger in special else f"begin_{i}"
        lines.append(f"tag_{i}: {begin} ({' | '.join(rules[trigger])})")
        if trigger not in special:
            lines.append(f"begin_{i}[lazy]: /(?s:.*){escaped(trigger)}/")
    return "\n".join(lines)


def _tag(
    one: Any, at: str, triggers: list[str], special: Mapping[str, int], spaces: Mapping[str, Any], counts: SchemaCounts
) -> tuple[str, str]:
    """Return the trigger of a tag, the first of these that fits, and the rule of what follows it."""
    if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("begin", "end")):
        raise SchemaError(at, "must have strings `begin` and `end`, and a `schema`")
    trigger = next((t for t in triggers if one["begin"].startswith(t)), None)
    if trigger is None:
        raise SchemaError(f"{at}/begin", "must begin with one of the triggers")
    try:
        rule = schema_rule(check_schema(one.get("schema", True), counts), spaces)
    except SchemaError as error:
        raise SchemaError(f"{at}/schema{error.pointer}", error.reason) from error
    begin, end = (literal(part, special) if part else "" for part in (one["begin"][len(trigger) :], one["end"]))
    return trigger, f"{begin} {rule} {end}".strip()

"""Limits of regular expressions and of grammars that a client writes, in which llguidance's time is not bounded.

A long expression takes time that grows with the square of its length, and a text that is forced is computed whole.
"""

import json
import re
from typing import Any

from jswa.grammar.bounds import SchemaError
from jswa.grammar.size.limits import MAX_LARK, MAX_LINES, MAX_PATTERN, MAX_REPEATS

_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")


def check_pattern(pattern: str, at: str = "") -> None:
    """Raise SchemaError for a regular expression that is too long, or that asks for too long texts."""
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(at, "is a regular expression that is no valid Unicode") from error
    if len(pattern) > MAX_PATTERN:
        raise SchemaError(at, f"is a regular expression of more than {MAX_PATTERN} characters")
    if _shortest(pattern) > MAX_REPEATS:
        raise SchemaError(at, f"is a regular expression of texts of more than {MAX_REPEATS} characters")


def check_lark(text: str) -> tuple[str, list[tuple[Any, str]]]:
    """Return the schemas that a grammar in Lark has inside, each with the text behind it; before them the text ahead.

    Raises SchemaError if the grammar is too long.
    """
    head, *parts = re.split(r"%json(?![\w-])", text)
    schemas = []
    for part in (part.lstrip() for part in parts):
        try:
            schema, end = json.JSONDecoder().raw_decode(part)
        except (ValueError, RecursionError) as error:
            raise SchemaError("", f"has a schema that is no JSON: {str(error)[:100]}") from error
        schemas.append((schema, part[end:]))
    rest = head + "".join(behind for _, behind in schemas)
    if len(rest) > MAX_LARK:
        raise SchemaError("", f"has more than {MAX_LARK} characters besides its schemas")
    if rest.count("\n") >= MAX_LINES:
        raise SchemaError("", f"has more than {MAX_LINES} lines")
    if text.lstrip().startswith("{"):
        raise SchemaError("", "must be in Lark or GBNF, not JSON")
    return head, schemas


def _shortest(pattern: str) -> int:
    """Return an estimate of the length of the shortest text that a regular expression matches."""
    sums, last, at = [0], 0, 0  # of the open groups; of the last atom
    while at < len(pattern):
        character = pattern[at]
        count = _COUNT.match(pattern, at)
        if count is not None:
            sums[-1] += last * (int(count[1]) - 1)
            last, at = last * int(count[1]), count.end()
            continue
        if character in "?*":
            sums[-1] -= last
            last = 0
        elif character == "(":
            sums.append(0)
            last = 0
        elif character == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif character not in "|^$+":
            if character == "\\":
                at += 1
            elif character == "[":
                closing = pattern.find("]", at + 2)
                at = closing if closing >= 0 else at
            last = 1
            sums[-1] += 1
        at += 1
    return max(sums)

r"""Lookaheads at the beginning of a regular expression, said as expressions that a text must match as well.

llguidance has no lookahead, but it joins expressions. `^(?=.*\d)\w+$` is `^.*\d` and `^\w+$`. Of what may not be
ahead, only what generators write is known: `(?!A)`, `(?!.*A)` and `(?!.*AA)`, where A is one character or a class.
"""

import re

from jswa.grammar.bounds import SchemaError
from jswa.grammar.exact.expressions import in_rust
from jswa.grammar.size.limits import MAX_JOINED

_ATOM = r"(?:\\[^A-Za-z0-9]|\\[dDwWsS]|[A-Za-z0-9 _@#%&=:;,<>'\"/~`!-]|\[\^?(?:\\.|[^\]\\])+\])"
_ABSENT = re.compile(rf"(?P<first>{_ATOM})|\.\*(?P<any>{_ATOM})|\.\*(?P<twice>{_ATOM})(?P=twice)")
_AHEAD = re.compile(r"\(\?[=!]")


def joined(pattern: str, at: str = "") -> list[str]:
    """Return the expressions, in Rust's syntax, all of which a text must match to match this one.

    Raises SchemaError as `in_rust` does, and for too many lookaheads.
    """
    rest, found = pattern, list[str]()
    while rest.startswith(("^(?=", "^(?!")):
        end = _closing(rest, 1)
        inner = rest[4 : end - 1]
        asked = _presence(inner) if rest[3] == "=" else _absence(inner)
        if asked is None or end == len(rest) + 1:
            break
        found.append(asked)
        rest = f"^{rest[end:]}"
    if len(found) >= MAX_JOINED:
        raise SchemaError(at, f"has more than {MAX_JOINED - 1} lookaheads")
    if found and _has_alternatives(rest):
        raise SchemaError(at, "has a lookahead before alternatives that are in no group")
    return [in_rust(one, at) for one in (rest, *found)]


def lookaheads(pattern: str) -> int:
    """Return how many lookaheads a regular expression has at most."""
    return len(_AHEAD.findall(pattern))


def _presence(inner: str) -> str:
    return f"^(?:{inner})"


def _absence(inner: str) -> str | None:
    """Return an expression of the texts before which something is not; None if it is not known."""
    found = _ABSENT.fullmatch(inner)
    if found is None:
        return None
    atom = found["first"] or found["any"] or found["twice"]
    other = _other_than(atom)
    if found["first"]:
        return rf"^(?:{other}[\s\S]*)?$"
    return f"^{other}*$" if found["any"] else f"^(?:{atom}?{other})*{atom}?$"


def _other_than(atom: str) -> str:
    """Return the class of the characters that a character or a class does not have."""
    if atom.startswith("["):
        return f"[{atom[2:]}" if atom.startswith("[^") else f"[^{atom[1:]}"
    return f"[^{atom}]"


def _closing(pattern: str, begin: int) -> int:
    """Return where a group ends that begins at a place; one more than the length if it does not end."""
    depth, i = 0, begin
    while i < len(pattern):
        character = pattern[i]
        if character == "\\":
            i += 1
        elif character == "[":
            i = _end_of_class(pattern, i)
        elif character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return i + 1
        i += 1
    return len(pattern) + 1


def _end_of_class(pattern: str, begin: int) -> int:
    i = begin + (2 if pattern.startswith("[^", begin) else 1)
    first = i
    while i < len(pattern) and (pattern[i] != "]" or i == first):
        i += 2 if pattern[i] == "\\" else 1
    return i


def _has_alternatives(pattern: str) -> bool:
    i = 0
    while i < len(pattern):
        if pattern[i] == "|":
            return True
        if pattern[i] == "(":
            i = _closing(pattern, i)
        elif pattern[i] == "[":
            i = _end_of_class(pattern, i) + 1
        else:
            i += 2 if pattern[i] == "\\" else 1
    return False

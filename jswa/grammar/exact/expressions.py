"""Regular expressions of a JSON Schema, rewritten so that llguidance admits only strings that every checker accepts.

A schema's expressions are ECMAScript's, and most checkers are Python's; llguidance reads those of Rust. They differ in
brackets and set operators inside a class, in what white space, digits and word characters are, and in some escapes.

Beside that, llguidance 1.9 lets the escapes of a quotation mark and of a backslash through where a class has all
control characters (but perhaps the line feed) and lacks one of the two, as `[^"]` does. Such a class loses the
character NUL here, which no text needs.
"""

import re
from typing import NamedTuple

from jswa.grammar.bounds import SchemaError

# What all programs take for a member of the class, and what some program takes for one.
_CLASSES = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}"),
    "s": (r"[\s--\x{85}]", r"\s\x1c-\x1f\x{feff}"),
}
_PROPERTY = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])")
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|x\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\})")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_NAMED = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_FLAGS = re.compile(r"\(\?([A-Za-z-]+)[:)]")
_REPEAT = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\})\??")
_NUL, _QUOTE, _BACKSLASH = 0, 0x22, 0x5C
_ANYTHING = r"[\x{0}-\x{10ffff}]"
_PLAIN = " !\"#%',/:;<=>@_`"  # punctuation that means nothing in Rust's syntax


class _Item(NamedTuple):
    """A part of a class: its text, and whether it has NUL, the quotation mark and the backslash (None: not known)."""

    text: str
    holds: tuple[bool | None, bool | None, bool | None]


def in_rust(pattern: str, at: str = "") -> str:
    """Return a regular expression of a schema in the syntax of Rust's crate, as llguidance is to read it.

    Raises SchemaError for what cannot be said so; what Rust's crate refuses anyway may be left as it is.
    """
    out, i = list[str](), 0
    while i < len(pattern):
        character, repeat = pattern[i], _REPEAT.match(pattern, i)
        if repeat is not None:
            out.append(repeat[0])
            i = repeat.end()
            if _REPEAT.match(pattern, i):
                raise SchemaError(at, "has a repetition of a repetition, which programs read in different ways")
            continue
        if character == "[":
            piece, i = _class(pattern, i, at)
        elif character == "\\":
            piece, i = _escape(pattern, i, at)
        elif pattern.startswith("(?", i):
            piece, i = _group(pattern, i, at)
        else:
            piece, i = (f"\\{character}" if character in "{}]" else character), i + 1
        if "\0" in piece:
            raise SchemaError(at, "names the character NUL outside of brackets, which is no part of any text here")
        out.append(piece)
    return "".join(out)


def _group(pattern: str, i: int, at: str) -> tuple[str, int]:
    """Return the beginning of a group, and where it ends. Names are left out: llguidance misreads one."""
    named, flags = _NAMED.match(pattern, i), _FLAGS.match(pattern, i)
    if named is not None:
        return "(", named.end()
    if flags is not None and set(flags[1]) - {"i", "s", "-"}:
        raise SchemaError(at, f"has the flags {flags[1]!r}, which programs read in different ways")
    return (flags[0], flags.end()) if flags is not None else ("(?", i + 2)


def _escape(pattern: str, i: int, at: str) -> tuple[str, int]:
    """Return what a backslash outside of brackets begins, and where it ends."""
    found = _code(pattern, i, at)
    if found is not None:
        return ("\0" if found[0] == _NUL else _written(found[0])), found[1]
    named = _named(pattern, i, negated=False)
    if named is not None:
        return _closed([named[0]], negated=False), named[1]
    return pattern[i : i + 2], i + 2  # such as \b and \1, which Rust's crate or llguidance refuses


def _class(pattern: str, i: int, at: str) -> tuple[str, int]:
    """Return a class in brackets, and where it ends."""
    negated = pattern.startswith("[^", i)
    begin = i = i + 1 + negated
    items = list[_Item]()
    while i < len(pattern) and (pattern[i] != "]" or i == begin):
        first, i = _member(pattern, i, at, negated=negated)
        if isinstance(first, int) and pattern.startswith("-", i) and pattern[i + 1 : i + 2] not in ("", "]"):
            last, after = _member(pattern, i + 1, at, negated=negated)
            if isinstance(last, int):
                if last < first:
                    raise SchemaError(at, "has a range in brackets whose end comes before its beginning")
                items.append(_range(first, last))
                i = after
                continue
        items.append(_range(first, first) if isinstance(first, int) else first)
    if i >= len(pattern):
        raise SchemaError(at, "has an unclosed bracket: unclosed character class")
    return _closed(items, negated=negated), i + 1


def _member(pattern: str, i: int, at: str, *, negated: bool) -> tuple[int | _Item, int]:
    """Return a character or a named class inside of brackets, and where it ends."""
    if pattern[i] != "\\":
        return ord(pattern[i]), i + 1
    if pattern.startswith("\\b", i):
        return 8, i + 2
    found = _code(pattern, i, at) or _named(pattern, i, negated=negated)
    if found is None:
        raise SchemaError(at, f"has {pattern[i : i + 2]!r} in brackets, which is no character")
    return found


def _range(first: int, last: int) -> _Item:
    text = _written(first) if first == last else f"{_written(first)}-{_written(last)}"
    nul, quote, backslash = (first <= code <= last for code in (_NUL, _QUOTE, _BACKSLASH))
    return _Item(text, (nul, quote, backslash))


def _named(pattern: str, i: int, *, negated: bool) -> tuple[_Item, int] | None:
    r"""Return a class that has a name, such as \d and \p{L}, and where it ends; None if there is none."""
    found, letter = _PROPERTY.match(pattern, i), pattern[i + 1 : i + 2]
    if found is not None:
        return _Item(found[0], (None, None, None)), found.end()
    if letter.lower() not in _CLASSES or not letter:
        return None
    narrow, wide = _CLASSES[letter.lower()]
    if letter.islower():
        return _Item(wide if negated else narrow, (False, False, False)), i + 2
    return _Item(f"[^{narrow if negated else wide}]", (True, True, True)), i + 2


def _closed(items: list[_Item], *, negated: bool) -> str:
    """Return a class in brackets, without NUL if llguidance would admit too much otherwise."""
    texts = {item.text for item in items}
    if not negated and any({narrow, f"[^{wide}]"} <= texts for narrow, wide in _CLASSES.values()):
        return _ANYTHING
    text = f"[{'^' if negated else ''}{''.join(item.text for item in items)}]"
    some = [[item.holds[which] for item in items] for which in range(3)]
    if negated:
        may_hold_nul = True not in some[0]
        complete = not any(held is not False for which in (1, 2) for held in some[which])
    else:
        may_hold_nul = any(held is not False for held in some[0])
        complete = all(True in some[which] for which in (1, 2))
    return f"[{text}--\\x{{0}}]" if may_hold_nul and not complete else text


def _code(pattern: str, i: int, at: str) -> tuple[int, int] | None:
    """Return the character that an escape stands for, and where it ends; None if it is no character."""
    letter, found = pattern[i + 1 : i + 2], _CODE.match(pattern, i)
    if found is not None:
        code, end = int(next(filter(None, found.groups())), 16), found.end()
        low = _LOW.match(pattern, end)
        if 0xD800 <= code < 0xDC00 and low is not None:
            code, end = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00, low.end()
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise SchemaError(at, f"has {found[0]!r}, which is no character")
        return code, end
    if letter in _CONTROLS and letter:
        return _CONTROLS[letter], i + 2
    if letter == "c" and pattern[i + 2 : i + 3].isascii() and pattern[i + 2 : i + 3].isalpha():
        return ord(pattern[i + 2]) % 32, i + 3
    if letter == "0" and not pattern[i + 2 : i + 3].isdecimal():
        return _NUL, i + 2
    if letter and not (letter.isascii() and (letter.isalnum())):
        return ord(letter), i + 2
    return None


def _written(code: int) -> str:
    """Return a character as Rust's crate reads it anywhere."""
    character = chr(code)
    if not character.isascii() or not character.isprintable():
        return f"\\x{{{code:x}}}"
    return character if character.isalnum() or character in _PLAIN else f"\\{character}"

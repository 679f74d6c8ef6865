"""Parsing of JSON that clients write: strictly, of bounded depth, and without holding the GIL for long.

Strict means UTF-8 without halves of surrogate pairs, and no NaN: what has been parsed can be sent to any process and
written into any answer.

A parser that makes Python objects holds the GIL until it is done: 0.16 s for 2M token ids, 0.7 s for 5M empty objects.
Here numpy, which releases the GIL, finds strings, brackets and commas. Lists of token ids and long strings are cut out
of the body and parsed a piece at a time. The number of values in the rest is bounded, so that one call parses it soon.
"""

import json
import re
import secrets
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int, UInt8

from . import limits
from .errors import ApiError, invalid

SMALL = 2**16  # bytes up to which one call may parse a body
_PIECE = 2**16  # bytes of a list or a string that are parsed in one call
_IDS = ("prompt", "input", "tokens", "allowed_token_ids")  # fields that may be long lists of token ids
_NAME = re.compile(rb'"(%b)"\s*:\s*\Z' % "|".join(_IDS).encode())
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LOW = re.compile(rb"\\u[dD][c-fC-F]")
# Each call of these functions holds the GIL until it returns.
decode = msgspec.json.Decoder().decode
decode_ids = msgspec.json.Decoder(list[int]).decode
decode_text = msgspec.json.Decoder(str).decode


def parse_whole(text: bytes) -> Any:
    """Return the value of JSON text, in one call of the parser.

    Raises ApiError (400) if it is not JSON, is deeper than `limits.MAX_DEPTH`, or has more than `limits.MAX_VALUES`
    values.
    """
    try:
        if len(text) > SMALL or text.count(b"[") + text.count(b"{") > limits.MAX_DEPTH:
            marks = _scan(text, 8 * _PIECE)
            _check_depth(marks)
            _check_values(marks.commas + len(marks.brackets) // 2)
        return decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise _no_json(text, error) from None


def parse(body: bytes, piece: int = _PIECE) -> Any:
    """Return the value of a JSON body, in which long lists of token ids are arrays [P] int64.

    Raises ApiError (400) if the body is not JSON, is deeper than `limits.MAX_DEPTH`, or has more than
    `limits.MAX_VALUES` values.

    Args:
        piece: bytes of a list or a string that one call parses, at least 16; numpy scans eight times as many at a time.
            Strings of more than 1/256 of `piece` bytes are cut out, and lists of token ids of more than 1/512.
    """
    try:
        return _parse(body, piece)
    except (ValueError, RecursionError) as error:
        raise _no_json(body, error) from None


def _no_json(body: bytes, error: Exception) -> ApiError:
    """Return the error of a body that is not JSON, and say why as far as the parser's error tells."""
    if _SURROGATE.search(body) and (name := _halved(body)) is not None:
        return invalid(name, "a string has half of a surrogate pair, such as \\ud800", "invalid_json")
    why = str(error).removeprefix("JSON is malformed: ").removesuffix(" - at `$`")
    return ApiError(400, f"the body is not valid JSON: {why:.200}", code="invalid_json")


def _halved(body: bytes) -> str | None:
    """Return the first field of a body that has half of a surrogate pair; None if there is none, or none is found."""
    try:
        fields = json.loads(body) if len(body) <= SMALL else None
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return str(name).encode("utf-8", "replace").decode()
        except RecursionError:
            return None
    return None


def _parse(body: bytes, piece: int) -> Any:
    marks = _scan(body, 8 * piece)
    _check_depth(marks)
    lists = _id_lists(body, marks, piece // 512)
    taken: list[Any] = []
    rest, done, mark, ids = [], 0, secrets.token_hex(8), 0
    for first, end in sorted([*lists, *_long_strings(marks.quotes, piece // 256)]):
        rest += [body[done:first], f'"{mark}{len(taken)}"'.encode()]
        name = lists.get((first, end))
        if name is None:
            taken.append(_text(body, first, end, piece, marks.escapes))
        else:
            taken.append(_ids(body, first, end, piece, name))
            ids += len(taken[-1])
        done = end
    _check_values(marks.commas + len(marks.brackets) // 2 - ids)
    value = decode(b"".join([*rest, body[done:]]))
    return _restored(value, mark, taken) if taken else value


class _Marks(NamedTuple):
    """Positions of characters in a body, in bytes from its start.

    Attributes:
        escapes: backslashes that begin an escape.
        quotes: quotes that begin and end strings, in turns.
        brackets: the characters [ ] { } outside of strings.
        kinds: these characters.
        commas: number of commas outside of strings.
    """

    escapes: Int[np.ndarray, " E"]
    quotes: Int[np.ndarray, " Q"]
    brackets: Int[np.ndarray, " N"]
    kinds: UInt8[np.ndarray, " N"]
    commas: int


def _scan(body: bytes, window: int) -> _Marks:
    """Find escapes, the quotes of strings, and brackets and commas outside of strings, `window` bytes at a time."""
    found: list[list[Int[np.ndarray, " M"]]] = [[], [], []]
    commas, quotes, begin = 0, 0, 0
    while begin < len(body):
        end = min(begin + window, len(body))
        while end < len(body) and body[end - 1] == ord("\\"):
            end += 1  # a window must not end between a backslash and the character that it escapes
        at = np.frombuffer(body, np.uint8, end - begin, begin)
        escapes = _escapes(at)
        places = at == ord('"')
        places[escapes[escapes + 1 < len(at)] + 1] = False
        inside = places.view(np.uint8).copy()
        inside[0] ^= quotes & 1
        outside = np.bitwise_xor.accumulate(inside) == 0
        commas += int(np.count_nonzero((at == ord(",")) & outside))
        brackets = (((at | 32) == ord("{")) | ((at | 32) == ord("}"))) & outside  # 32 turns [ into {, and ] into }
        for part, more in zip(found, (escapes, np.flatnonzero(places), np.flatnonzero(brackets)), strict=True):
            part.append((more + begin).astype(np.int32))
        quotes += len(found[1][-1])
        # A string is a value or the name of a value.
        _check_values(max(quotes // 4, sum(map(len, found[2])) // 2))
        begin = end
    escapes, places, brackets = (np.concatenate(part) for part in found)
    return _Marks(escapes, places, brackets, np.frombuffer(body, np.uint8)[brackets], commas)


def _escapes(at: UInt8[np.ndarray, " B"]) -> Int[np.ndarray, " E"]:
    """Return the positions of the backslashes that begin an escape: all but those that are escaped themselves."""
    slashes = np.flatnonzero(at == ord("\\"))
    first = np.ones(len(slashes), bool)
    first[1:] = np.diff(slashes) != 1
    run = np.maximum.accumulate(np.where(first, slashes, 0))
    found: Int[np.ndarray, " E"] = slashes[(slashes - run) % 2 == 0]
    return found


def _depths(marks: _Marks) -> Int[np.ndarray, " N"]:
    """Return the depth after each bracket: the codes of [ and { have the bit 2, those of ] and } do not."""
    depths: Int[np.ndarray, " N"] = np.cumsum(np.where(marks.kinds & 2, 1, -1))
    return depths


def _check_depth(marks: _Marks) -> None:
    depth = int(_depths(marks).max(initial=0))
    if depth > limits.MAX_DEPTH:
        raise ApiError(
            400, f"the body has {depth} levels of objects and lists, at most {limits.MAX_DEPTH} are allowed",
            code="invalid_value",
        )  # fmt: skip


def _check_values(count: int) -> None:
    if count > limits.MAX_VALUES:
        raise ApiError(
            400,
            f"the body has {count} values or more, at most {limits.MAX_VALUES} are allowed (token ids of "
            f"{', '.join(_IDS)} do not count)",
            code="invalid_value",
        )


def _id_lists(body: bytes, marks: _Marks, short: int) -> dict[tuple[int, int], str]:
    """Return (first byte, end) of each long list of token ids, with the name of the field that has it."""
    kinds, brackets = marks.kinds, marks.brackets
    depth = _depths(marks)
    closed = np.append(np.flatnonzero(depth == 1), len(brackets))
    innermost = np.zeros(len(brackets), bool)
    innermost[:-1] = (kinds[:-1] == ord("[")) & (kinds[1:] == ord("]"))
    strings = np.searchsorted(marks.quotes, brackets)
    found = {}
    for opening in np.flatnonzero((kinds == ord("[")) & (depth == 2)):
        at = int(brackets[opening])
        if (name := _NAME.search(body, max(0, at - 64), at)) is None:
            continue
        end = closed[np.searchsorted(closed, opening)]
        for n in opening + np.flatnonzero(innermost[opening:end]):
            if brackets[n + 1] - brackets[n] > short and strings[n] == strings[n + 1]:
                found[int(brackets[n]), int(brackets[n + 1]) + 1] = name[1].decode()
    return found


def _long_strings(quotes: Int[np.ndarray, " Q"], short: int) -> list[tuple[int, int]]:
    """Return (first byte, end) of each string of more than `short` bytes, including its quotes."""
    last = quotes[1::2]
    first = quotes[::2][: len(last)]
    return [(int(first[n]), int(last[n]) + 1) for n in np.flatnonzero(last - first > short)]


def _ids(body: bytes, first: int, end: int, piece: int, name: str) -> Int[np.ndarray, " P"]:
    parts: list[Int[np.ndarray, " p"]] = []
    at, more = first + 1, True
    while more:
        cut = body.find(b",", min(at + piece, end), end)
        more = cut >= 0
        try:
            part = np.array(decode_ids(b"[%b]" % body[at : cut if more else end - 1]), np.int64)
        except (msgspec.ValidationError, OverflowError):
            raise ApiError(400, f"{name}: must be token ids", param=name, code="invalid_value") from None
        if not len(part) and (more or parts):
            raise ValueError("a comma without a value before or after it")
        parts.append(part)
        at = cut + 1
    return np.concatenate(parts)


def _text(body: bytes, first: int, end: int, piece: int, escapes: Int[np.ndarray, " E"]) -> str:
    parts, at = [], first + 1
    while at < end - 1:
        cut = min(at + piece, end - 1)
        if cut < end - 1:
            cut = _between(body, at, cut, escapes)
        parts.append(decode_text(b'"%b"' % body[at:cut]))
        at = cut
    return "".join(parts)


def _between(body: bytes, begin: int, at: int, escapes: Int[np.ndarray, " E"]) -> int:
    """Return the last position in (begin, at] that is not within a character or an escape of a string."""
    n = int(np.searchsorted(escapes, np.int32(at), side="right")) - 1
    if n >= 0 and escapes[n] > at - 12:  # the two escapes of a surrogate pair have 12 bytes
        while n > 0 and escapes[n] > begin and _LOW.match(body, int(escapes[n])):
            n -= 1
        if escapes[n] > begin:
            return int(escapes[n])
    while at > begin + 1 and body[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _restored(value: Any, mark: str, taken: list[Any]) -> Any:
    """Return a value in which each mark is replaced by the value that was cut out there."""
    if isinstance(value, str):
        return taken[int(value[len(mark) :])] if value.startswith(mark) else value
    if isinstance(value, list):
        return [_restored(item, mark, taken) for item in value]
    if isinstance(value, dict):
        return {_restored(key, mark, taken): _restored(item, mark, taken) for key, item in value.items()}
    return value

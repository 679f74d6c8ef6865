r"""Read arguments that stand between tags, as text: `<parameter=city>\nOslo\n</parameter>`.

One line end on each side belongs to the tags; all other white space belongs to the text, whose type the tool's schema
has. An end that is missing is where the next parameter begins, or where the call ends.
"""

import re
from collections.abc import Callable

from .texts import json_string

_BEGIN = re.compile(r"<parameter=([^>\n]+)>")
_END = "</parameter>"
_ENDED = re.compile(r"</parameter>\s*+")
Written = Callable[[str, str, bool], str]  # an argument's name, text and whether it was cut → JSON


def parameters(text: str, known: Callable[[str], bool], written: Written, *, closed: bool) -> tuple[str, str]:
    """Return the arguments in JSON, and the text that belongs to none of them.

    A tag inside of a parameter's text is text, unless it follows an end, or begins a line and names a known parameter
    that comes nowhere else.

    Args:
        known: whether the tool has a parameter of a name.
        closed: the call has its end; else it was cut, and so may be its last argument.
    """
    begins = _begins(text, known)
    starts = [*(one.start() for one in begins), len(text)]
    pairs, around = list[str](), [text[: starts[0]]]
    cut = not closed and not begins
    for found, following in zip(begins, starts[1:], strict=True):
        value, ended, behind = text[found.end() : following].rpartition(_END)
        if not ended:
            value, behind, cut = behind, "", not closed and following == len(text)
        around.append(behind)
        name = found[1]
        pairs.append(f"{json_string(name)}: {written(name, _unwrapped(value, cut=cut), cut)}")
    whole = "{" + ", ".join(pairs) + ("" if cut else "}")
    return whole, "".join(one for one in around if not one.isspace())


def _begins(text: str, known: Callable[[str], bool]) -> list[re.Match[str]]:
    """Return the tags that begin a parameter."""
    ends = {one.end() for one in _ENDED.finditer(text)}
    tags = list(_BEGIN.finditer(text))
    sure = [index == 0 or one.start() in ends for index, one in enumerate(tags)]
    names = {one[1] for one, is_sure in zip(tags, sure, strict=True) if is_sure}
    found: list[re.Match[str]] = []
    for one, is_sure in zip(tags, sure, strict=True):
        in_line = text[one.start() - 1] == "\n"
        if is_sure or (in_line and one[1] not in names and known(one[1])):
            found.append(one)
            names.add(one[1])
    return found


def _unwrapped(text: str, *, cut: bool) -> str:
    """Return a text without the line end on each side that belongs to its tags."""
    text = text.removeprefix("\n")
    return text if cut else text.removesuffix("\n")

r"""Read arguments that stand between tags, as text: `<parameter=city>\nOslo\n</parameter>`.

White space between the tags belongs to the text, but for a line end on each side where a family writes one. The tool's
schema has the text's type. An end that is missing is where the next parameter begins, or where the call ends.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jswa.text.assembler import MARK

from .texts import json_string

_LONGEST_KEY = 256
Written = Callable[[str, str, bool], str]  # an argument's name, text and whether it was cut → JSON


@dataclass(frozen=True)
class Tags:
    """The texts around the parts of a call.

    Attributes:
        key, value: around the key and the value of an argument.
        wrap: also stands at both ends of a value.
        function: begin, middle and end of a function in the family's calls, of which one may hold several; None if the
            call is the function.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    wrap: str = ""
    function: tuple[str, str, str] | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Tags":
        """Return the tags that a response template names. Raises ValueError, TypeError or KeyError."""
        function = None
        if "function" in said:
            begin, middle, end = said["function"]
            function = (*_pair((begin, middle)), _pair(("", end))[1])
        return cls(_pair(said["key"]), _pair(said["value"]), str(said.get("wrap", "")), function)

    @property
    def end(self) -> str:
        """The tag after a value."""
        return self.value[1]

    @cached_property
    def begins(self) -> re.Pattern[str]:
        """A pattern that finds the tags before a value, with the key as its group."""
        before, after = map(re.escape, self.key)
        value = rf"\s*+{re.escape(self.value[0])}" if self.value[0] else ""
        return re.compile(rf"{before}([^<\n]{{0,{_LONGEST_KEY}}}?){after}{value}")

    @cached_property
    def ended(self) -> re.Pattern[str]:
        """A pattern that finds the tag after a value, with white space."""
        return re.compile(rf"{re.escape(self.end)}\s*+")

    def functions(self, name: str, text: str, *, closed: bool) -> list[tuple[str, str, bool]]:
        """Return the functions in a call, the first of which has a name: names, texts, and whether they have ends."""
        if self.function is None:
            return [(name, text, closed)]
        begin, middle, end = map(re.escape, self.function)
        if not closed and (ended := re.search(rf"{end}\s*\Z", text)):
            text, closed = text[: ended.start()], True
        first, *others = re.split(rf"{end}\s*+{begin}([^<\n]{{1,{_LONGEST_KEY}}}?){middle}", text)
        names, texts = [name, *others[::2]], [first, *others[1::2]]
        return [(*one, closed or at < len(texts)) for at, one in enumerate(zip(names, texts, strict=True), 1)]

    def unwrapped(self, text: str, *, cut: bool) -> str:
        """Return a value without what a family writes at both ends. `cut`: its end is missing."""
        text = text.removeprefix(self.wrap)
        return text if cut else text.removesuffix(self.wrap)


def _pair(said: Any) -> tuple[str, str]:
    begin, end = said
    if not (isinstance(begin, str) and isinstance(end, str) and end):
        raise ValueError("tags must be pairs of texts, whose second is not empty")
    return begin.replace(MARK, ""), end.replace(MARK, "")


def parameters(
    text: str, tags: Tags, known: Callable[[str], bool], written: Written, *, closed: bool
) -> tuple[str, str]:
    """Return the arguments in JSON, and the text that belongs to none of them.

    A tag inside of a parameter's text is text, unless it follows an end, or begins a line and names a known parameter
    that comes nowhere else.

    Args:
        known: whether the tool has a parameter of a name.
        closed: the call has its end; else it was cut, and so may be its last argument.
    """
    begins = _begins(text, tags, known)
    starts = [*(one.start() for one in begins), len(text)]
    pairs, around = list[str](), [text[: starts[0]]]
    cut = not closed and not begins
    for found, following in zip(begins, starts[1:], strict=True):
        value, ended, behind = text[found.end() : following].rpartition(tags.end)
        if not ended:
            value, behind, cut = behind, "", not closed and following == len(text)
        around.append(behind)
        name = found[1]
        pairs.append(f"{json_string(name)}: {written(name, tags.unwrapped(value, cut=cut), cut)}")
    whole = "{" + ", ".join(pairs) + ("" if cut else "}")
    return whole, "".join(one for one in around if not one.isspace())


def _begins(text: str, tags: Tags, known: Callable[[str], bool]) -> Sequence[re.Match[str]]:
    """Return the tags that begin a parameter."""
    ends = {one.end() for one in tags.ended.finditer(text)}
    found = list(tags.begins.finditer(text))
    sure = [index == 0 or one.start() in ends for index, one in enumerate(found)]
    names = {one[1] for one, is_sure in zip(found, sure, strict=True) if is_sure}
    begins: list[re.Match[str]] = []
    for one, is_sure in zip(found, sure, strict=True):
        in_line = text[one.start() - 1] == "\n"
        if is_sure or (in_line and one[1] not in names and known(one[1])):
            begins.append(one)
            names.add(one[1])
    return begins

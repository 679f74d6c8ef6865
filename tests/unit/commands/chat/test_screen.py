"""How answers are shown: broken between words, however they come in pieces."""

import textwrap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.commands.chat.screen import Screen, Wrapping
from tests.support.commands.terminal import TerminalText

WIDTH = 20
TEXTS = st.text(alphabet="ab \n", max_size=120)


def wrapped(pieces: list[str], width: int = WIDTH) -> str:
    """What is shown of a text in pieces."""
    wrapping = Wrapping(lambda: width)
    return "".join([*map(wrapping.add, pieces), wrapping.end()])


@given(text=TEXTS, cuts=st.lists(st.integers(0, 120), max_size=8))
def test_pieces_make_no_difference_and_no_word_is_lost(text: str, cuts: list[int]) -> None:
    """Lines are at most as long as the terminal is wide, but for words that are longer."""
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown = wrapped(pieces)
    assert shown == wrapped([text])
    assert shown.split() == text.split()
    for line in shown.split("\n"):
        assert len(line) <= WIDTH or " " not in line.strip()


def test_prose_is_broken_as_textwrap_does() -> None:
    text = "The quick brown fox jumps over the lazy dog, and then it rests in the shade."
    assert wrapped(list(text)).split("\n") == textwrap.wrap(text, WIDTH)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four five", "one two three four\nfive"),
        ("  - one two three four five", "  - one two three\nfour five"),
        ("```\nlet a = one two three four five\n```\none two three four five",
         "```\nlet a = one two three four five\n```\none two three four\nfive"),
        ("日本語日本語日本語日本語", "日本語日本語日本語日\n本語"),
        ("a" * 25 + " bcd " + "e" * 14, "a" * 25 + " bcd\n" + "e" * 14),
        ("end \n\nnew", "end\n\nnew"),
    ],
)  # fmt: skip
def test_lists_code_wide_characters_and_long_words(text: str, shown: str) -> None:
    assert wrapped([text]) == shown == wrapped(list(text))


def test_reasoning_is_dim_and_the_answer_begins_a_line() -> None:
    out = TerminalText()
    screen = Screen(out, lambda: WIDTH)
    for kind, text in [("reasoning", "hm hm"), ("content", "A \x1b]0;title\x07\x9b2J"), ("content", "B")]:
        screen.show(kind, text)
    screen.end()
    assert out.getvalue() == "\x1b[2mhm\x1b[0m\x1b[2m hm\x1b[0m\nA ]0;title2JB"

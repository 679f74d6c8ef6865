"""The report of habits finds them where they are read, with their line, and nothing in code."""

import pytest

from tools.prose import HELP, HISTORY, ROOT, Sentence, habits, of_help, of_page, pages, words

PAGE = """# A title
The first sentence is on
two lines. The second one begins on the second line.
It ends here, e.g. now.

* an item
* another. With two

```
code behind a fence
```
| a cell | Another cell. With two |
|---|---|

    indented code
"""


def test_sentences_of_a_page_have_their_lines() -> None:
    assert list(of_page(PAGE)) == [
        Sentence(1, "A title"),
        Sentence(2, "The first sentence is on two lines."),
        Sentence(3, "The second one begins on the second line."),
        Sentence(4, "It ends here, e.g. now."),
        Sentence(6, "an item"),
        Sentence(7, "another."),
        Sentence(7, "With two"),
        Sentence(12, "a cell"),
        Sentence(12, "Another cell."),
        Sentence(12, "With two"),
    ]


def test_sentences_of_help_are_those_of_public_docstrings_and_messages() -> None:
    source = (
        'class Options:\n    """Do it.\n\n    Attributes:\n        one: The first. It has\n            two lines.\n'
        '    """\n'
        'class _Private:\n    """Not shown."""\nTEXTS = {"name": "Tokens of a text."}\n'
    )
    assert sorted(of_help(source)) == [
        Sentence(2, "Do it."),
        Sentence(5, "It has two lines."),
        Sentence(5, "The first."),
        Sentence(10, "Tokens of a text."),
    ]


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("The tokens behind a prefix.", ["behind"]),
        ("The server runs behind a proxy.", []),
        ("Read `behind` and [the page](behind.md).", []),
        ("Pages behind the window, and those that are behind it.", ["behind", "behind", "those that"]),
        ("Only those whose key fits, so many of them, of which one is alone.",
         ["those that", "so many", "of which", "alone"]),
        ("What the engine does not know is refused.", ["what"]),
        ("What does it cost?", []),
        ("It keeps that which is read, and what is not.", ["what"]),
        ("It runs by turns, for nobody.", ["other", "other"]),
        (" ".join(["word"] * 35) + ".", []),
        (" ".join(["word"] * 36) + ".", ["long sentence"]),
        ("`one two three`, " + "and " * 33 + "so.", []),
    ],
)  # fmt: skip
def test_bad_habits_of_a_sentence_are_named(sentence: str, found: list[str]) -> None:
    assert habits(sentence) == found


def test_code_and_links_are_words_as_they_are_heard() -> None:
    assert words("Run `make test -k x` - see [the long page](a/b.md).") == 6


def test_the_pages_and_help_texts_are_read() -> None:
    assert ROOT / "README.md" in pages()
    assert ROOT / "docs" / "design" / "README.md" in pages()
    assert HISTORY not in pages()
    for name in HELP:
        assert len(list(of_help((ROOT / name).read_text(encoding="utf-8")))) > 10

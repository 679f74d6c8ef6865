"""Stop strings in text that arrives in pieces (jswa/text/stop_strings.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.text.stop_strings import StopStrings, StopTable

TEXTS = st.text("ab¢", max_size=30)  # few letters, so that stop strings occur and overlap
STOPS = st.lists(st.text("ab¢", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@st.composite
def pieces_of_a_text(draw: st.DrawFn) -> list[str]:
    """Draw a text in pieces, some of them empty."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the start and the text of the stop string that ends first; of several that end together, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def may_become_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of the text that is a prefix of a stop string."""
    return max(n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops))


@given(pieces_of_a_text(), STOPS, st.booleans())
def test_the_shown_pieces_are_the_text_up_to_the_first_stop_string(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    """However the text is cut into pieces. Text is held back only as long as it may become part of a stop string."""
    cutter = StopStrings(StopTable(stops), include=include)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += cutter.push(piece)
        found = first_stop(seen, stops)
        if found is None:
            assert cutter.stopped is None
            assert shown == seen[: len(seen) - may_become_stop(seen, stops)]
        else:
            at, stop = found
            assert cutter.stopped == stop
            assert shown == seen[:at] + (stop if include else "")
    rest = cutter.finish()
    if cutter.stopped is None:
        assert shown + rest == "".join(pieces)
    else:
        assert rest == ""
    assert cutter.finish() == ""


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (("abcd", "bc"), "xabcd", "xa", "bc"),
        (("bc", "abc"), "xabc", "x", "abc"),
        (("aab",), "aaaab", "aa", "aab"),
        (("abab",), "abaabab", "aba", "abab"),
        (("end", "e"), "the end", "th", "e"),
        (("\n\n",), "a\nb\n\nc", "a\nb", "\n\n"),
        (("é",), "e\u0301é!", "e\u0301", "é"),
    ],
)
def test_overlapping_stop_strings_stop_at_the_first_that_ends(
    stops: tuple[str, ...], text: str, shown: str, stopped: str
) -> None:
    """In one piece and letter by letter, with the stop strings in either order."""
    for order in (stops, stops[::-1]):
        for pieces in ([text], list(text)):
            cutter = StopStrings(StopTable(order), include=False)
            assert "".join(cutter.push(piece) for piece in pieces) + cutter.finish() == shown
            assert cutter.stopped == stopped


class Counted(str):
    """A character that counts how often a table looks it up."""

    lookups = 0

    def __hash__(self) -> int:
        Counted.lookups += 1
        return super().__hash__()


def test_the_work_of_a_character_depends_neither_on_length_nor_on_number_of_stop_strings() -> None:
    """At most two lookups a character, in a text that is at each place almost one of 16 stop strings."""
    stops = ("a" * 1_023 + "b", *(c + "a" * 1_022 for c in "cdefghijklmnopq"))
    table, state = StopTable(stops), 0
    Counted.lookups = 0
    text = "a" * 5_000 + "c" + "a" * 1_021 + "e" + "a" * 1_021
    for character in text:
        state = table.step(state, Counted(character))
        assert table.found[state] is None
    assert Counted.lookups <= 2 * len(text)
    assert table.found[table.step(state, "a")] == stops[3]


def test_without_stop_strings_nothing_is_held_back() -> None:
    """Every piece is shown at once."""
    cutter = StopStrings(StopTable(()), include=False)
    assert [cutter.push("ab"), cutter.push(""), cutter.push("c"), cutter.finish()] == ["ab", "", "c", ""]

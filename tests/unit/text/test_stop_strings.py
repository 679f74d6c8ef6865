"""Stop strings over a text that comes in pieces (jswa/text/tokenizer.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.text.stop_strings import StopStrings

TEXTS = st.text("ab¢", max_size=30)  # few letters, so that stop strings occur and overlap
STOPS = st.lists(st.text("ab¢", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@st.composite
def pieces_of_a_text(draw: st.DrawFn) -> list[str]:
    """A text in pieces, some of them empty."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the string that is complete first begins, and which; of several that end together the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def may_become_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return max(n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops))


@given(pieces_of_a_text(), STOPS, st.booleans())
def test_pieces_put_together_are_the_text_up_to_the_first_complete_stop(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    """However it is cut; and at no time is anything shown that a stop may still cut off, or more held back."""
    cutter = StopStrings(stops, include=include)
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
def test_overlapping_stops(stops: tuple[str, ...], text: str, shown: str, stopped: str) -> None:
    """Whole, letter by letter, and whatever the order of the stops."""
    for order in (stops, stops[::-1]):
        for pieces in ([text], list(text)):
            cutter = StopStrings(order, include=False)
            assert "".join(cutter.push(piece) for piece in pieces) + cutter.finish() == shown
            assert cutter.stopped == stopped


def test_without_stops_everything_is_shown_at_once() -> None:
    """Nothing is held back."""
    cutter = StopStrings((), include=False)
    assert [cutter.push("ab"), cutter.push(""), cutter.push("c"), cutter.finish()] == ["ab", "", "c", ""]

"""Matches in streamed text: those of a backtracking engine, whatever the pieces, in one step for each character."""

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jswa.text.patterns.automaton import Automaton
from jswa.text.patterns.search import AmbiguousTextError, Match, Search, matches
from jswa.text.patterns.syntax import literals, parse

PATTERNS = [
    "ab", "a+b", "a*?b", r"(?P<x>a+)b|c", r"\s*<t>\s*", "a(?=b)", "(?P<k>[ab]+?)=(?P<v>.*?);", r"\A\s*a", r"b\Z", "a+$",
    "(?:ab|a)(?P<r>b?c)", "a{2,3}b?", "(?:a|ab)(?:c|bcd)", "(?=ab)|c+", "a(?:.*b)?", "(a+)+b", "(?:a|a)*b", "x(?=a*b)",
    "[^a]b", r"\w+=", "(?i)aB", "a??b", "(?:a*)*c", "(?P<n>a)|(?P<m>b)c", "[]a]+c", r"\x61{2}|[\s=]c", "c{,2}b",
]  # fmt: skip


def found(pattern: str, pieces: list[str]) -> tuple[list[Match], str]:
    """Return the matches in a text, and the text between them."""
    search = Search(Automaton([parse(pattern)]))
    all_, between = list[Match](), ""
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        before, match = search.scan(piece, last=last)
        while match is not None:
            between += before
            all_.append(match)
            if match.start == match.end:
                search.block()
            before, match = search.scan(last=last)
        between += before
    return all_, between


def expected(pattern: str, text: str) -> list[Match]:
    """Return the matches that a backtracking engine finds; an empty one at the end of the text is none."""
    all_ = re.finditer(pattern, text, re.DOTALL)
    return [
        Match(
            0,
            {name: text for name, text in one.groupdict().items() if text is not None},
            one.start(),
            one.end(),
            one[0],
        )
        for one in all_
        if one.start() < len(text)
    ]


@given(st.sampled_from(PATTERNS), st.lists(st.text("aabbc =;<t>x\n]", max_size=5), min_size=1, max_size=4))
def test_matches_are_those_of_a_backtracking_engine_whatever_the_pieces(pattern: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    all_, between = found(pattern, pieces)
    assert all_ == expected(pattern, text)
    ends = [0, *(one.end for one in all_)]
    starts = [*(one.start for one in all_), len(text)]
    assert between == "".join(text[end:start] for end, start in zip(ends, starts, strict=True))


@given(st.data())
def test_any_expression_finds_what_a_backtracking_engine_finds(data: st.DataObject) -> None:
    """Where no match is empty: what follows an empty match is for its reader to say."""
    one = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "(?:ab|a)", "(?P<n>ba?)", "(?:b|[^b]c)"])
    part = st.builds("".join, st.tuples(one, st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "{2}", "{1,2}"])))
    line = st.lists(part, min_size=1, max_size=3).map("".join)
    pattern = data.draw(line.filter(lambda line: line.count("?P<n>") < 2)) + data.draw(
        st.sampled_from(["c", "a", "b(?=c)", "b$", "a(?=.*b)"])
    )
    text = data.draw(st.text("abc", min_size=1, max_size=12))
    wanted = expected(pattern, text)
    assume(all(one.start < one.end for one in wanted))
    assert found(pattern, [text])[0] == wanted


def test_the_longest_of_several_expressions_at_one_place_wins_then_the_first() -> None:
    automaton = Automaton([parse("ab"), parse("abc"), literals(["abc", "xy", "x"])])
    assert [one[:1] + one[2:4] for one in matches(automaton, "abcab xyx")] == [
        (1, 0, 3), (0, 3, 5), (2, 6, 8), (2, 8, 9),
    ]  # fmt: skip


def test_text_is_held_only_where_a_match_may_have_begun() -> None:
    search = Search(Automaton([parse(r"\s*<t>")]))
    assert [search.scan(piece) for piece in ("ab ", " ", "c <", "t", "> d")] == [
        ("ab", None), ("", None), ("  c", None), ("", None), ("", Match(0, {}, 5, 9, " <t>")),
    ]  # fmt: skip
    assert search.rest == " d"
    assert search.scan(last=True) == (" d", None)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1", "(?<=a)b", "(?<!a)b", "(?!a)b", r"\bword", "a++", "(?>a*)b", "(?=a)b", "a**", "(a", "a)", "[a", r"\G",
        "[[:alpha:]]", "a{2,1}", "a{5000}", "((a{900}){900})", "(?:" * 99 + "a" + ")" * 99, "a*", "", "(?s:a)",
        "(?P=x)", "(?:ab){e<=1}", "a|", "[ab]*a[ab]{16}", "(?x)a b", "*", r"\p{L}", r"\N{no such}", "[z-a]", "(?#a)b",
    ],
)  # fmt: skip
def test_what_cannot_be_matched_in_one_pass_is_refused(pattern: str) -> None:
    """Also what matches the empty text, and what needs too many states; at once."""
    begin = time.thread_time()
    with pytest.raises(ValueError, match="pattern"):
        Automaton([parse(pattern)])
    assert time.thread_time() - begin < 5


def test_a_text_that_must_be_read_again_and_again_is_refused() -> None:
    """The first match is `a`, which is known only at the end of the text; and so is the next."""
    with pytest.raises(AmbiguousTextError):
        list(matches(Automaton([parse("a(?:.*b)?")]), "a" * 20_000))


def test_the_rest_of_a_text_that_is_refused_is_known() -> None:
    search, ends = Search(Automaton([parse("a(?:.*b)?")])), [0]

    def read_all() -> None:
        _, match = search.scan("a" * 20_000, last=True)
        while match is not None:
            ends.append(match.end)
            _, match = search.scan(last=True)

    with pytest.raises(AmbiguousTextError):
        read_all()
    assert ends[-1] + len(search.rest) == 20_000


@pytest.mark.parametrize("before", ["", "abc", "é"])
def test_a_text_that_is_given_out_whole_is_held_back_whole(before: str) -> None:
    """Wherever it comes: its last character may begin a match."""
    search = Search(Automaton([parse("éz")]), re.compile("é{3}"))
    shown = search.scan(f"{before}-")[0]
    assert (shown, search.scan("ééé")) == (f"{before}-", ("", None))
    assert search.scan("!") == ("ééé!", None)
    assert search.scan("ééé") == ("", None)
    found = search.scan("z")
    assert found[0] == "éé"
    assert found[1] is not None

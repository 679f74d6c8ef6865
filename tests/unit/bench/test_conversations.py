"""Conversations of `jswa bench serve` as such: what is said, how long it is, and what each request repeats."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.bench.config import BenchConfig
from jswa.bench.conversations import AGENTS, Conversation, Lengths, Turn, conversations, text_of
from jswa.errors import ConfigError


@given(
    st.integers(1, 4), st.integers(0, 5), st.integers(1, 30), st.integers(1, 30), st.integers(1, 6),
    st.floats(0, 1), st.integers(0, 9),
)  # fmt: skip
def test_sizes_are_within_their_ranges(
    clients: int, prefix: int, first: int, later: int, rounds: int, ratio: float, seed: int
) -> None:
    fewest = (rounds + 1) // 2
    lengths = Lengths(prefix, first, 40, rounds, later, fewest, ratio)
    talks = conversations(clients, lengths, seed)
    assert [talk.number for talk in talks] == list(range(clients))
    for talk in talks:
        assert fewest <= len(talk.turns) <= rounds
        for number, turn in enumerate(talk.turns):
            most = later if number else first
            assert max(1, round(ratio * most)) <= len(turn.message.split()) <= most
            assert max(1, round(ratio * 40)) <= turn.output_tokens <= 40
    again = conversations(clients, lengths, seed)
    assert [(talk.turns, talk.messages) for talk in talks] == [(talk.turns, talk.messages) for talk in again]


def test_a_range_is_used_up_to_its_ends() -> None:
    talks = conversations(60, Lengths(0, 4, 4, 4, min_rounds=2, range_ratio=0.5), 1)
    turns = [turn for talk in talks for turn in talk.turns]
    assert {len(talk.turns) for talk in talks} == {2, 3, 4}
    assert {len(turn.message.split()) for turn in turns} == {turn.output_tokens for turn in turns} == {2, 3, 4}


def test_clients_share_their_prefix_alone() -> None:
    talks = conversations(5, Lengths(9, 20, 1), 3)
    assert len({str(talk.messages) for talk in talks}) == 1
    assert [(m["role"], len(m["content"].split())) for m in talks[0].messages] == [("system", 9)]
    assert len({talk.turns[0].message for talk in talks}) == 5
    assert not conversations(1, Lengths(0, 20, 1), 3)[0].messages, "without a prefix the system says nothing"


def test_a_request_repeats_all_that_was_said() -> None:
    talk = Conversation(0, "be brief", [Turn("one", 3), Turn("two", 4)])
    assert talk.ask("completions") == {"prompt": "be brief\none", "max_tokens": 3}
    talk.answer(" is 1")
    assert not talk.ended
    second = talk.ask("chat")
    said = [("system", "be brief"), ("user", "one"), ("assistant", " is 1"), ("user", "two")]
    assert second == {"messages": [{"role": role, "content": text} for role, text in said], "max_tokens": 4}
    talk.answer("2")
    assert talk.ended
    assert len(second["messages"]) == 4, "what was sent does not change"
    assert text_of(talk.messages) == "be brief\none is 1\ntwo2"


def test_each_text_begins_with_the_one_before_and_its_answer() -> None:
    (talk,) = conversations(1, Lengths(3, 5, 1, rounds=4), 0)
    prompts = []
    while not talk.ended:
        prompts.append(talk.ask("completions")["prompt"])
        talk.answer(f" answer {talk.rounds}")
    for number, (before, after) in enumerate(itertools.pairwise(prompts)):
        assert after == f"{before} answer {number}\n{talk.turns[number + 1].message}"


def test_a_client_asks_once_and_is_answered_once() -> None:
    (talk,) = conversations(1, Lengths(0, 5, 1, rounds=2), 0)
    with pytest.raises(IndexError):
        talk.answer("nobody asked")
    talk.ask("chat")
    with pytest.raises(AssertionError, match="no answer yet"):
        talk.ask("chat")
    talk.answer("")
    with pytest.raises(AssertionError, match="nothing was asked"):
        talk.answer("once more")


@given(st.integers(1, 5), st.integers(0, 20), st.integers(1, 9), st.integers(20, 200))
def test_a_conversation_ends_before_the_first_request_that_exceeds_its_limit(
    tokens_per_word: int, prefix: int, output: int, limit: int
) -> None:
    """The server counts the same tokens for each word. The first request is sent in any case: its size is not known."""
    (talk,) = conversations(1, Lengths(prefix, 9, output, 30, 5, range_ratio=0.3), 2)
    talk.limit = limit
    said, sizes = 0, []
    for number, turn in enumerate(talk.turns):
        prompt = said + tokens_per_word * (len(turn.message.split()) + (0 if number else prefix))
        if number == 0:
            assert talk.next_tokens <= prompt + turn.output_tokens, "at least one token for each word"
        sizes.append(prompt + turn.output_tokens)
        if number and sizes[-1] > limit:
            break
        assert number == 0 or not talk.ended
        talk.ask("chat")
        talk.answer("yes")
        talk.count(prompt, turn.output_tokens)
        said = sizes[-1]
    assert talk.ended
    assert talk.full == (talk.rounds < len(talk.turns))
    assert all(size <= limit for size in sizes[1 : talk.rounds])


def test_what_a_template_adds_counts_as_part_of_the_words() -> None:
    talk = Conversation(0, "", [Turn("one two", 3)] * 3)
    talk.ask("chat")
    talk.answer("yes")
    talk.count(10, 3)
    assert talk.next_tokens == 13 + 10 + 3
    talk.ask("chat")
    talk.answer("yes")
    talk.count(15, 3)
    assert talk.next_tokens == 18 + 10 + 3, "the most tokens of a word count, not the last ones"
    talk.limit = 31
    assert not talk.full
    talk.limit = 30
    assert talk.full
    assert talk.ended


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, Lengths(0, 100, 64, min_rounds=1)),
        ({"clients": 2}, Lengths(0, 300, 300, 10, min_rounds=10)),
        ({"clients": 2, "input_words": 7, "rounds": 3, "min_rounds": 2}, Lengths(0, 7, 300, 3, min_rounds=2)),
        ({"clients": 2, "agentic": True}, AGENTS),
        ({"clients": 2, "agentic": True, "rounds": 5, "prefix_words": 0}, AGENTS._replace(prefix_words=0, rounds=5)),
    ],
)
def test_sizes_have_the_defaults_of_their_load(options: dict[str, Any], lengths: Lengths) -> None:
    fewest = min(lengths.min_rounds or 0, lengths.rounds)
    assert BenchConfig(**options).lengths == lengths._replace(min_rounds=fewest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients = 0: must be at least 1"),
        ({"rounds": 3}, "rounds = 3: needs clients"),
        ({"agentic": True}, "agentic = True: needs clients"),
        ({"clients": 1, "num_prompts": 5}, "num_prompts = 5: is not for clients"),
        ({"clients": 1, "sub_question": 0}, "sub_question = 0: must be at least 1"),
        ({"max_model_len": 100}, "max_model_len = 100: needs clients"),
        ({"clients": 1, "max_model_len": 0}, "max_model_len = 0: must be at least 1"),
        ({"clients": 1, "range_ratio": 1.5}, "range_ratio = 1.5: must be between 0 and 1"),
        ({"clients": 1, "min_rounds": 11}, "min_rounds = 11: must be at most rounds, 10"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        BenchConfig(**options)
    assert message in str(found.value)

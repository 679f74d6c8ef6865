"""`benchmarks.quality.run` without a model: ties, differences, and evidence that a configuration was exercised."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from benchmarks.quality.configurations import Answer, Evidence, Outcome
from benchmarks.quality.report import markdown
from benchmarks.quality.run import CONFIGURATIONS, as_json, bits_per_token, compare, missing, problems, rows_of
from jswa.commands.evaluate import Question
from jswa.commands.task_sets import Item
from jswa.types import PrefixHit, RequestOutput, SamplingParams

IDS = np.arange(6, dtype=np.int32)
KEY = Question(Item("key", 512, "What?", (), "7", "exact", {}, 3), IDS, SamplingParams())
TEXT = Question(Item("text", None, "abcd", (), "", "bits", {}, 1), IDS, SamplingParams())
COLD = Answer([7, 8, 2], "7", [], [0.5, 1e-3, 2.0])
SCORED = Answer([], "", [-1.0, -2.0, -1.5, -0.5, -1.0], [])


def outcome(name: str, *answers: tuple[Question, Answer], **evidence: Any) -> Outcome:
    """Return a configuration that gave these answers."""
    return Outcome(name, dict(answers), Evidence(**evidence))


def compared(tokens: list[int]) -> Outcome:
    """Compare a configuration that generated these tokens with a cold run that generated those of `COLD`."""
    found = outcome("batched", (KEY, Answer(tokens, "8", [], [])), most_rows=2)
    compare(found, outcome("cold", (KEY, COLD)))
    return found


def test_equal_tokens_are_no_difference() -> None:
    """And every token counts as compared."""
    found = compared([7, 8, 2])
    assert (found.compared, found.ties, found.differences) == (3, 0, [])


def test_the_margin_of_the_first_token_that_differs_decides() -> None:
    """1e-3 at the second token is a tie, whatever follows; 0.5 at the first token, or an early end, is a difference."""
    assert (compared([7, 9, 9]).ties, compared([7, 9, 9]).differences) == (1, [])
    where = {"task": "key", "line": 3, "distance": 512}
    (first,) = compared([9, 8, 2]).differences
    assert {name: first[name] for name in where} == where
    assert (first["token"], first["margin"], first["text"], first["cold_text"]) == (0, 0.5, "8", "7")
    assert compared([7, 8]).differences[0]["token"] == 2
    assert compared([7, 8, 2, 5]).differences[0]["margin"] is None
    assert any("'token': 0" in line for line in problems([compared([9, 8, 2])]))


def test_too_many_ties_are_a_problem() -> None:
    """At most one token in a thousand may be a tie."""
    found = compared([7, 9, 9])
    found.compared = 999
    assert "1 ties in 999 tokens" in problems([found])[0]
    found.compared = 1000
    assert problems([found]) == []


@pytest.mark.parametrize(("off", "good"), [(1e-4, True), (3e-4, False), (float("nan"), False)])
def test_log_probabilities_are_compared_from_the_end(off: float, good: bool) -> None:
    """A configuration may have scored the last tokens only."""
    found = outcome("revived", (TEXT, Answer([], "", [-0.5 + off, -1.0], [])))
    compare(found, outcome("cold", (TEXT, SCORED)))
    assert (found.differences == []) == good
    assert bits_per_token(outcome("cold", (TEXT, SCORED)), 2) == pytest.approx(0.75 / np.log(2))
    assert rows_of(found) == []
    (row,) = rows_of(outcome("cold", (TEXT, SCORED)))
    assert row.bits_per_byte == pytest.approx(6 / 4 / np.log(2))


GOOD: dict[str, dict[str, int]] = {
    "cold": {"most_rows": 1},
    "prefix-cached": {"hits": 1},
    "revived": {"revivals": 1, "rebuilt_tokens": 9},
    "chunked 16": {"chunks": 1, "most_tokens": 16},
    "chunked 64": {"chunks": 1, "most_tokens": 20},
    "chunked 512": {"chunks": 2, "most_tokens": 512},
    "batched": {"most_rows": 2},
    "preempted": {"preemptions": 1},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_must_be_exercised(name: str) -> None:
    """A configuration without the evidence that it needs is a problem."""
    assert missing(outcome(name, **GOOD[name])) is None
    for gone in GOOD[name].keys() - {"most_tokens"}:
        lacking = outcome(name, **{**GOOD[name], gone: 0})
        assert "must show" in str(missing(lacking))
        assert len(problems([lacking])) == 1
    worse = {"cold": {"chunks": 1}, "chunked 16": {"most_tokens": 17}}
    if name in worse:
        assert missing(outcome(name, **{**GOOD[name], **worse[name]})) is not None


def test_only_tokens_that_rebuild_a_window_count_as_rebuilt() -> None:
    """Of 300 tokens with cached KV one request replays 252 behind the first 48, another all 300 from the start."""
    hits = [PrefixHit(301, 48, 300, 252, "cold", revived=True), PrefixHit(301, 0, 300, 300, "cold")]
    evidence = Evidence()
    evidence.see([RequestOutput("a", "", [], [], True, prefix=hit) for hit in hits])
    assert (evidence.replayed_tokens, evidence.rebuilt_tokens, evidence.revivals) == (552, 252, 1)


def test_the_report_names_every_configuration() -> None:
    """The Markdown is made from the content of the JSON."""
    outcomes = [outcome(name, (KEY, COLD), (TEXT, SCORED), **GOOD[name]) for name in CONFIGURATIONS]
    outcomes[1].answers[TEXT] = dataclasses.replace(SCORED, logprobs=[-1.0])
    for one in outcomes:
        compare(one, outcomes[0])
    head = {"model": "tiny", "limit": 3, "too_long": 1, "problems": problems(outcomes)}
    result = json.loads(json.dumps(as_json(outcomes, 1, head), allow_nan=False))
    text = markdown(result)
    assert "0 problems" in text
    for name in CONFIGURATIONS:
        assert f"| {name} | " in text
    assert "| key | 512 | 1 | " + " | ".join(["100.0%"] * 8) + " |" in text
    assert "| text | – | 1 | 2.164 bits/byte | – | 2.164" in text

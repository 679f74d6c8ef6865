"""`jswa eval` without a model: confidence intervals, sums and tables."""

import math

import numpy as np
import pytest

from jswa.commands.evaluate import Question, Row, Scored, calls_of, score, summarise, table, wilson
from jswa.commands.task_sets import Item
from jswa.errors import GenerationError
from jswa.text.answers.parser import Answering
from jswa.types import CompletionOutput, Logprob, RequestOutput, SamplingParams
from tests.support.text.transcripts import template_of, tokenizer_of


def item(task: str, distance: int | None, score: str = "exact", prompt: str = "What?") -> Item:
    """An item of a task."""
    return Item(task, distance, prompt, (), "7", score, {}, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (0, 10), (1, 3), (8, 10), (10, 10), (97, 100), (500, 1000)])
def test_a_wilson_interval_ends_at_the_limits_of_the_score_test(correct: int, count: int) -> None:
    """At either end p of the interval, the observed share is 1.96 standard deviations of p away from p."""
    share = correct / count
    low, high = wilson(correct, count)
    assert 0 <= low <= share <= high <= 1
    for p in (low, high):
        if 0 < p < 1:
            assert abs(share - p) / math.sqrt(p * (1 - p) / count) == pytest.approx(1.959964, rel=1e-9)
    assert (low == 0) == (correct == 0)
    assert (high == 1) == (correct == count)


def test_without_items_any_accuracy_is_possible() -> None:
    """The interval is (0, 1)."""
    assert wilson(0, 0) == (0.0, 1.0)


def test_there_is_one_row_per_task_and_distance() -> None:
    """Tasks in order of appearance, distances ascending; bits are summed before the division; too long items count."""
    far, near = item("key", 512), item("key", 32)
    texts = [item("text", None, "bits", "abcd"), item("text", None, "bits", "é" * 6)]
    scored = [Scored(far, "7", 1, True, None), Scored(near, "8", 1, False, None), Scored(far, "8", 1, False, None)]
    scored += [Scored(text, "", 0, None, bits) for text, bits in zip(texts, (4.0, 28.0), strict=True)]
    rows = summarise(scored, [far, item("key", 2048), item("other", None)])
    assert [(row.task, row.distance, row.count, row.too_long, row.correct) for row in rows] == [
        ("key", 32, 1, 0, 0), ("key", 512, 2, 1, 1), ("key", 2048, 0, 1, None),
        ("text", None, 2, 0, None), ("other", None, 0, 1, None),
    ]  # fmt: skip
    assert rows[3].bits_per_byte == 32.0 / 16
    assert rows[1].accuracy == 0.5
    assert (rows[1].low, rows[1].high) == wilson(1, 2)


def test_the_table_has_one_line_per_row() -> None:
    """A result that does not exist is shown as "-"."""
    lines = table([Row("key", 512, 4, 1, 3, 0.301, 0.954), Row("text", None, 2, 0, bits_per_byte=math.pi)])
    assert lines[1].split() == ["key", "512", "4", "75.0%", "right", "30.1%", "to", "95.4%", "1", "too", "long"]
    assert lines[2].split() == ["text", "-", "2", "3.1416", "bits/byte"]
    assert table([Row("key", 512, 0, 3)])[1].split() == ["key", "512", "0", "-", "3", "too", "long"]


def finished(ids: list[int], text: str) -> RequestOutput:
    """A finished request, with a log probability of -ln 4 for each token of its prompt."""
    said = CompletionOutput(0, text, [5, 6], finish_reason="stop")
    tables: list[dict[int, Logprob] | None] = [None, *({token: Logprob(-2 * math.log(2))} for token in ids[1:])]
    return RequestOutput("0", None, ids, [said], finished=True, prompt_logprobs=tables)


def test_a_finished_request_is_scored() -> None:
    """By its text or by the log probabilities of its prompt; a failed request raises and is not a wrong answer."""
    ids, params = np.array([1, 2, 3], np.int32), SamplingParams()
    output = finished([1, 2, 3], " 7\n8")
    right = score(Question(item("key", 32), ids, params), output)
    assert (right.correct, right.bits, right.tokens, right.num_bytes) == (True, None, 2, 0)
    assert score(Question(item("key", 32), ids, params), finished([1], "78")).correct is False
    text = score(Question(item("text", None, "bits", "é"), ids, params), output)
    assert (text.correct, text.num_bytes) == (None, 2)
    assert text.bits == pytest.approx(4.0)
    output.error = GenerationError("no next token")
    with pytest.raises(GenerationError):
        score(Question(item("key", 32), ids, params), output)


CALL = '{"name": "f", "arguments": {"a": 1}}'


OPEN, CLOSE, END = SPECIAL = ("<tool_call>", "</tool_call>", "<|im_end|>")


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        ([OPEN, CALL, CLOSE, END], CALL),
        (["Well. ", OPEN, CALL, CLOSE], CALL),
        ([OPEN, CALL, CLOSE, OPEN, CALL, CLOSE, END], f"[{CALL}, {CALL}]"),
        ([OPEN, '{"name": "f", "arguments": {"a": ', END], '{"name": "f", "arguments": {"a": }'),
        (["Hello!", END], ""),
        (["<tool_c", "all>", CALL, END], ""),
        ([], ""),
    ],
)
def test_calls_are_read_from_tokens(parts: list[str], calls: str) -> None:
    """A delimiter that is spelled with other tokens is text."""
    tokenizer = tokenizer_of(SPECIAL)
    tools = [{"type": "function", "function": {"name": "f"}}]
    answering = Answering(template_of("hermes", tokenizer), tools)
    tokens = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).tolist()]
    assert calls_of(answering, tokenizer, "", np.array([1], np.int32), tokens) == calls

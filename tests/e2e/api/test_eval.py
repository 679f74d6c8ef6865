"""`jswa eval` on `tiny`, on sets that are made so that the answers are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jswa.commands.evaluate import evaluate, questions, summarise
from jswa.commands.task_sets import read_sets
from jswa.errors import InvalidPrompt, TaskSetError
from jswa.llm import LLM
from jswa.text.chat_template import ChatTemplate
from tests.e2e.api.test_cli import jswa
from tests.support.tiny import ONE_SHAPE, ONE_SHAPE_FLAGS

STORY = "Once upon a time there was a cat. The cat lived in a small house near the forest and was happy. "


def write(folder: Path, task: str, *items: dict[str, object]) -> None:
    """Write the set of a task."""
    lines = (json.dumps({"task": task, "distance": None, **item}) + "\n" for item in items)
    (folder / f"{task}.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def llm() -> LLM:
    """A small engine."""
    return LLM("tiny", **ONE_SHAPE)


def say(llm: LLM, max_tokens: int) -> str:
    """The model's greedy text after the story."""
    (output,) = llm.generate(STORY, temperature=0, max_tokens=max_tokens, use_tqdm=False)
    return output.outputs[0].text


def test_the_command_prints_a_table_and_writes_all_answers(tmp_path: Path) -> None:
    """Two items are answered and one is too long; a set that was not named is not run. Runs in its own process."""
    answered: dict[str, object] = {"prompt": STORY, "answer": "zebra", "score": "exact"}
    write(
        tmp_path,
        "lookup",
        *({**one, "distance": 32} for one in (answered, answered, {**answered, "prompt": "a" * 9999})),
    )
    schema = {"type": "object"}
    write(tmp_path, "json", {"prompt": STORY, "answer": "{}", "score": "json", "schema": schema})
    write(tmp_path, "ignored", answered)
    result = tmp_path / "result.json"
    done = jswa("eval", "tiny", f"--sets={tmp_path}", "--tasks=lookup, json", f"--json={result}", *ONE_SHAPE_FLAGS)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    found = json.loads(result.read_text())
    assert lines[1] == ["lookup", "32", "2", "0.0%", "right", "0.0%", "to", "65.8%", "1", "too", "long"]
    assert lines[2] == ["json", "-", "1", "0.0%", "right", "0.0%", "to", "79.3%"]
    assert (found["model"], found["options"]["max_num_seqs"]) == ("tiny", 4)
    assert set(found["sets"]) == {"lookup", "json"}
    assert [(item["correct"], type(item["text"])) for item in found["items"]] == [(False, str)] * 3
    assert found["too_long"] == [{"task": "lookup", "line": 3}]


def test_the_model_may_say_a_few_tokens_more_than_the_answer(llm: LLM, tmp_path: Path) -> None:
    """8 tokens more, so that a text that only begins with the answer is wrong."""
    begin = say(llm, 40).strip()[:10].strip() or "x"
    write(tmp_path, "lookup", {"prompt": STORY, "answer": begin, "score": "exact"})
    (question,), _ = questions(llm, read_sets(tmp_path)["lookup"])
    assert llm.tokenizer is not None
    assert question.params.max_tokens == len(llm.tokenizer.encode(begin, add_special_tokens=False)) + 8
    _, result = evaluate(llm, tmp_path)
    assert result["items"][0]["text"] == say(llm, question.params.max_tokens)
    assert result["items"][0]["correct"] == (say(llm, question.params.max_tokens).strip() == begin)
    assert result["cached_tokens"] > 0


def test_bits_are_the_sum_of_the_prompt_log_probabilities(llm: LLM, tmp_path: Path) -> None:
    """BOS is put in front and costs nothing; the result is per byte of UTF-8."""
    text = STORY + "Café."
    write(tmp_path, "stories", {"prompt": text, "answer": "", "score": "bits"})
    rows, _ = evaluate(llm, tmp_path)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text).tolist()
    assert ids[0] == llm.tokenizer.token_id("bos_token")
    (output,) = llm.generate([ids], temperature=0, max_tokens=1, prompt_logprobs=0, use_tqdm=False)
    assert output.prompt_logprobs is not None
    logprobs = [one[i].logprob for one, i in zip(output.prompt_logprobs, ids, strict=True) if one is not None]
    assert rows[0].bits_per_byte == pytest.approx(-sum(logprobs) / math.log(2) / (len(text) + 1), rel=1e-6)


def test_messages_are_rendered_by_the_chat_template(llm: LLM, tmp_path: Path) -> None:
    """They become the same ids as in `LLM.chat`; without a template they are refused."""
    messages = [{"role": "user", "content": STORY}]
    write(tmp_path, "chat", {"messages": messages, "answer": "x", "score": "exact"})
    items = read_sets(tmp_path)["chat"]
    (question,), _ = questions(llm, items)
    output = llm.chat(messages, temperature=0, max_tokens=1, use_tqdm=False)
    assert np.array_equal(question.ids, next(iter(output)).prompt_token_ids)
    template, llm.chat_template = llm.chat_template, None
    with pytest.raises(InvalidPrompt, match="chat template"):
        questions(llm, items)
    llm.chat_template = template
    assert summarise([], items)[0].too_long == 1


def test_calls_need_a_place_for_tools(llm: LLM, tmp_path: Path) -> None:
    """They are rendered with the chat template; without a place for tools they are left out, or refused if named."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "Call f."}]
    write(tmp_path, "calls", {"messages": messages, "tools": tools, "answer": "", "score": "call"})
    write(tmp_path, "lookup", {"prompt": STORY, "answer": "zebra", "score": "exact"})
    shown = ChatTemplate({"default": "{% for t in tools %}{{ t.function.name }}{% endfor %}"}, {})
    template, llm.chat_template = llm.chat_template, shown
    rows, _ = evaluate(llm, tmp_path)
    assert [(row.task, row.correct) for row in rows] == [("calls", 1), ("lookup", 0)]
    (question,), _ = questions(llm, read_sets(tmp_path)["calls"])
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(question.ids.tolist()) == "f"
    llm.chat_template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    said: list[str] = []
    rows, _ = evaluate(llm, tmp_path, progress=said.append)
    assert [row.task for row in rows] == ["lookup"]
    assert said[0] == "calls: left out, as the model's chat template has no place for tools"
    with pytest.raises(InvalidPrompt, match="no place for tools"):
        evaluate(llm, tmp_path, ["calls"])
    llm.chat_template = template


def test_a_malformed_set_is_reported_before_the_model_is_loaded(tmp_path: Path, llm: LLM) -> None:
    """One line on stderr with file and line, and exit status 2."""
    write(tmp_path, "lookup", {"prompt": STORY, "answer": "x", "score": "excat"})
    done = jswa("eval", "no/such/model", f"--sets={tmp_path}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "lookup.jsonl, line 1: score = 'excat'" in done.stderr
    with pytest.raises(TaskSetError, match="limit = 0"):
        evaluate(llm, tmp_path, limit=0)

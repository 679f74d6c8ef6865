"""`jswa eval`: run task sets on a model and score its answers, per task and per distance that it has to remember.

It uses the public `jswa.LLM`; jswa/commands/task_sets.py describes the format of the sets. Imports no jax.
"""

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from jswa import __version__
from jswa.commands.start_lines import show_start
from jswa.commands.task_sets import FOLDER, Item, is_correct, read_sets
from jswa.errors import InvalidPrompt, TaskSetError
from jswa.plan import TokenEvent
from jswa.text.answers.message import AnswerText
from jswa.text.answers.parser import Answering
from jswa.text.answers.template import AnswerTemplate
from jswa.text.generated import generated_text
from jswa.text.stop_strings import StopTable
from jswa.text.tokenizer import Tokenizer
from jswa.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jswa.llm import LLM

_Z95 = 1.959964  # 97.5 % quantile of the normal distribution, for two-sided 95 % intervals
_EXACT_SLACK = 8  # tokens beyond the answer's own, so that a text that only begins with the answer is seen to be wrong
_JSON_SLACK = 32
_OPEN_JSON = 256  # tokens for JSON if the set has no answer to measure


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """An item as a request.

    Attributes:
        ids: token ids [P] of the prompt, with BOS or chat template.
        params: greedy sampling.
        read_calls: reads the tool calls of the generated tokens, for the score "call".
    """

    item: Item
    ids: Int[np.ndarray, " P"]
    params: SamplingParams
    read_calls: Callable[[Sequence[int]], str] | None = None

    def answer(self, text: str, tokens: Sequence[int]) -> str:
        """Return the part of a generated text that is scored: its tool calls as JSON, or all of it."""
        return text if self.read_calls is None else self.read_calls(tokens)

    @property
    def length(self) -> int:
        """Tokens of the prompt plus the longest answer allowed."""
        return len(self.ids) + (self.params.max_tokens or 0)


@dataclasses.dataclass(frozen=True)
class Scored:
    """The score of an item: `correct`, or `bits` for the score "bits"; the other is None."""

    item: Item
    text: str
    tokens: int
    correct: bool | None
    bits: float | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the UTF-8 text that the bits encode; 0 if the item has no bits."""
        return len((self.item.prompt or "").encode()) if self.bits is not None else 0


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one task at one distance.

    Attributes:
        count: number of scored items.
        too_long: number of items that were not scored because prompt and answer exceed max_model_len.
        correct: number of correct answers; None for tasks scored in bits.
        low, high: 95 % Wilson interval of the accuracy (Wilson 1927).
        bits_per_byte: all bits over all bytes of the task; None for tasks scored as correct or not.
    """

    task: str
    distance: int | None
    count: int
    too_long: int
    correct: int | None = None
    low: float | None = None
    high: float | None = None
    bits_per_byte: float | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of correct answers; None if there are none to count."""
        return None if self.correct is None or not self.count else self.correct / self.count


def questions(llm: "LLM", items: Iterable[Item]) -> tuple[list[Question], list[Item]]:
    """Return requests for the items that fit max_model_len, and the items that do not fit.

    Raises InvalidPrompt if the checkpoint has no tokenizer, has no chat template for an item with messages, has a
    template that refuses them, has no response template for an item scored by its call, or has neither a BOS nor an EOS
    token for an item scored in bits.
    """
    longest = llm.engine.limits.max_model_len
    items = list(items)
    template = llm.answer_template() if any(item.score == "call" for item in items) else None
    fit, too_long = [], []
    for item in items:
        question = _question(llm, item, template)
        if question.length <= longest:
            fit.append(question)
        else:
            too_long.append(item)
    return fit, too_long


def score(question: Question, output: RequestOutput) -> Scored:
    """Score a finished request. Raises GenerationError if its text has no next token."""
    if output.error is not None:
        raise output.error
    item, said = question.item, output.outputs[0]
    if item.score != "bits":
        correct = is_correct(item, question.answer(said.text, said.token_ids))
        return Scored(item, said.text, len(said.token_ids), correct, None)
    return Scored(item, "", 0, None, -sum(prompt_logprobs(output)) / math.log(2))


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """Return the natural log probabilities of all prompt tokens but the first, if they were requested."""
    tables = output.prompt_logprobs or []
    pairs = zip(output.prompt_token_ids[1:], tables[1:], strict=True)
    return [table[token].logprob for token, table in pairs if table is not None]


def summarise(scored: Iterable[Scored], too_long: Iterable[Item] = ()) -> list[Row]:
    """Return a Row per task and distance: tasks in order of appearance, distances ascending."""
    groups: dict[tuple[str, int | None], list[Scored]] = {}
    missing: dict[tuple[str, int | None], int] = {}
    for one in scored:
        groups.setdefault((one.item.task, one.item.distance), []).append(one)
    for item in too_long:
        key = item.task, item.distance
        missing[key] = missing.get(key, 0) + 1
    keys = list(dict.fromkeys([*groups, *missing]))
    tasks = list(dict.fromkeys(task for task, _ in keys))
    keys.sort(key=lambda key: (tasks.index(key[0]), -1 if key[1] is None else key[1]))
    return [_row(key, groups.get(key, []), missing.get(key, 0)) for key in keys]


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of `correct` out of `count` (Wilson 1927); (0, 1) if count is 0."""
    if not count:
        return 0.0, 1.0
    share, z2 = correct / count, _Z95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (middle - half if correct else 0.0), (middle + half if correct < count else 1.0)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines of text under a heading."""
    lines = [f"{'task':<12} {'distance':>8} {'items':>6}  {'result':<18} 95 % interval"]
    for row in rows:
        distance = "-" if row.distance is None else str(row.distance)
        result, interval = "-", ""
        if row.bits_per_byte is not None:
            result = f"{row.bits_per_byte:.4f} bits/byte"
        elif row.accuracy is not None and row.low is not None and row.high is not None:
            result, interval = f"{row.accuracy:.1%} right", f"{row.low:.1%} to {row.high:.1%}"
        note = f"  {row.too_long} too long" if row.too_long else ""
        lines.append(f"{row.task:<12} {distance:>8} {row.count:>6}  {result:<18} {interval}{note}".rstrip())
    return lines


def evaluate_model(
    model: str, tasks: Sequence[str], sets: Path | None, limit: int | None, path: Path | None, options: dict[str, Any]
) -> None:
    """Load a model, run task sets on it, print its scores, and write them to a JSON file. Raises JswaError.

    Args:
        tasks, limit: as `evaluate` takes them.
        sets: folder of the sets; None means those that ship with jswa.
        path: the JSON file; None writes none.
        options: of the engine, by name.
    """
    folder = sets or FOLDER
    read_sets(folder, tasks)  # report a malformed set before the model is loaded
    show_start(model)
    from jswa.llm import LLM

    with LLM(model, **options) as llm:
        rows, result = evaluate(llm, folder, tasks, limit, progress=lambda line: print(line, file=sys.stderr))
    print("\n".join(table(rows)))
    if path is not None:
        head = {"model": model, "jswa": __version__, "jax": version("jax"), "options": options}
        path.write_text(json.dumps({**head, **result}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def evaluate(
    llm: "LLM",
    sets: Path = FOLDER,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], dict[str, Any]]:
    """Run task sets. Return the rows of the table, and everything that `jswa eval --json` writes.

    Args:
        sets: folder of the sets.
        tasks: names of the tasks to run; empty means all, without sets of calls if the model has no form for tools.
        limit: run only the first items of each task and distance, this many; None means all.
        progress: is called with a line of text after each task.

    Raises:
        TaskSetError: a set is missing or malformed, or the limit is below 1; raised before anything runs.
        InvalidPrompt: see `questions`.
    """
    if limit is not None and limit < 1:
        raise TaskSetError(sets, None, "limit", limit, "must be at least 1")
    results: list[Scored] = []
    dropped: list[Item] = []
    begin = time.monotonic()
    for task, items in read_sets(sets, tasks, limit).items():
        if not tasks and items[0].score == "call" and not _takes_tools(llm):
            progress(f"{task}: left out, as the model's chat template has no place for tools")
            continue
        fit, too_long = questions(llm, items)
        prompts = [{"prompt_token_ids": question.ids} for question in fit]
        outputs = llm.generate(prompts, [question.params for question in fit], use_tqdm=False) if fit else []
        results += [score(question, output) for question, output in zip(fit, outputs, strict=True)]
        dropped += too_long
        progress(f"{task}: {len(fit)} items, {time.monotonic() - begin:.1f} s")
    rows = summarise(results, dropped)
    cached = llm.cache_stats()
    return rows, {
        "sets": {task: _digest(sets / f"{task}.jsonl") for task in dict.fromkeys(row.task for row in rows)},
        "limit": limit,
        "seconds": time.monotonic() - begin,
        "prompt_tokens": cached.prompt_tokens,
        "cached_tokens": cached.cached_tokens,
        "rows": [dataclasses.asdict(row) | {"accuracy": row.accuracy} for row in rows],
        "items": [_shown(one) for one in results],
        "too_long": [{"task": item.task, "line": item.line} for item in dropped],
    }


def _takes_tools(llm: "LLM") -> bool:
    sources = [] if llm.chat_template is None else llm.chat_template.sources.values()
    template = llm.answer_template()
    return any("tools" in source for source in sources) and template is not None and template.reads_calls


def _question(llm: "LLM", item: Item, template: AnswerTemplate | None) -> Question:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidPrompt("model", "no tokenizer.json", "must have a tokenizer: the tasks are text")
    if item.score == "bits":
        start = next((i for i in map(tokenizer.token_id, ("bos_token", "eos_token")) if i is not None), None)
        if start is None:
            raise InvalidPrompt("score", "bits", "needs a tokenizer with a BOS or an EOS token")
        ids = np.concatenate([[start], tokenizer.encode(item.prompt or "", add_special_tokens=False)])
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        return Question(item, ids.astype(np.int32), params)
    read_calls = None
    if item.prompt is not None:
        ids = tokenizer.encode(item.prompt)
    else:
        if llm.chat_template is None:
            raise InvalidPrompt("messages", list(item.messages), "need a checkpoint with a chat template")
        text = llm.chat_template.prompt(item.messages, tools=item.tools or None)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written the special tokens
        if item.score == "call":
            if template is None or not template.reads_calls:
                raise InvalidPrompt("tools", len(item.tools), "the form of the model's tool calls is unknown")
            answering = Answering(template, item.tools)
            read_calls = partial(calls_of, answering, tokenizer, answering.prefix(text), ids)
    answer = len(tokenizer.encode(item.answer, add_special_tokens=False))
    json_room = 2 * answer + _JSON_SLACK if item.answer else _OPEN_JSON
    room = answer + _EXACT_SLACK if item.score == "exact" else json_room
    return Question(item, ids, SamplingParams(temperature=0.0, max_tokens=room), read_calls)


def calls_of(
    answering: Answering, tokenizer: Tokenizer, prefix: str, ids: Int[np.ndarray, " P"], tokens: Sequence[int]
) -> str:
    """Return the tool calls of an answer as JSON: an object with `name` and `arguments`, or a list; "" if it has none.

    Arguments stand as the model wrote them, which may be broken JSON.

    Args:
        prefix: the part of the rendered prompt that belongs to the answer.
        ids: token ids [P] of the prompt.
        tokens: the generated tokens; the last one has ended the answer.
    """
    text = generated_text(answering, tokenizer, prefix, ids, SamplingParams(), StopTable(()))
    answer = AnswerText()
    for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
        part = text.push(TokenEvent("", token, None if left else "stop"))
        for event in () if part is None else part.events:
            answer.add(event)
    calls = [f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments.getvalue()}}}' for call in answer.calls]
    return calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]" if calls else ""


def _row(key: tuple[str, int | None], group: Sequence[Scored], too_long: int) -> Row:
    task, distance = key
    if not group:
        return Row(task, distance, 0, too_long)
    if group[0].bits is not None:
        bits, size = sum(one.bits or 0.0 for one in group), sum(one.num_bytes for one in group)
        return Row(task, distance, len(group), too_long, bits_per_byte=bits / max(size, 1))
    correct = sum(bool(one.correct) for one in group)
    low, high = wilson(correct, len(group))
    return Row(task, distance, len(group), too_long, correct, low, high)


def _shown(one: Scored) -> dict[str, Any]:
    shown = {"task": one.item.task, "line": one.item.line, "distance": one.item.distance}
    if one.bits is not None:
        return shown | {"bits": one.bits, "bytes": one.num_bytes}
    return shown | {"correct": one.correct, "text": one.text, "tokens": one.tokens}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

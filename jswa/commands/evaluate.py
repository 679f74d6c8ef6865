"""`jswa eval`: what a model gets right on sets of tasks, by task and by the distance of what it has to remember.

Runs on the public `jswa.LLM`. The format of the sets is described in `jswa.commands.task_sets`. Imports no jax.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from jswa.commands.task_sets import FOLDER, Item, is_correct, read_sets
from jswa.errors import InvalidPrompt, TaskSetError
from jswa.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jswa.llm import LLM

_Z95 = 1.959964  # of the normal distribution, two-sided
_EXACT_SLACK = 8  # tokens after the answer, in which a wrong text shows
_JSON_SLACK = 32
_OPEN_JSON = 256  # tokens of JSON whose text is not given


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """An item as a request: token ids, BOS or chat template included, and greedy sampling."""

    item: Item
    ids: Int[np.ndarray, " P"]
    params: SamplingParams

    @property
    def length(self) -> int:
        """Tokens of prompt and longest answer."""
        return len(self.ids) + (self.params.max_tokens or 0)


@dataclasses.dataclass(frozen=True)
class Scored:
    """What came of an item: right or not, or its bits."""

    item: Item
    text: str
    tokens: int
    correct: bool | None
    bits: float | None

    @property
    def num_bytes(self) -> int:
        """Bytes of UTF-8 that the bits are for."""
        return len((self.item.prompt or "").encode()) if self.bits is not None else 0


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one task at one distance.

    Attributes:
        count: items that were scored.
        too_long: items that do not fit max_model_len with their answer; not scored.
        correct: None for tasks in bits.
        low, high: 95 % Wilson interval of the accuracy (Wilson 1927).
        bits_per_byte: over all text together; None for tasks that are right or wrong.
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
        """Share of right answers."""
        return None if self.correct is None or not self.count else self.correct / self.count


def questions(llm: "LLM", items: Iterable[Item]) -> tuple[list[Question], list[Item]]:
    """Requests for the items that fit max_model_len, and the items that do not.

    Raises InvalidPrompt where the checkpoint has no tokenizer, no chat template for messages or one that refuses them,
    or neither a bos nor an eos token to put before a text whose bits are counted.
    """
    longest = llm.engine.limits.max_model_len
    fit, too_long = [], []
    for item in items:
        question = _question(llm, item)
        if question.length <= longest:
            fit.append(question)
        else:
            too_long.append(item)
    return fit, too_long


def score(question: Question, output: RequestOutput) -> Scored:
    """Score a finished request. Raises GenerationError where it failed."""
    if output.error is not None:
        raise output.error
    item, said = question.item, output.outputs[0]
    if item.score != "bits":
        return Scored(item, said.text, len(said.token_ids), is_correct(item, said.text), None)
    return Scored(item, "", 0, None, -sum(prompt_logprobs(output)) / math.log(2))


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """Log probabilities (natural) of the tokens of a prompt but the first, where they were asked for."""
    tables = output.prompt_logprobs or []
    pairs = zip(output.prompt_token_ids[1:], tables[1:], strict=True)
    return [table[token].logprob for token, table in pairs if table is not None]


def summarise(scored: Iterable[Scored], too_long: Iterable[Item] = ()) -> list[Row]:
    """A row per task and distance, tasks in the order in which they come, distances ascending."""
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
    """95 % interval of a share that was seen `correct` times in `count` (Wilson 1927); (0, 1) without any."""
    if not count:
        return 0.0, 1.0
    share, z2 = correct / count, _Z95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (middle - half if correct else 0.0), (middle + half if correct < count else 1.0)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of text."""
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


def evaluate(
    llm: "LLM",
    sets: Path = FOLDER,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], dict[str, Any]]:
    """Run sets of tasks; returns the rows of the table, and all that `jswa eval --json` writes.

    Args:
        sets: folder of the sets.
        tasks: names of sets; none: all.
        limit: the first so many items of each task and distance.
        tell: is given a line on the tasks as they end.

    Raises:
        TaskSetError: a set is missing or malformed, or the limit is; before anything runs.
        InvalidPrompt: as `questions`.
    """
    if limit is not None and limit < 1:
        raise TaskSetError(sets, None, "limit", limit, "must be at least 1")
    results: list[Scored] = []
    dropped: list[Item] = []
    begin = time.monotonic()
    for task, items in read_sets(sets, tasks, limit).items():
        fit, too_long = questions(llm, items)
        prompts = [{"prompt_token_ids": question.ids} for question in fit]
        outputs = llm.generate(prompts, [question.params for question in fit], use_tqdm=False) if fit else []
        results += [score(question, output) for question, output in zip(fit, outputs, strict=True)]
        dropped += too_long
        tell(f"{task}: {len(fit)} items, {time.monotonic() - begin:.1f} s")
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


def _question(llm: "LLM", item: Item) -> Question:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidPrompt("model", "no tokenizer.json", "must have a tokenizer to be evaluated on text")
    if item.score == "bits":
        start = next((i for i in map(tokenizer.token_id, ("bos_token", "eos_token")) if i is not None), None)
        if start is None:
            raise InvalidPrompt("score", "bits", "needs a tokenizer with a bos or an eos token")
        ids = np.concatenate([[start], tokenizer.encode(item.prompt or "", add_special_tokens=False)])
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        return Question(item, ids.astype(np.int32), params)
    if item.prompt is not None:
        ids = tokenizer.encode(item.prompt)
    else:
        if llm.chat_template is None:
            raise InvalidPrompt("messages", list(item.messages), "need a checkpoint with a chat template")
        text = llm.chat_template.render(item.messages, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written all of them itself
    answer = len(tokenizer.encode(item.answer, add_special_tokens=False))
    json_room = 2 * answer + _JSON_SLACK if item.answer else _OPEN_JSON
    room = answer + _EXACT_SLACK if item.score == "exact" else json_room
    return Question(item, ids, SamplingParams(temperature=0.0, max_tokens=room))


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

"""Ablation of the radix cache: answers, log probabilities and time with the prefix cache and without.

SGLang's pull request 7367 introduced a prefix cache for sliding-window models, and checked it with the same questions
with and without `--disable-radix-cache`. Here off is the engine option `prefix_cache=False`. Both variants run the same
load alternately on one machine:

* The sets of `jswa eval` that have answers, all of them twice, so that the second pass hits what the first has cached.
* The log probabilities of the last tokens of the texts in those sets. Log probabilities of a prompt never come from the
  cache, so these tokens are forced: one request per token, whose prompt is the text before it and which may generate
  that token only (`allowed_token_ids`). Its log probability is the one before that restriction.
* Text sampled after the first half of these texts. The estimator k3 (`tools.divergence`; SGLang tests its caches
  with it too) compares the log probabilities of that run with those of an engine without the cache, which computes
  prompt and sampled text in one prefill.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from benchmarks.cache.ablation_table import Row, Table, loss, spread
from jswa.commands.evaluate import evaluate, prompt_logprobs, questions
from jswa.commands.task_sets import FOLDER, read_sets
from jswa.llm import LLM
from jswa.types import SamplingParams
from tools.divergence import forced, forced_logprob, k3

VARIANTS = ("on", "off")
FORCED = 96  # tokens at the end of each text
SAMPLED = 96  # tokens after the first half of each text


def texts_of(llm: LLM, sets: Path, limit: int | None) -> list[Int[np.ndarray, " T"]]:
    """Return the token ids of the texts in the sets, as `jswa eval` scores them."""
    items = [item for found in read_sets(sets, (), limit).values() for item in found if item.score == "bits"]
    return [question.ids for question in questions(llm, items)[0]]


def tails(llm: LLM, texts: Sequence[Int[np.ndarray, " T"]], count: int) -> dict[str, Any]:
    """Return bits per byte and the accuracy of the likeliest token, over the last `count` tokens of each text."""
    assert llm.tokenizer is not None
    pairs = [(ids, at) for ids in texts for at in range(max(1, len(ids) - count), len(ids))]
    size = sum(len(llm.tokenizer.decode(ids[max(1, len(ids) - count) :].tolist()).encode()) for ids in texts)
    start = time.perf_counter()
    outputs = forced(llm, [ids for ids, _ in pairs], [at for _, at in pairs])
    seconds = time.perf_counter() - start
    logprobs = [forced_logprob(output) for output in outputs]
    first = [(output.outputs[0].logprobs or [])[0][output.outputs[0].token_ids[0]].rank == 1 for output in outputs]
    return {
        "tokens": len(logprobs),
        "bits_per_byte": -sum(logprobs) / math.log(2) / size,
        "accuracy": sum(first) / len(first),
        "logprobs": logprobs,
        "seconds": seconds,
    }


def divergence(llm: LLM, scorer: LLM, texts: Sequence[Int[np.ndarray, " T"]], count: int) -> dict[str, float]:
    """Return k3 between the LLM's log probabilities of the tokens it sampled, in decode, and the scorer's, in prefill.

    k3 is the mean over the prompts; largest_difference is between two log probabilities of one token.
    """
    prompts = [ids[: len(ids) // 2].tolist() for ids in texts]
    params = SamplingParams(temperature=1.0, max_tokens=count, seed=1, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    whole = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    scores = scorer.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    means, furthest = [], 0.0
    for prompt, output, score in zip(prompts, outputs, scores, strict=True):
        tables = output.outputs[0].logprobs or []
        own = [table[token].logprob for token, table in zip(output.outputs[0].token_ids, tables, strict=True)]
        scored = prompt_logprobs(score)[len(prompt) - 1 :]
        means.append(k3(own, scored))
        furthest = max(furthest, float(np.abs(np.array(scored) - own).max()))
    return {"k3": float(np.mean(means)), "largest_difference": furthest}


def compare(
    open_llm: Callable[[bool], LLM], sets: Path, limit: int | None, *, tail: int, sampled: int, repeats: int
) -> dict[str, Any]:
    """Run both variants. `open_llm(on)` opens an LLM with a prefix cache or without."""
    llms = {"on": open_llm(True), "off": open_llm(False)}
    texts = texts_of(llms["off"], sets, limit)
    found: dict[str, dict[str, Any]] = {name: {"passes": [], "forced": []} for name in VARIANTS}
    for llm in llms.values():  # compiles the programs that are compiled on first use
        tails(llm, texts[:1], 1)
        divergence(llm, llms["off"], texts[:1], 2)
    for _ in range(repeats):
        for llm in llms.values():
            llm.flush_cache()
        for _ in range(2):
            for name, llm in llms.items():
                found[name]["passes"].append(_asked(llm, sets, limit))
    for _ in range(repeats):
        for name, llm in llms.items():
            llm.flush_cache()
            one = tails(llm, texts, tail)
            found[name]["forced"].append({**one, "hit_rate": llm.cache_stats().hit_rate})
    for name, llm in llms.items():
        found[name] |= divergence(llm, llms["off"], texts, sampled)
    answers = [one.pop("answers") for name in VARIANTS for one in found[name]["passes"]]
    logprobs = {name: np.array([one.pop("logprobs") for one in found[name]["forced"]]) for name in VARIANTS}
    return {
        "texts": len(texts),
        "answers": len(answers[0]),
        "passes_with_equal_answers": sum(one == answers[0] for one in answers),
        "answers_that_differ": sum(len(set(given)) > 1 for given in zip(*answers, strict=True)),
        "passes": len(answers),
        "largest_forced_difference": float(np.abs(logprobs["on"] - logprobs["off"][0]).max()),
        **found,
    }


def _asked(llm: LLM, sets: Path, limit: int | None) -> dict[str, Any]:
    """Run one pass over the sets that have answers."""
    before = llm.cache_stats()
    tasks = [task for task, items in read_sets(sets, (), limit).items() if items[0].score != "bits"]
    rows, result = evaluate(llm, sets, tasks, limit)
    stats = llm.cache_stats()
    prompt = stats.prompt_tokens - before.prompt_tokens
    return {
        "seconds": result["seconds"],
        "hit_rate": (stats.cached_tokens - before.cached_tokens) / max(prompt, 1),
        "accuracy": {f"{row.task}/{row.distance}": row.accuracy for row in rows},
        "correct": sum(row.correct or 0 for row in rows),
        "count": sum(row.count for row in rows),
        "answers": [one["text"] for one in result["items"]],
    }


def results(limit: int = 4, repeats: int = 3) -> list[dict[str, Any]]:
    """Return all that the table shows, on the embedded model."""

    def open_llm(cached: bool) -> LLM:
        return LLM("tiny", prefix_cache=cached)

    return [{"model": "tiny", **compare(open_llm, FOLDER, limit, tail=FORCED, sampled=SAMPLED, repeats=repeats)}]


def table(found: list[dict[str, Any]]) -> Table:
    """Return the comparison as a table."""
    return Table(
        "The radix cache for sliding-window models (SGLang 7367)",
        "with the prefix cache",
        "without",
        [row for one in found for row in _cells(one)],
        [
            "Published: Llama-4-Scout on 8 GPUs, LooGLE, average BERTScore (F1), one run each. Tests of the SGLang "
            "project have since bounded k3 by 0.002 (gpt-oss-20b).",
            "Where it loses: the first pass has almost nothing to hit, and its median is slower than without a cache; "
            "the ranges overlap. The last column is empty where on is not worse.",
            "Each question is asked twice; the second time all but the last token of its prompt can come from the "
            "cache. Forced tokens are the last tokens of each text; each has a request of its own, which hits what the "
            "requests before it have cached. Times are median (range) of alternating passes.",
        ],
    )


def _cells(one: dict[str, Any]) -> list[Row]:
    both = [one[variant] for variant in VARIANTS]
    turns = {"first": slice(0, None, 2), "second": slice(1, None, 2)}

    def row(
        name: str,
        figures: Callable[[dict[str, Any]], list[float]],
        better: Literal["more", "fewer"],
        digits: int,
        unit: Literal["%", "points"] = "%",
        where: str = "",
    ) -> Row:
        on, off = map(figures, both)
        return where, name, "", spread(on, digits), spread(off, digits), loss(on, off, better, unit)

    def passes(name: str, turn: str, scale: float = 1) -> Callable[[dict[str, Any]], list[float]]:
        return lambda found: [scale * each[name] for each in found["passes"][turns[turn]]]

    def of_forced(name: str, scale: float = 1) -> Callable[[dict[str, Any]], list[float]]:
        return lambda found: [scale * each[name] for each in found["forced"]]

    same = f"{one['answers'] - one['answers_that_differ']} of {one['answers']} equal in all passes"
    right = [[each["correct"] for each in found["passes"]] for found in both]
    shown = [f"{spread(each)} of {found['passes'][0]['count']}" for each, found in zip(right, both, strict=True)]
    first = (f"{one['model']}, sets of `jswa eval`", "right answers", "84.32 on, 84.50 off (F1, %)", shown[0], shown[1])
    forced = f"{one['model']}, forced tokens of texts"
    return [
        (*first, loss(right[0], right[1], "more")),
        ("", "greedy texts", "", same, same, ""),
        row("hit rate, first pass, %", passes("hit_rate", "first", 100), "more", 1, "points"),
        row("hit rate, second pass, %", passes("hit_rate", "second", 100), "more", 1, "points"),
        row("seconds, first pass", passes("seconds", "first"), "fewer", 1),
        row("seconds, second pass", passes("seconds", "second"), "fewer", 1),
        row("bits per byte", of_forced("bits_per_byte"), "fewer", 4, where=forced),
        row("likeliest token is right, %", of_forced("accuracy", 100), "more", 2, "points"),
        row("hit rate, %", of_forced("hit_rate", 100), "more", 1, "points"),
        row("seconds", of_forced("seconds"), "fewer", 1),
        ("", "k3 against one prefill", "< 0.002 required", f"{both[0]['k3']:.1e}", f"{both[1]['k3']:.1e}", ""),
    ]

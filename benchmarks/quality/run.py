"""Check that no way of running a request changes its answer: the sets of `jswa eval` in each configuration.

    python -m benchmarks.quality.run [--model tiny] [--sets DIR] [--tasks passkey,json] [--limit 25] [--out DIR]

cold           no prefix cache, one request at a time, each prompt in one step
prefix-cached  a second pass over a warm cache
revived        the cache holds the full-attention KV and no local page, so windows are rebuilt by replay
chunked N      no prefix cache, one request at a time, at most N tokens per step
batched        no prefix cache, all requests at once
preempted      many requests at once in memory for two; rows generate beyond their answer, so that memory runs out

The baseline is the cold run. Greedy tokens must equal it item by item, unless the two likeliest tokens of the cold run
are within 1e-3 of each other (a tie; under 0.1 % of all tokens). Log probabilities of texts must agree within 2e-4.
Those of a prompt never come from the cache: in the cached configurations the last tokens of a text are forced, one
request each. A configuration that was never exercised (no hit, no replay, no preemption) is an error. The exit status
is 1 if anything differs. Writes quality.json and quality.md to --out, and quality.png with --plot (needs
matplotlib).
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import result_file
from benchmarks.quality.configurations import AT_ONCE, SMALL_BUDGET, Outcome, cached_and_revived, plain, preempted
from benchmarks.quality.report import markdown, plot
from jswa.commands.evaluate import Row, Scored, questions, summarise
from jswa.commands.task_sets import FOLDER, Item, is_correct, read_sets
from jswa.llm import LLM
from jswa.model.hf.config import parse_config
from jswa.storage.hub import TINY
from jswa.storage.json_object import read_object

MARGIN, TOLERANCE, MOST_TIES = 1e-3, 2e-4, 1e-3  # docs/numerics.md
BUDGET = 512  # tokens per step unless a configuration says otherwise
LONGEST = 2560  # tokens of a prompt and its answer; a cold prompt runs in one step of this size
CHUNKS = (16, 64, 512)
CONFIGURATIONS = ("cold", "prefix-cached", "revived", *(f"chunked {n}" for n in CHUNKS), "batched", "preempted")


def compare(outcome: Outcome, cold: Outcome) -> None:
    """Compare each answer with the cold one; record the first token, or the log probabilities, that differ."""
    for question, found in outcome.answers.items():
        expected = cold.answers[question]
        where = {"task": question.item.task, "line": question.item.line, "distance": question.item.distance}
        if question.item.score == "bits":
            off = np.abs(np.array(found.logprobs) - expected.logprobs[-len(found.logprobs) :])
            outcome.furthest = max(outcome.furthest, float(off.max()))
            if not off.max() <= TOLERANCE:
                outcome.differences.append({**where, "logprob_off_by": float(off.max())})
            continue
        outcome.compared += len(expected.tokens)
        if found.tokens == expected.tokens:
            continue
        pairs = zip(found.tokens, expected.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found.tokens), len(expected.tokens)))
        margin = expected.margins[at] if at < len(expected.margins) else None
        if margin is not None and margin <= MARGIN:
            outcome.ties += 1
        else:
            texts = {"text": found.text, "cold_text": expected.text}
            outcome.differences.append({**where, "token": at, "margin": margin, **texts})


def rows_of(outcome: Outcome) -> list[Row]:
    """Return accuracy by task and distance, and bits per byte of texts that were scored whole."""
    scored = []
    for question, found in outcome.answers.items():
        item = question.item
        if item.score != "bits":
            correct = is_correct(item, question.answer(found.text, found.tokens))
            scored.append(Scored(item, found.text, len(found.tokens), correct, None))
        elif len(found.logprobs) == len(question.ids) - 1:
            scored.append(Scored(item, "", 0, None, -sum(found.logprobs) / float(np.log(2))))
    return summarise(scored)


def bits_per_token(outcome: Outcome, tail: int) -> float | None:
    """Return bits per token over the last `tail` tokens of all texts; None if there are no texts."""
    last = [x for q, found in outcome.answers.items() if q.item.score == "bits" for x in found.logprobs[-tail:]]
    return -float(np.mean(last) / np.log(2)) if last else None


def missing(outcome: Outcome) -> str | None:
    """Return why a configuration was not exercised; None if it was."""
    seen = outcome.evidence
    kind, _, size = outcome.name.partition(" ")
    needs: dict[str, tuple[bool, str]] = {
        "cold": (seen.cached_tokens == seen.chunks == 0 and seen.most_rows == 1, "no cache, no chunks, one row"),
        "prefix-cached": (seen.hits > 0, "hits"),
        "revived": (seen.revivals > 0 and seen.rebuilt_tokens > 0, "windows that were rebuilt"),
        "chunked": (seen.chunks > 0 and seen.most_tokens <= int(size or 0), "prompts that take several steps"),
        "batched": (seen.most_rows > 1, "several rows in a step"),
        "preempted": (seen.preemptions > 0, "preemptions"),
    }
    happened, what = needs[kind]
    return None if happened else f"{outcome.name}: must show {what}: {seen}"


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """Return everything that is wrong, a line each."""
    found = [line for line in map(missing, outcomes) if line is not None]
    for outcome in outcomes:
        found += [f"{outcome.name}: {difference}" for difference in outcome.differences]
        if outcome.ties > MOST_TIES * outcome.compared:
            found.append(f"{outcome.name}: {outcome.ties} ties in {outcome.compared} tokens: must be under 0.1 %")
    return found


def run(
    model: str,
    items: Sequence[Item],
    names: Sequence[str],
    tail: int,
    log: Callable[[str], None],
    longest: int = LONGEST,
) -> tuple[list[Outcome], list[Item]]:
    """Run the cold configuration and the named ones.

    Returns the outcomes and the items that are too long for the model or for `longest`. Raises SystemExit if no item
    fits, or if a text has fewer tokens than `tail` needs.
    """
    outcomes = {name: Outcome(name) for name in CONFIGURATIONS if name in ("cold", *names)}
    alone: dict[str, Any] = {"max_num_seqs": 1, "prefix_cache": False}
    together: dict[str, Any] = {"max_num_seqs": AT_ONCE, "max_num_batched_tokens": BUDGET}

    def done(*finished: str) -> None:
        for outcome in (outcomes[name] for name in finished if name in outcomes):
            compare(outcome, outcomes["cold"])
            log(f"{outcome.name}: {len(outcome.answers)} items, {outcome.evidence.seconds:.1f} s")

    folder = TINY if model == "tiny" else Path(model)
    longest = min(longest, parse_config(read_object(folder / "config.json"), weights=False).max_position)
    with LLM(model, max_num_batched_tokens=longest, max_model_len=longest, **alone) as llm:
        asked, too_long = questions(llm, items)
        if not asked:
            raise SystemExit(f"no item fits {longest} tokens")
        if any(q.item.score == "bits" and len(q.ids) < tail + 2 for q in asked):
            raise SystemExit(f"--tail {tail}: a text has fewer tokens")
        plain(outcomes["cold"], llm, asked, 1, logprobs=2)
    done("cold")
    shuffled = random.Random(0).sample(asked, len(asked))
    for name in [name for name in outcomes if name.startswith("chunked")]:
        with LLM(model, max_num_batched_tokens=int(name.split()[1]), **alone) as llm:
            plain(outcomes[name], llm, asked, 1)
        done(name)
    if "batched" in outcomes:
        with LLM(model, prefix_cache=False, **together) as llm:
            plain(outcomes["batched"], llm, shuffled, len(shuffled))
        done("batched")
    if "prefix-cached" in outcomes or "revived" in outcomes:
        pair = [outcomes.get(name) or Outcome(name) for name in ("prefix-cached", "revived")]
        with LLM(model, **together) as llm:
            cached_and_revived(pair[0], pair[1], llm, asked, tail)
        done("prefix-cached", "revived")
    if "preempted" in outcomes:
        with LLM(model, max_num_seqs=SMALL_BUDGET, max_num_batched_tokens=SMALL_BUDGET) as llm:
            preempted(outcomes["preempted"], llm, asked, outcomes["cold"])
        done("preempted")
    return list(outcomes.values()), too_long


def as_json(outcomes: Sequence[Outcome], tail: int, head: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the result file: header, `head`, and every configuration with its rows."""
    configurations = [
        {
            "name": outcome.name,
            **dataclasses.asdict(outcome.evidence),
            "compared_tokens": outcome.compared,
            "ties": outcome.ties,
            "furthest_logprob": outcome.furthest,
            "differences": outcome.differences,
            "tail_bits_per_token": bits_per_token(outcome, tail),
            "rows": [dataclasses.asdict(row) | {"accuracy": row.accuracy} for row in rows_of(outcome)],
        }
        for outcome in outcomes
    ]
    device = jax.devices()[0].device_kind
    found = {**result_file.about(), **head, "device": device, "tail": tail, "configurations": configurations}
    return dict(result_file.rounded(found))


def main() -> None:
    """Run, print and write; exit with status 1 if a configuration differs from the cold one or was not exercised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder of a checkpoint, or tiny")
    parser.add_argument("--sets", type=Path, default=FOLDER, help="folder of sets; default: the embedded ones")
    parser.add_argument("--tasks", default="", help="names separated by commas; default: all")
    parser.add_argument("--limit", type=int, default=25, help="most items per task and distance")
    parser.add_argument("--only", default=",".join(CONFIGURATIONS), help="configurations to compare with the cold one")
    parser.add_argument("--tail", type=int, default=8, help="last tokens of each text, forced behind cached ones")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most tokens of a prompt and its answer")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"), help="folder to write")
    parser.add_argument("--plot", action="store_true", help="also write quality.png")
    a = parser.parse_args()
    names = [name.strip() for name in a.only.split(",")]
    if unknown := set(names) - set(CONFIGURATIONS):
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: must be among {', '.join(CONFIGURATIONS)}")
    sets = read_sets(a.sets, [name for name in a.tasks.split(",") if name], a.limit)
    items = [item for group in sets.values() for item in group]
    outcomes, too_long = run(a.model, items, names, a.tail, lambda line: print(line, file=sys.stderr), a.longest)
    wrong = problems(outcomes)
    result = as_json(
        outcomes, a.tail, {"model": a.model, "limit": a.limit, "too_long": len(too_long), "problems": wrong}
    )
    result_file.write(a.out / "quality.json", result, header={})
    text = markdown(result)
    (a.out / "quality.md").write_text(text, encoding="utf-8")
    print(text)
    if a.plot:
        plot(result, a.out / "quality.png")
    if wrong:
        print("\n".join(wrong[:50]), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""The configurations of `benchmarks.quality.run`: the same requests alone, from the cache, batched and preempted."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jswa.cache.capacity import peak_slots
from jswa.commands.evaluate import Question, prompt_logprobs
from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import StepPlan
from jswa.running.stepping import PendingStep, StepRunner
from jswa.types import RequestOutput
from tools.divergence import forced, forced_logprob

AT_ONCE = 16
SMALL_BUDGET = 16  # tokens per step of `preempted`: room for larger chunks would keep rows from running out
GROWTH = 32  # tokens that rows of `preempted` generate beyond their answer, and more after long prompts


@dataclass
class Evidence:
    """Counts that show that a configuration was exercised.

    Attributes:
        most_tokens, most_rows: the most tokens and rows in a step.
        chunks: chunks of prompts that ended inside the prompt.
        replayed_tokens: tokens with cached full-attention KV that were computed again.
        hits, revivals: requests that started from cached tokens, and requests that rebuilt a window.
        rebuilt_tokens: the part of replayed_tokens that rebuilt windows; the rest are prompts run from their start.
        preempted_answers: requests that were preempted before they had generated the answer of the cold run.
    """

    steps: int = 0
    most_tokens: int = 0
    most_rows: int = 0
    chunks: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    hits: int = 0
    revivals: int = 0
    rebuilt_tokens: int = 0
    preemptions: int = 0
    preempted_answers: int = 0
    seconds: float = 0.0

    def see_step(self, plan: StepPlan) -> None:
        """Count a step."""
        self.steps += 1
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        self.most_rows = max(self.most_rows, plan.num_rows)
        self.chunks += int((plan.samples == 0).sum())

    def see(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the prefix hits of finished requests. Raises RuntimeError if an output has none recorded."""
        for hit in (output.prefix for output in outputs):
            if hit is None:
                raise RuntimeError("a request ended without a record of what was cached for it")
            self.requests += 1
            self.prompt_tokens += hit.prompt_tokens
            self.cached_tokens += hit.cached_tokens
            self.replayed_tokens += hit.replayed_tokens
            self.hits += hit.cached_tokens > 0
            self.revivals += hit.revived
            self.rebuilt_tokens += hit.replayed_tokens if hit.revived else 0


class Watch:
    """A runner that counts its steps in `evidence`, which may be exchanged."""

    def __init__(self, engine: Engine) -> None:
        self._runner: StepRunner = engine.runner
        self.evidence = Evidence()
        engine.stepping.runner = self

    def launch(self, plan: StepPlan) -> PendingStep:
        """Count the step and launch it."""
        self.evidence.see_step(plan)
        return self._runner.launch(plan)


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to an item: generated tokens, or log probabilities of the last tokens of a text."""

    tokens: list[int]
    text: str
    logprobs: list[float]
    margins: list[float]  # of the two likeliest tokens, per token; cold run only


@dataclass
class Outcome:
    """The result of a configuration: its answers, and how they compare with the cold ones.

    Attributes:
        compared, ties: tokens.
        furthest: largest difference of a log probability.
    """

    name: str
    answers: dict[Question, Answer] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    compared: int = 0
    ties: int = 0
    furthest: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, watch: Watch) -> Iterator[None]:
        """Count the steps and the time inside the context for this configuration."""
        watch.evidence, begin = self.evidence, time.monotonic()
        try:
            yield
        finally:
            watch.evidence = Evidence()
            self.evidence.seconds += time.monotonic() - begin


def ask(llm: LLM, asked: Sequence[Question], at_once: int = 1, **changes: Any) -> list[RequestOutput]:
    """Run requests, `at_once` at a time, with changed sampling parameters. Raises the error of a failed request."""
    outputs: list[RequestOutput] = []
    for first in range(0, len(asked), at_once):
        part = asked[first : first + at_once]
        params = [dataclasses.replace(q.params, **changes) if q.item.score != "bits" else q.params for q in part]
        outputs += llm.generate([{"prompt_token_ids": q.ids} for q in part], params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


def answer_of(question: Question, output: RequestOutput) -> Answer:
    """Return the answer of a finished request."""
    if question.item.score == "bits":
        return Answer([], "", prompt_logprobs(output), [])
    (completion,) = output.outputs
    tables = [sorted((one.logprob for one in table.values()), reverse=True) for table in completion.logprobs or ()]
    return Answer(completion.token_ids, completion.text, [], [table[0] - table[1] for table in tables])


def plain(outcome: Outcome, llm: LLM, asked: Sequence[Question], at_once: int, **changes: Any) -> None:
    """Run all questions, `at_once` at a time."""
    watch = Watch(llm.engine)
    with outcome.timed(watch):
        outputs = ask(llm, asked, at_once, **changes)
    outcome.evidence.see(outputs)
    outcome.answers |= {q: answer_of(q, output) for q, output in zip(asked, outputs, strict=True)}


def cached_and_revived(cached: Outcome, revived: Outcome, llm: LLM, asked: Sequence[Question], tail: int) -> None:
    """Run three passes per group: one fills the cache, one reads it, one reads it after its local pages are dropped."""
    watch = Watch(llm.engine)
    texts = [q for q in asked if q.item.score == "bits"]
    others = [q for q in asked if q.item.score != "bits"]
    for first in range(0, len(others), AT_ONCE):
        group = others[first : first + AT_ONCE]
        llm.flush_cache()
        ask(llm, group, AT_ONCE)
        for outcome in (cached, revived):
            if outcome is revived:
                lose_local_pages(llm.engine)
            with outcome.timed(watch):
                outputs = ask(llm, group, AT_ONCE)
            outcome.evidence.see(outputs)
            outcome.answers |= {q: answer_of(q, output) for q, output in zip(group, outputs, strict=True)}
    for first in range(0, len(texts), AT_ONCE):
        _force(cached, revived, llm, texts[first : first + AT_ONCE], tail, watch)


def _force(cached: Outcome, revived: Outcome, llm: LLM, group: list[Question], tail: int, watch: Watch) -> None:
    """Force the last `tail` tokens of texts; each request reads what the one before it has cached."""
    ids = [q.ids for q in group]
    for outcome in (cached, revived):
        llm.flush_cache()
        found: list[list[float]] = [[] for _ in group]
        llm.generate([{"prompt_token_ids": text[:-tail]} for text in ids], max_tokens=1, temperature=0, use_tqdm=False)
        for back in range(tail, 0, -1):
            if outcome is revived:
                lose_local_pages(llm.engine)
            with outcome.timed(watch):
                outputs = forced(llm, ids, [len(text) - back for text in ids])
            outcome.evidence.see(outputs)
            for row, output in zip(found, outputs, strict=True):
                row.append(forced_logprob(output))
        outcome.answers |= {q: Answer([], "", row, []) for q, row in zip(group, found, strict=True)}


def lose_local_pages(engine: Engine) -> None:
    """Drop all local pages from the cache that no row holds. The full pages stay, and with them every cached text."""
    if engine.layout.full is None:
        raise RuntimeError("windows cannot be rebuilt in a model without full-attention layers")
    engine.scheduler.cache.prefix.retention.drop_windows()


def preempted(outcome: Outcome, llm: LLM, asked: Sequence[Question], cold: Outcome) -> None:
    """Run all questions of a task and distance at once, in memory for two prompts, and generate beyond the answers.

    So the older of two rows runs out of pages while the younger is in its prompt or answer, and preempts it. Tokens
    behind the answer are cut off.
    """
    whole, watch = llm.engine, Watch(llm.engine)
    groups: dict[tuple[str, int | None], list[Question]] = {}
    for question in asked:
        groups.setdefault((question.item.task, question.item.distance), []).append(question)
    for group in groups.values():
        small = llm.with_engine(small_engine(whole, group))
        preemptions = Preemptions(small.engine)
        with outcome.timed(watch):
            outputs = ask(small, [_grown(q) for q in group], len(group), ignore_eos=True)
        outcome.evidence.see(outputs)
        outcome.evidence.preemptions += small.stats().preemptions
        for question, output in zip(group, outputs, strict=True):
            expected = cold.answers[question]
            found = _cut(llm, answer_of(question, output), expected)
            outcome.answers[question] = found
            generated = preemptions.generated.get(output.request_id)
            outcome.evidence.preempted_answers += generated is not None and generated < max(len(expected.tokens), 1)


def small_engine(engine: Engine, group: Sequence[Question]) -> Engine:
    """Return an engine on the programs and arena of another, idle engine, limited to few of its slabs."""
    layout, limits = engine.layout, engine.limits
    prompt = max(len(q.ids) for q in group) + 1
    longest = min(limits.max_model_len, max(_grown(q).length for q in group))
    two = layout.resident_slots(prompt) + peak_slots(layout, limits.max_tokens, prompt)
    slots = max(two, peak_slots(layout, limits.max_tokens, longest))
    slabs = min(limits.num_slabs, 1 + -(-slots // layout.pages_per_slab))
    return Engine(engine.model, dataclasses.replace(limits, num_slabs=slabs), layout, engine.runner)


class Preemptions:
    """A runner that notes how many tokens a request had generated when it was first preempted (`generated`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, engine.runner
        self.generated: dict[str, int] = {}
        engine.stepping.runner = self

    def launch(self, plan: StepPlan) -> PendingStep:
        """Look for requests that were preempted while this step was planned, then launch it."""
        for name, sequence in self._engine.scheduler.sequences.items():
            if sequence.preemptions:
                self.generated.setdefault(name, sequence.num_known - len(sequence.request.prompt))
        return self._runner.launch(plan)


def _grown(question: Question) -> Question:
    """Return the question with so many tokens to generate that a prompt of its length is read meanwhile."""
    if question.item.score == "bits":
        return question
    room = (question.params.max_tokens or 0) + GROWTH + 4 * len(question.ids) // (3 * SMALL_BUDGET)
    return dataclasses.replace(question, params=dataclasses.replace(question.params, max_tokens=room))


def _cut(llm: LLM, found: Answer, expected: Answer) -> Answer:
    """Return the answer cut to the length of the expected one."""
    tokens = found.tokens[: len(expected.tokens)]
    assert llm.tokenizer is not None
    text = expected.text if tokens == expected.tokens else llm.tokenizer.decode(tokens)
    return dataclasses.replace(found, tokens=tokens, text=text)

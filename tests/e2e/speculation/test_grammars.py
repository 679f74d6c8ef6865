"""Requests with structured outputs have drafts, and no token changes: the embedded model with and without drafts."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from jaxtyping import Int

from jswa.llm import LLM
from jswa.plan import StepPlan
from jswa.sched.drafts.choice import DraftChoice
from jswa.sched.requests import Requests
from jswa.types import CompletionOutput, SamplingParams, StructuredOutputsParams
from tests.support import oracles
from tests.support.drafts.drawn import Drawn
from tests.support.late import programs_compiled_when_run
from tests.support.nights import sample

RECORDS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "kind_of_animal": {"enum": ["cat", "dog"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "kind_of_animal", "age"],
        "additionalProperties": False,
    },
}
# Texts that are forced for long, that end within drafts, that may end or go on, and that repeat themselves.
FORMS: list[dict[str, Any] | None] = [
    {"json": RECORDS},
    {"json": RECORDS, "disable_any_whitespace": True},
    {"choice": ["yes it is, yes it is, yes it is", "yes it is, yes it is not"]},
    {"regex": r"(the dog (came|went) (back|home)\. ){2,5}"},
    {"regex": "[a-c ]+"},
    None,
]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "min_tokens": 12},
    {"temperature": 0.8, "bad_words": ["dog came", "c", "the dog came back. the dog came home."]},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.8, "repetition_penalty": 1.1, "stop": ["e"]},
]


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    """Two engines of one model: the second drafts."""
    drafts = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    shape: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with (
        oracles.quick_compiles(),
        programs_compiled_when_run(),
        LLM("tiny", **shape) as plain,
        LLM("tiny", **shape, speculative_config=drafts) as drafting,
    ):
        for llm in (plain, drafting):
            llm.engine.prepare(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), logprobs=1))
        yield plain, drafting


def answers(llm: LLM, forms: list[dict[str, Any] | None], seed: int, *, preempt: bool) -> list[CompletionOutput]:
    """Return a text of each form in each other way, asked side by side; the lengths of drafts are drawn."""
    chance, engine = random.Random(seed), llm.engine
    engine.scheduler.drafting.choice = Drawn(chance, engine.limits.max_rows)
    asked = [
        SamplingParams(
            seed=3, max_tokens=40, structured_outputs=None if form is None else StructuredOutputsParams(**form), **other
        )
        for form in forms
        for other in OTHERS
    ]
    plan = engine.scheduler.plan

    def preempting() -> StepPlan | None:
        running = engine.scheduler.running
        if preempt and running and chance.random() < 0.05:
            engine.scheduler.preempt(chance.choice(running).request.request_id)
        engine.check()
        return plan()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "plan", preempting)
        return [output.outputs[0] for output in llm.generate(["The dog"] * len(asked), asked, use_tqdm=False)]


def said(texts: list[CompletionOutput]) -> list[tuple[list[int], str | None]]:
    """The tokens and the end of each text."""
    return [(list(text.token_ids), text.finish_reason) for text in texts]


@pytest.mark.parametrize("way", sample(["undisturbed", "preempted"], 4))
def test_tokens_are_the_same_with_drafts(llms: tuple[LLM, LLM], way: str) -> None:
    """Drafts go across ends of texts, forced tokens, and tokens that a grammar forbids; many of them are right."""
    plain, drafting = llms
    expected = said(answers(plain, FORMS, 1, preempt=False))
    right = [0] * len(FORMS)
    for turn in range(2):  # the second time the texts of the first are looked up
        found = answers(drafting, FORMS, turn, preempt=way == "preempted")
        assert said(found) == expected
        for number, text in enumerate(found):
            right[number // len(OTHERS)] += 0 if text.drafts is None else text.drafts.accepted
    assert min(right) > 0, f"a form has no right drafts: {right}"


def test_forced_tokens_take_no_step_beside_drafts(llms: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step for each of them the texts are the same, and there are more steps."""
    _, drafting = llms
    counted = []
    for way in ("foretold", "not"):
        if way == "not":
            monkeypatch.setattr(Requests, "foretell", lambda self, sequence: [])
        drafting.flush_cache()
        before = drafting.engine.step_stats().steps
        texts = said(answers(drafting, FORMS[:3], 7, preempt=False))
        counted.append((texts, drafting.engine.step_stats().steps - before))
    (texts, steps), (others, more) = counted
    assert texts == others
    assert steps < more


class Fixed(DraftChoice):
    """Runs a fixed number of drafts in every step, and counts the steps that they have saved."""

    def __init__(self, number: int) -> None:
        super().__init__(4, watched=True)
        self.last, self.saved = number, 0

    def kept(self, rows: int) -> None:
        """No choice holds."""

    def best(
        self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: tuple[int, ...], *, beside_prompts: bool = False
    ) -> int:
        """Return the number, for a step that runs prompts."""
        return self.last

    def choose(self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: Callable[[], tuple[int, ...]]) -> int:
        """Return the number."""
        return self.last

    def note(
        self, row_ids: Int[np.ndarray, " R"], drafted: Int[np.ndarray, " R"], right: Int[np.ndarray, " R"]
    ) -> None:
        """Count what a row's right drafts are worth."""
        self.saved += int(right.sum())


@pytest.mark.parametrize("seed", range(3))
def test_right_drafts_count_as_often_as_they_save_a_step(llms: tuple[LLM, LLM], seed: int) -> None:
    """Most drafts are tokens that the grammar forces: without drafts, too, these take hardly a step."""
    _, drafting = llms
    form = StructuredOutputsParams(json={**RECORDS, "minItems": 7, "maxItems": 8}, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=220, temperature=0.8, seed=seed, structured_outputs=form)
    steps = []
    for choice in (Fixed(0), Fixed(3)):
        drafting.engine.scheduler.drafting.choice = choice
        before = drafting.engine.step_stats().steps
        (answer,) = drafting.generate("A list:", params, use_tqdm=False)
        steps.append(drafting.engine.step_stats().steps - before)
    drafts = answer.outputs[0].drafts
    assert drafts is not None
    assert drafts.accepted > 2 * choice.saved > 0
    assert abs(steps[0] - steps[1] - choice.saved) <= 2

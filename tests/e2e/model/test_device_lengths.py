"""Steps that take the lengths of their rows from the device (`DeviceState.length`) instead of the plan."""

from dataclasses import replace

import numpy as np
import pytest

from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.plan import FROM_DEVICE, StepPlan
from jswa.speculation import Speculation
from jswa.types import SamplingParams
from tests.support.oracles import small_engine_parts

PROMPTS = [np.arange(length, dtype=np.int32) % 50 for length in (5, 19, 33)]


class Lengths:
    """Replaces the starts of rows in plans, and counts them."""

    def __init__(self) -> None:
        self.replaced = 0

    def __call__(self, plan: StepPlan) -> None:
        """Take the starts from the device wherever the first token comes from there."""
        first = plan.tokens[np.cumsum(plan.counts) - plan.counts]
        plan.starts[first == FROM_DEVICE] = FROM_DEVICE
        self.replaced += int(np.count_nonzero(first == FROM_DEVICE))


def generate(lengths: Lengths | None, bad_words: tuple[tuple[int, ...], ...]) -> dict[str, list[int | None]]:
    """Return the tokens of all prompts, sampled together with keys of their own."""
    model, params, layout, limits, runner = small_engine_parts()
    if lengths is not None:  # programs without speculation know all starts
        limits = replace(limits, speculation=Speculation("ngram", 1).of_length(limits.max_model_len))
        runner = Runner(model, params, layout, limits)
    engine = Engine(model, limits, layout, runner)
    engine.stepping.before_launch = lengths
    said: dict[str, list[int | None]] = {}
    for number, prompt in enumerate(PROMPTS):
        asked = SamplingParams(temperature=1.0, seed=number, max_tokens=20, ignore_eos=True)
        engine.add(engine.request(f"{number}", prompt, asked, bad_words=bad_words if number else ()))
    while engine.has_work():
        for event in engine.step():
            said.setdefault(event.request_id, []).append(event.token)
    engine.check()
    return said


@pytest.mark.parametrize(
    "bad_words",
    [
        pytest.param((), id="whole steps"),
        pytest.param(((3, 4), (7,) * 9), id="steps in two halves", marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_the_same_wherever_the_lengths_come_from(bad_words: tuple[tuple[int, ...], ...]) -> None:
    """Draws depend on positions; so do rotary embeddings, pages and windows."""
    lengths = Lengths()
    expected = generate(None, bad_words)
    assert generate(lengths, bad_words) == expected
    assert lengths.replaced > 30
    assert {name: len(tokens) for name, tokens in expected.items()} == {"0": 20, "1": 20, "2": 20}

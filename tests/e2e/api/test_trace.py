"""The debug switches on `tiny`: plans are written and replayed, and checks or waiting change no token."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jswa.commands.trace import replay
from jswa.errors import CheckpointError
from jswa.llm import LLM
from jswa.plan import RowMask, StepPlan
from jswa.plan.trace import read
from jswa.storage.hub import TINY
from jswa.types import SamplingParams
from tests.support.nights import sample
from tests.support.oracles import quick_compiles

# deterministic: tokens that do not depend on how prompts are cut into chunks; as XLA adds, one program to compile.
OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "kernels": "sampling=xla",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_memory_bytes": 2**20,
}
PROMPTS = ["Once upon a time there was a little cat that sat", "The dog", "One day the sun was"]
# Greedy; sampled; and with penalties, biases, prompt log probabilities and masks from the host.
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, logprobs=3),
    SamplingParams(
        temperature=0.7,
        seed=7,
        max_tokens=20,
        min_tokens=9,
        repetition_penalty=1.3,
        logit_bias={101: -2.5},
        bad_words=["ing", "so many tokens that the host must forbid the last of them"],
        prompt_logprobs=1,
    ),
]


@pytest.fixture(autouse=True)
def compile_quickly() -> Iterator[None]:
    """Compile with few optimizations: the programs are small and run only a few steps."""
    with quick_compiles():
        yield


def generate(llm: LLM) -> list[list[int]]:
    """Run all prompts together and return their tokens."""
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLING, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    """An engine without switches."""
    with quick_compiles(), LLM("tiny", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    """Its tokens."""
    with quick_compiles():
        return generate(plain)


def assert_equal_plans(found: StepPlan, expected: StepPlan) -> None:
    """Compare two plans field by field, including types."""
    for field in dataclasses.fields(StepPlan):
        first, second = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(second, np.ndarray):
            assert (first.dtype, first.shape) == (second.dtype, second.shape), field.name
            np.testing.assert_array_equal(first, second, err_msg=field.name)
        elif field.name in ("logits_state", "masks", "table_rows"):
            for one, other in zip(first, second, strict=True):
                assert_equal_tuples(one, other, field.name)
        else:
            assert first == second, field.name


def assert_equal_tuples(found: Any, expected: Any, where: str) -> None:
    """Compare two named tuples field by field, including types, and those in them."""
    for name, value in expected._asdict().items():
        other = getattr(found, name)
        assert type(other) is type(value), f"{where}.{name}"
        if hasattr(value, "_asdict"):
            assert_equal_tuples(other, value, f"{where}.{name}")
        else:
            np.testing.assert_array_equal(other, value, err_msg=f"{where}.{name}")


def test_a_trace_has_every_plan_and_replays_to_the_same_tokens(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSWA_DUMP_PLANS writes the runner's plans bit for bit; the file is complete once the LLM is closed."""
    path = tmp_path / "plans"
    monkeypatch.setenv("JSWA_DUMP_PLANS", str(path))
    launched: list[StepPlan] = []
    late: list[StepPlan] = []
    with LLM("tiny", **OPTIONS) as llm:
        launch = llm.engine.runner.launch

        def keep(plan: StepPlan) -> Any:
            launched.append(dataclasses.replace(plan, late=()))
            step = launch(plan)
            if plan.late:
                finish = step.finish

                def keep_masks(masks: tuple[RowMask, ...]) -> None:
                    launched[-1] = dataclasses.replace(launched[-1], masks=(*plan.masks, *masks))
                    late.append(plan)
                    finish(masks)

                monkeypatch.setattr(step, "finish", keep_masks)
            return step

        monkeypatch.setattr(llm.engine.runner, "launch", keep)
        assert generate(llm) == expected
    del llm
    monkeypatch.delenv("JSWA_DUMP_PLANS")

    header, steps = read(path)
    assert header["model"] == str(TINY)
    assert {name: header["options"][name] for name in OPTIONS} == OPTIONS
    found = list(steps)
    assert len(found) == len(launched) > 20
    for (plan, tokens), original in zip(found, launched, strict=True):
        assert_equal_plans(plan, original)
        assert len(tokens) == plan.num_rows
    assert any(len(entry.bias) and len(entry.prompt) for plan in launched for entry in plan.logits_state)
    assert any(plan.masks for plan in launched)
    assert late, "the masks of long bad words come late, and a trace has them with their plan"
    assert {plan.variant for plan in launched} == {"none", "logprobs", "prompt_logprobs"}

    # One token is changed: `replay` must count it, and no other.
    lines = path.read_text().splitlines()
    last = next(i for i, (plan, _) in reversed(list(enumerate(found))) if plan.samples.all())
    step = json.loads(lines[1 + last])
    step["tokens"][0] += 1
    lines[1 + last] = json.dumps(step)
    path.write_text("\n".join(lines))
    assert replay(path) == 1


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    """The error names the file, whatever it contains."""
    for number, content in enumerate(
        ["", "no trace", '{}\n{"plan": {}}', '{}\n{"plan": {"logits_state": [], "a": 1}}', "[]\n3"]
    ):
        path = tmp_path / str(number)
        path.write_text(content)
        with pytest.raises(CheckpointError, match=f"{path} is not a trace of plans"):
            read(path)


@pytest.mark.parametrize("variable", sample(["JSWA_CHECK", "JSWA_NO_OVERLAP"], 2))
def test_checks_and_waiting_change_no_token(
    variable: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSWA_CHECK asserts the invariants after every step; JSWA_NO_OVERLAP waits for each step."""
    monkeypatch.setenv(variable, "1")
    with LLM("tiny", **OPTIONS) as llm:
        assert generate(llm) == expected
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0)


def test_deterministic_steps_give_the_same_bits_alone_and_in_a_batch(plain: LLM) -> None:
    """Tokens and log probabilities depend neither on other requests nor on how prompts are cut into chunks."""
    params = [dataclasses.replace(sampling, logprobs=2) for sampling in SAMPLING]

    def run(order: list[int]) -> dict[int, tuple[list[int], Any, Any]]:
        outputs = plain.generate([PROMPTS[i] for i in order], [params[i] for i in order], use_tqdm=False)
        return {
            i: (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
            for i, output in zip(order, outputs, strict=True)
        }

    alone = {i: run([i])[i] for i in range(len(PROMPTS))}
    assert all(logprobs for _, logprobs, _ in alone.values())
    for order in ([0, 1, 2], [2, 1, 0], [1, 0]):
        assert run(order) == {i: alone[i] for i in order}

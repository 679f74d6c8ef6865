"""An engine without a rib works, and refuses what the rib served."""

import re
from pathlib import Path

import pytest

from jswa.plan import PLAIN
from jswa.ribs.rib import NO_NEEDS, Needs
from jswa.ribs.table import RIBS, VARIANTS, needs_of
from jswa.ribs.traced import HOOKS
from jswa.types import SamplingParams
from tests.support.ribs import ROOT, run, without

# The rooms that a step passes through. The values that clients see (`jswa.plan.events`, `jswa.types`) are the API's.
CORE = ("sched", "exec", "running", "cache", "engine.py", "plan/step.py", "frontend/late_programs.py")
SCRIPT = """
from jswa import LLM, RequestError
from jswa.ribs.table import RIBS
from tests.support.tiny import ONE_SHAPE
llm = LLM("tiny", **ONE_SHAPE)
(output,) = llm.generate("Once upon a time", max_tokens=12, temperature=0, use_tqdm=False)
print([rib.name for rib in RIBS])
print(repr(output.outputs[0].text))
for asked in ({"logprobs": 1}, {"prompt_logprobs": 0}):
    try:
        llm.generate("a", max_tokens=1, use_tqdm=False, **asked)
    except RequestError as error:
        print(error)
llm.engine.check()
"""


def test_only_one_rib_has_variants_and_each_variant_has_hooks() -> None:
    assert sum(bool(rib.variants) for rib in RIBS) <= 1
    assert set(HOOKS) == set(VARIANTS) - {PLAIN}
    halves = {half for own in VARIANTS.values() for half in (own.forward, own.finish)}
    assert halves <= set(VARIANTS)


def test_a_request_needs_what_its_parameters_ask_for() -> None:
    assert needs_of(SamplingParams()) is NO_NEEDS
    text = Needs(frozenset({"logprobs"}), watched=True, sampled=True)
    assert needs_of(SamplingParams(logprobs=0)) == text
    prompt = needs_of(SamplingParams(prompt_logprobs=3))
    assert prompt == Needs(frozenset({"prompt_logprobs"}), watched=True, recompute="prompt logprobs")
    both = needs_of(SamplingParams(logprobs=1, prompt_logprobs=3))
    assert both == prompt._replace(variants=text.variants | prompt.variants, sampled=True)


@pytest.mark.parametrize("rib", [rib.name for rib in RIBS])
def test_an_engine_without_a_rib_generates_and_refuses(rib: str, tmp_path: Path) -> None:
    found = run(without(rib, tmp_path), "-c", SCRIPT)
    assert found.returncode == 0, found.stderr
    names, text, *refusals = found.stdout.splitlines()
    assert names == "[]"
    assert refusals == [
        f"{field} = {value}: must be None: this engine was built without it"
        for field, value in (("logprobs", 1), ("prompt_logprobs", 0))
    ]
    assert run(ROOT, "-c", SCRIPT).stdout.splitlines()[:2] == [f"['{rib}']", text]


def test_no_room_of_a_step_names_a_rib() -> None:
    """But for the sampling kernels of a GPU, which return log probabilities beside the draw."""
    rooms = [ROOT / "jswa" / room for room in CORE]
    files = [file for room in rooms for file in ([room] if room.is_file() else sorted(room.rglob("*.py")))]
    naming = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        if file.name != "kernels.py"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"log_?prob|log probabilit", line, re.IGNORECASE)
    ]
    assert not naming

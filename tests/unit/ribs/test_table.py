"""An engine without a rib works, and refuses what the rib served."""

import itertools
import re
from pathlib import Path

import pytest

from jswa.plan import PLAIN
from jswa.ribs.rib import NO_NEEDS, Needs, Variant
from jswa.ribs.table import RIBS, VARIANTS, WIDEST, joined_name, needs_of
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
for asked in ({"logprobs": 1}, {"prompt_logprobs": 0}, {"pooling": "last"}, {"return_sampling_mask": True}):
    try:
        llm.generate("a", max_tokens=1, top_k=2, use_tqdm=False, **asked)
    except RequestError as error:
        print(error)
llm.engine.check()
"""


def test_each_variant_has_hooks_and_those_of_two_ribs_have_both() -> None:
    """Log probabilities of a prompt and of text, sampling masks, a prompt that is pooled; and several in one step."""
    assert set(HOOKS) == set(VARIANTS) - {PLAIN}
    halves = {half for own in VARIANTS.values() for half in (own.forward, own.finish)}
    assert halves <= set(VARIANTS)
    names = [(PLAIN, *rib.variants) for rib in RIBS]
    assert set(VARIANTS) == {joined_name(*one) for one in itertools.product(*names)}
    both = joined_name("prompt_logprobs", "pooling")
    assert VARIANTS[both] == Variant(both, "logprobs", every=True, asked=True)
    assert VARIANTS["images"] == Variant("images", embeds=True, asked=True)
    assert VARIANTS["logprobs+images"] == Variant("images", "logprobs", embeds=True, asked=True)
    assert set(HOOKS[both].forwarded) == {"logprobs", "pooling"}
    assert HOOKS[both].drawn == HOOKS["logprobs"].drawn
    assert set(HOOKS["logprobs+sampling_mask"].drawn) == {"logprobs", "sampling_mask"}
    assert HOOKS["logprobs+sampling_mask"].top == HOOKS["logprobs"].top
    assert set(HOOKS[joined_name("logprobs", "pooling")].forwarded) == {"pooling"}
    assert not HOOKS["pooling"].drawn
    assert WIDEST == "prompt_logprobs", "an engine measures no program that it compiles only when asked"


def test_a_request_needs_what_its_parameters_ask_for() -> None:
    assert needs_of(SamplingParams()) is NO_NEEDS
    text = Needs(frozenset({"logprobs"}), watched=True, sampled=True)
    assert needs_of(SamplingParams(logprobs=0)) == text
    prompt = needs_of(SamplingParams(prompt_logprobs=3))
    assert prompt == Needs(frozenset({"prompt_logprobs"}), watched=True, recompute="prompt logprobs")
    both = needs_of(SamplingParams(logprobs=1, prompt_logprobs=3))
    assert both == prompt._replace(variants=text.variants | prompt.variants, sampled=True)
    pooled = Needs(frozenset({"pooling"}), watched=True)
    assert needs_of(SamplingParams(pooling="last", max_tokens=1)) == pooled
    assert needs_of(SamplingParams(pooling="mean", max_tokens=1)) == pooled._replace(recompute="mean pooling")
    seeing = needs_of(SamplingParams(logprobs=0), images=True)
    assert seeing == text._replace(variants=text.variants | {"images"})


@pytest.fixture(scope="module")
def whole() -> list[str]:
    """What an engine with all ribs prints: their names, and a text."""
    return run(ROOT, "-c", SCRIPT).stdout.splitlines()[:2]


@pytest.mark.parametrize("rib", [rib.name for rib in RIBS])
def test_an_engine_without_a_rib_generates_and_refuses(rib: str, whole: list[str], tmp_path: Path) -> None:
    found = run(without(rib, tmp_path), "-c", SCRIPT)
    assert found.returncode == 0, found.stderr
    names, text, *refusals = found.stdout.splitlines()
    own = next(one for one in RIBS if one.name == rib)
    assert names == str([one.name for one in RIBS if one is not own])
    assert refusals == [
        f"{field} = {value!r}: must be {off}: this engine was built without it"
        for field, value, off in (
            ("logprobs", 1, None),
            ("prompt_logprobs", 0, None),
            ("pooling", "last", None),
            ("return_sampling_mask", True, False),
        )
        if field in own.fields
    ]
    assert whole == [str([one.name for one in RIBS]), text]


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

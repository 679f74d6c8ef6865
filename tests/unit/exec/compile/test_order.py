"""Which programs an engine compiles at start, and in which order the others follow."""

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.compile.steps import StepPrograms
from jswa.exec.programs.state import state_shapes
from jswa.kernels import Kernels
from jswa.model.binding import param_shapes
from jswa.ribs.table import VARIANTS
from jswa.speculation import Speculation
from tests.support.builders import make_plan
from tests.support.oracles import small_model


def programs_of(*, drafts: bool = False, one_bucket: bool = False) -> StepPrograms:
    model, kind = small_model("F", d_model=16), jnp.dtype("float32")
    layout, drafting = KVLayout.of(model, 4), Speculation("ngram", 3).of_length(512) if drafts else None
    limits = Limits(512, 64, 512, page_size=4, num_slabs=9, speculation=drafting, one_bucket=one_bucket)
    state = state_shapes(layout, limits, model.vocab_size, kind)
    table = bucket_table(limits, on_gpu=True)
    params = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in param_shapes(model, kind).items()}
    return StepPrograms(model, layout, limits, table, Kernels(), params, state, None)


def sizes_of(programs: StepPrograms, numbers: list[int]) -> list[tuple[str, str, int, bool]]:
    found = [programs.configs[number] for number in numbers]
    return [(config.part, config.variant, config.bucket.tokens, config.bucket.decode) for config in found]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_gpu_begins_with_three_programs(drafts: bool) -> None:
    """The largest two hold every plan, and the smallest decode step is for few requests. Drafts come when wanted."""
    programs = programs_of(drafts=drafts)
    begin = sizes_of(programs, programs.first(all_at_start=False, on_gpu=True))
    assert sorted(begin) == [("step", "none", 8, True), ("step", "none", 64, True), ("step", "none", 512, False)]


def test_the_others_follow_the_most_useful_first() -> None:
    """A size between those that are there, then the fewest of the families that calls need, then all sizes."""
    programs = programs_of()
    begin = programs.first(all_at_start=False, on_gpu=True)
    later = sizes_of(programs, programs.later)
    plain = {b.tokens: b.decode for b in programs.buckets}
    assert [size[:2] for size in later[:2]] == [("step", "none")] * 2
    assert {later[0][3], later[1][3]} == {True, False}
    assert all(8 < size < 512 for _, _, size, _ in later[:2])
    early = {("step", "logprobs"), ("finish", "none"), ("finish", "logprobs"), ("forward", "none")}
    assert {size[:2] for size in later[2:8]} == early
    assert {size[2] for size in later[2:8]} == {64, 512}
    assert not any(VARIANTS[size[1]].asked for size in later)
    assert len({*programs.later, *begin}) == len(programs.later) + len(begin)
    whole = [size for size in [*later, *sizes_of(programs, begin)] if size[:2] == ("step", "none")]
    assert len(whole) == len(programs.buckets) >= len(plain)
    assert [size[:2] for size in later[-4:]] == [("step", "prompt_logprobs")] * 2 + [("forward", "prompt_logprobs")] * 2


def test_a_cpu_begins_with_the_two_largest() -> None:
    programs = programs_of()
    assert len(programs.first(all_at_start=False, on_gpu=False)) == 2
    assert not programs.later


def test_all_at_start_are_all_sizes_and_on_a_gpu_the_largest_of_every_family() -> None:
    assert len(programs_of().first(all_at_start=True, on_gpu=False)) == len(programs_of().buckets)
    numbers = programs_of().first(all_at_start=True, on_gpu=True)
    assert len(numbers) == len(set(numbers)) == len(programs_of().buckets) + 10


def test_one_batch_shape_begins_with_its_halves() -> None:
    """A deterministic engine of one bucket runs all steps in them."""
    programs = programs_of(one_bucket=True)
    begin = programs.first(all_at_start=False, on_gpu=True)
    assert {size[:2] for size in sizes_of(programs, begin)} == {("forward", "none"), ("finish", "none")}


@pytest.mark.parametrize("variant", [name for name, own in VARIANTS.items() if not own.every])
@pytest.mark.parametrize("tokens", [0, 100])
def test_drafts_of_every_variant_have_programs(variant: str, tokens: int) -> None:
    """Of decode steps and of steps with prompts, whole and in halves: what a step would run in is wanted."""
    programs = programs_of(drafts=True)
    first = VARIANTS[variant].finish if not tokens else variant
    assert programs.lengths(4, tokens=tokens, split=True, variant=first) == ()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_what_follows_unasked_rests_while_steps_run(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """After the first program. Four plans in a size that is not there end the rest, and get it next."""
    programs, plan = programs_of(), make_plan(np.arange(20), 0, [1] * 20)
    begin = programs.first(all_at_start=False, on_gpu=True)
    order, waits = list[int](), list[tuple[float | None, bool]]()

    def compile_one(number: int) -> None:
        order.append(number)
        for _ in range(steps if len(order) == len(begin) + 1 else 0):
            programs.choose(plan)

    def wait(seconds: float | None) -> bool:
        waits.append((seconds, programs.news.is_set()))
        if len(waits) == 2:
            programs.end()
        return waits[-1][1]

    monkeypatch.setattr(programs, "compile", compile_one)
    monkeypatch.setattr(programs.news, "wait", wait)
    for number in begin:
        programs.compile_once(number)
    programs.compile_wanted()
    (rest, news), (second, _) = waits
    assert rest is not None
    assert (rest > 0, news, second) == (steps > 0, steps == 4, 0)
    size = pick_bucket(programs.buckets, plan)
    found = [programs.configs[number].bucket == size for number in order[len(begin) :]]
    assert found == [False, steps == 4]

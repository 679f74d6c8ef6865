"""Turns of tenants: rows, tokens of a step, and the queue (jswa/sched/fair_queue.py)."""

from collections import Counter

import pytest

from jswa.config import Limits
from jswa.sched.admission.checks import match_of
from jswa.sched.batch import Batch
from jswa.sched.fair_queue import FairQueue, Use
from jswa.sched.requests import Requests
from jswa.sched.sequence import Sequence, Status
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

HYBRID = make_layout(4, 6, num_full=1, num_local=2)
MODEL = TextModel(1000)


def make_loop(*, slabs: int = 400, rows: int = 4, tokens: int = 16, length: int = 400) -> Loop:
    """Return a loop on an arena of `slabs` usable slabs."""
    return Loop(HYBRID, Limits(length, rows, tokens, 4, num_slabs=1 + slabs), MODEL)


def add(
    loop: Loop, tenant: str, count: int, *, prompt: int = 5, new: int = 300, weight: float = 1.0, start: int = 0
) -> list[str]:
    """Queue requests of a tenant with different prompts; return their names."""
    names = [f"{tenant}-{start + i}" for i in range(count)]
    for i, name in enumerate(names):
        tokens = [(start + i) * 7 % 900, *range(prompt - 1)]
        loop.scheduler.add(make_request(name, tokens, length=prompt + new, tenant=tenant, weight=weight))
    return names


def step(loop: Loop, count: int) -> Counter[str]:
    """Run steps; return the tokens of each tenant."""
    found: Counter[str] = Counter()
    for _ in range(count):
        found.update(event.request_id.partition("-")[0] for event in loop.step())
        loop.scheduler.check()
    return found


def rows(loop: Loop) -> Counter[str]:
    """Count the rows of each tenant."""
    return Counter(s.request.options.tenant for s in loop.scheduler.running)


def test_a_tenant_gets_its_share_of_the_rows_at_once() -> None:
    """Long generations of another one hold all rows: the youngest of them wait again, and go on later."""
    loop = make_loop()
    add(loop, "hog", 8)
    step(loop, 6)
    assert rows(loop) == {"hog": 4}
    held = [s.request.request_id for s in loop.scheduler.running]
    add(loop, "quiet", 3)
    step(loop, 2)
    assert rows(loop) == {"hog": 2, "quiet": 2}
    assert [s.request.request_id for s in loop.scheduler.running if s.request.options.tenant == "hog"] == held[:2]
    assert step(loop, 2)["quiet"] >= 2, "both have their first token four steps after they came"
    assert loop.scheduler.preemptions == 2
    step(loop, 50)
    assert loop.scheduler.preemptions == 2, "nobody takes a row back"


def test_a_preempted_row_loses_little() -> None:
    loop = make_loop()
    names = add(loop, "hog", 4)
    step(loop, 40)
    (quiet,) = add(loop, "quiet", 1, new=2)
    step(loop, 6)
    assert quiet not in loop.scheduler.sequences
    youngest = loop.scheduler.sequences[names[-1]]
    assert (youngest.status, youngest.preemptions) == (Status.RUNNING, 1)
    assert youngest.launched > 40, "what it had computed was in the prefix cache"


def test_rows_do_not_change_hands_between_equals() -> None:
    """More tenants than rows: one that has none takes none from another that has one."""
    loop = make_loop(rows=2)
    for tenant in "abcd":
        add(loop, tenant, 3)
    step(loop, 40)
    before = loop.scheduler.preemptions
    step(loop, 60)
    assert loop.scheduler.preemptions == before <= 1
    assert max(rows(loop).values()) == 1


def test_rows_are_shared_by_weight() -> None:
    loop = make_loop(rows=8, tokens=32)
    add(loop, "hog", 12)
    step(loop, 5)
    add(loop, "light", 12, weight=1.0)
    add(loop, "heavy", 12, weight=2.0)
    step(loop, 40)
    assert rows(loop) == {"hog": 2, "light": 2, "heavy": 4}


def test_a_tenant_gets_its_share_of_memory() -> None:
    """Two rows hold all pages: a prompt that fits the other half of the arena does not wait for their end."""
    loop = make_loop(slabs=60, rows=8, tokens=64)
    add(loop, "hog", 8, prompt=30, new=60)
    step(loop, 30)
    before = rows(loop)["hog"]
    assert before < 8
    assert loop.scheduler.stats().waiting
    (name,) = add(loop, "quiet", 1, prompt=30, new=5)
    step(loop, 1)
    assert loop.scheduler.sequences[name].status is Status.RUNNING
    while loop.scheduler.has_work():
        step(loop, 1)


def test_a_short_prompt_goes_before_the_rest_of_long_ones_of_another_tenant() -> None:
    loop = make_loop(length=2000, slabs=4000)
    add(loop, "hog", 4, prompt=800, new=2)
    step(loop, 10)
    (name,) = add(loop, "quiet", 1, prompt=10, new=2)
    loop.step()
    assert loop.scheduler.sequences[name].launched == 10


def test_tokens_of_prompts_are_shared() -> None:
    """Both always have more prompts than fit a step; one is ahead by a few steps at most."""
    loop = make_loop(rows=64, tokens=64, length=100, slabs=4000)
    add(loop, "a", 200, prompt=60, new=1)
    add(loop, "b", 600, prompt=20, new=1)
    for _ in range(4):
        found = step(loop, 40)
        assert abs(60 * found["a"] - 20 * found["b"]) <= 8 * 64 + 120


def test_idleness_earns_no_credit() -> None:
    loop = make_loop(rows=64, tokens=64, length=100, slabs=4000)
    add(loop, "a", 200, prompt=60, new=1)
    add(loop, "b", 1, prompt=20, new=1)
    step(loop, 100)
    add(loop, "b", 100, prompt=60, new=1, start=1)
    found = step(loop, 80)
    assert abs(60 * found["a"] - 60 * found["b"]) <= 12 * 64, "more than the tenants may be ahead at any time"


def test_a_tenant_that_waits_for_its_own_prefix_holds_up_no_other() -> None:
    loop = make_loop(length=2000, slabs=4000)
    prompt = list(range(600))
    for i in range(2):
        loop.scheduler.add(make_request(f"hog-{i}", [*prompt, i], length=700, tenant="hog"))
    step(loop, 3)
    (name,) = add(loop, "quiet", 1, new=2)
    step(loop, 3)
    assert name not in loop.scheduler.sequences or loop.scheduler.sequences[name].num_known > 5


def test_priority_comes_before_turns() -> None:
    """A request that steps back takes no row from one that does not."""
    loop = make_loop()
    add(loop, "hog", 6)
    step(loop, 5)
    loop.scheduler.add(make_request("quiet-0", [1, 2, 3], length=20, tenant="quiet", priority=1))
    step(loop, 5)
    assert rows(loop) == {"hog": 4}


def test_steps_are_short_while_a_flood_has_company() -> None:
    """A tenant whose prompts fill many steps leaves three quarters of each to those that come; alone it has all."""
    loop = make_loop(rows=64, tokens=64, length=400, slabs=4000)
    add(loop, "hog", 100, prompt=50, new=1)
    step(loop, 2)
    assert loop.pending is not None
    assert loop.pending.plan.num_tokens == 64
    add(loop, "quiet", 1, prompt=5, new=30)
    step(loop, 3)
    assert loop.pending.plan.num_tokens == 16
    add(loop, "quiet", 1, prompt=60, new=1, start=1)
    step(loop, 1)
    assert loop.pending.plan.num_tokens > 60


def crowd() -> tuple[Loop, str]:
    """Return a loop where "big" waits for three quarters of the arena, of which "quiet" holds 44 %, and big's name.

    "quiet" has had more tokens beside a third tenant: the turn of "big" is first.
    """
    layout = make_layout(4, None, num_full=1, num_local=0)
    loop = Loop(layout, Limits(1_000, 8, 16, 4, num_slabs=101), MODEL)
    add(loop, "quiet", 1, prompt=24, new=75)
    add(loop, "quiet", 1, prompt=24, new=95, start=1)
    add(loop, "third", 1, prompt=2, new=60)
    step(loop, 66)
    assert rows(loop) == {"quiet": 2}
    (name,) = add(loop, "big", 1, prompt=300, new=2)
    step(loop, 1)
    assert loop.scheduler.sequences[name].status is Status.WAITING
    return loop, name


def begun(loop: Loop, name: str) -> bool:
    """Return whether a request runs, or has run."""
    return name not in loop.scheduler.sequences or loop.scheduler.sequences[name].status is Status.RUNNING


def test_a_sequence_that_wants_more_memory_than_its_share_holds_up_no_other_tenant() -> None:
    """Prompts of another tenant that stay within its half begin meanwhile; those that do not, wait behind it."""
    loop, big = crowd()
    (large,) = add(loop, "quiet", 1, prompt=60, new=2, start=8)
    step(loop, 3)
    assert not begun(loop, large)
    loop.scheduler.abort(large)
    (small,) = add(loop, "quiet", 1, prompt=8, new=2, start=9)
    step(loop, 2)
    assert begun(loop, small)
    assert not begun(loop, big)


def test_a_sequence_that_waits_for_memory_is_not_passed_by_those_of_lower_priority() -> None:
    loop, big = crowd()
    loop.scheduler.add(make_request("later", [1, 2], length=5, tenant="quiet", priority=1))
    step(loop, 3)
    assert not begun(loop, "later")
    loop.scheduler.abort(big)
    step(loop, 2)
    assert begun(loop, "later")


def test_a_sequence_that_is_passed_does_not_starve() -> None:
    """Prompts of another tenant never stop coming, and hold two fifths of the arena."""
    loop, big = crowd()
    passed, steps = 0, 0
    while not begun(loop, big):
        steps += 1
        assert steps < 1_500, "starvation"
        if rows(loop)["quiet"] < 4 and loop.scheduler.stats().waiting < 2:
            add(loop, "quiet", 1, prompt=24, new=40, start=10 + steps)
        before = set(loop.scheduler.running)
        step(loop, 1)
        passed += len(set(loop.scheduler.running) - before)
    assert passed > 20


def test_a_row_that_waits_again_is_not_overtaken_by_a_later_one_of_its_tenant() -> None:
    """It was preempted with a token in flight, and is not in the queue before that has come."""
    loop = make_loop(rows=4)
    add(loop, "hog", 4)
    step(loop, 6)
    add(loop, "other", 1, new=40)
    step(loop, 2)
    assert rows(loop) == {"hog": 3, "other": 1}
    waiting = [s for s in loop.scheduler.sequences.values() if s.status is Status.WAITING]
    loop.scheduler.abort(waiting[0].request.request_id)
    (later,) = add(loop, "other", 1, start=5)
    (earlier,) = (s.request.request_id for s in loop.scheduler.running if s.request.options.tenant == "other")
    loop.scheduler.preempt(earlier)
    assert loop.scheduler.sequences[earlier].status is Status.PREEMPTED
    step(loop, 1)
    assert not begun(loop, later)
    step(loop, 2)
    assert begun(loop, earlier)


def test_a_tenant_beyond_its_share_leaves_room_for_others_to_come() -> None:
    """A sixteenth of the memory, unless it has no row: a prompt that needs nearly all must begin at some time."""
    layout = make_layout(4, None, num_full=1, num_local=0)
    queue = FairQueue(64, 8, 16)
    hog, later, quiet, huge = (
        Sequence(make_request(f"{n}", [1] * length, length=400, tenant=tenant), (0, n), limit=400)
        for n, (tenant, length) in enumerate([("hog", 20), ("hog", 20), ("quiet", 20), ("huge", 300)])
    )
    for sequence in (hog, later, quiet, huge):
        queue.register(sequence)
    for held, expected in ((20, 0), (50, 10)):  # pages of 160, of which a third is the share
        assert queue.spare(later, Use({hog: held}, 8, 160, layout)) == expected
    assert queue.spare(quiet, Use({hog: 50}, 8, 160, layout)) == 0
    assert queue.spare(huge, Use({hog: 50}, 8, 160, layout)) == 0


@pytest.mark.parametrize("spare", [0, 1])
def test_what_must_stay_free_counts_at_the_admission(spare: int) -> None:
    """A prompt that fits exactly does not begin if one page more must stay free."""
    loop = Loop(make_layout(4, None, num_full=1, num_local=0), Limits(400, 8, 64, 4, num_slabs=41), MODEL)
    request = make_request("a", [1] * 159, length=160)
    sequence = Sequence(request, (0, 0), limit=160)
    match = match_of(loop.scheduler.cache, sequence)
    requests = Requests(loop.scheduler.cache, loop.scheduler.limits)
    assert requests.admissible(Batch(64), sequence, match, spare) == (spare == 0)

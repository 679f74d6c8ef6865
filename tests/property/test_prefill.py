"""Laws of how prompts share steps (jswa/sched/scheduler.py): all of the budget, short ones soon, priority first."""

from hypothesis import example, given
from hypothesis import strategies as st

from jswa.config import Limits
from jswa.plan import StepPlan
from jswa.sched.sequence import Status
from tests.support.builders import make_layout, make_request, share
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

BUDGET, SHARE, ROWS = 32, 8, 12
LAYOUT = make_layout(4, 6, num_full=1, num_local=2)
LENGTHS = st.one_of(st.integers(1, SHARE), st.integers(SHARE, 300))


def make_loop() -> Loop:
    """Return a loop with memory for all rows."""
    limits = Limits(400, ROWS, BUDGET, LAYOUT.page_size, num_slabs=4_000, prefix_cache=False)
    assert limits.long_prompt == SHARE
    return Loop(LAYOUT, limits, TextModel(1_000))


def add(loop: Loop, name: str, length: int, *, priority: int = 0) -> None:
    """Queue a prompt that gets two tokens."""
    request = make_request(name, [ord(name[-1])] * length, length=length + 2, priority=priority)
    loop.scheduler.add(request)


def step(loop: Loop) -> StepPlan | None:
    """Run a step and check the laws of its plan."""
    before = loop.pending
    known = {s.row_id: s.num_known for s in loop.scheduler.sequences.values() if s.status is Status.RUNNING}
    plan = loop.launch()
    if plan is not None:
        running = {s.row_id: s for s in loop.scheduler.running}
        left = {row: s.num_known - s.launched for row, s in running.items() if s.num_known > s.launched}
        if plan.num_tokens < BUDGET:
            assert not left, "budget is left, and a prompt could have used it"
            assert not loop.scheduler.stats().waiting or len(running) == ROWS, "budget is left, and a request waits"
        for row, start, count in zip(plan.row_ids.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            first = min((running[r].request.options.priority for r in left), default=2**31)
            if running[row].request.options.priority > first and start + 1 < running[row].num_known:
                assert row in known, "a request of lower priority began while a prompt could have used its tokens"
                assert count <= SHARE
        assert known.keys() >= {r for r, s in running.items() if s.launched < s.num_known - 1 and r not in plan.row_ids}
    loop.apply(before)
    loop.scheduler.check()
    return plan


@share(8)
@given(st.lists(st.tuples(st.integers(0, 3), LENGTHS, st.integers(0, 2)), min_size=1, max_size=20))
def test_a_step_leaves_no_budget_that_a_row_could_use(arrivals: list[tuple[int, int, int]]) -> None:
    """Whatever arrives when; a prompt of higher priority is prefilled first, but for one share of the oldest."""
    loop, tokens, steps = make_loop(), 0, 0
    for number, (wait, length, priority) in enumerate(arrivals):
        for _ in range(wait):
            steps += step(loop) is not None
        add(loop, chr(65 + number), length, priority=priority)
        tokens += length + 1
    while loop.scheduler.has_work():
        steps += step(loop) is not None
    assert steps <= tokens / BUDGET + sum(wait for wait, *_ in arrivals) + 2 * len(arrivals)


@share(8)
@given(
    before=st.lists(st.tuples(st.integers(0, 3), st.integers(60, 300)), min_size=1, max_size=6),
    wait=st.integers(0, 6),
    length=st.integers(1, SHARE),
)
@example(before=[(0, 280), (1, 240), (0, 78), (0, 69), (1, 60)], wait=6, length=1)  # each shorter than the one before
def test_a_short_prompt_beside_any_long_ones_gets_its_first_token_at_once(
    before: list[tuple[int, int]], wait: int, length: int
) -> None:
    """In the second step at the latest, however many long ones are prefilled or wait before it."""
    loop = make_loop()
    for number, (steps, long) in enumerate(before):
        for _ in range(steps):
            step(loop)
        add(loop, f"long {number}", long)
    for _ in range(wait):
        step(loop)
    add(loop, "short", length)
    sampled = []
    for _ in range(2):
        plan = step(loop)
        assert plan is not None
        row = next((s.row_id for s in loop.scheduler.running if s.request.request_id == "short"), None)
        sampled += [row in plan.row_ids[plan.samples == 1]]
    assert any(sampled)


def test_long_prompts_are_prefilled_one_after_the_other_and_shorter_ones_first() -> None:
    """The second of two equal ones adds nothing to the first, which always gets its share."""
    loop = make_loop()
    for name, length in (("a", 300), ("b", 300), ("c", 100)):
        add(loop, name, length)
    first: dict[str, int] = {}
    for number in range(1, 40):
        before = loop.pending
        loop.launch()
        for event in loop.apply(before):
            first.setdefault(event.request_id, number)
    assert list(first) == ["a", "c", "b"]
    assert first["a"] - 1 <= -(-300 // BUDGET) + 1
    assert first["b"] - 1 <= -(-700 // BUDGET) + 1


def test_rows_with_one_known_token_run_in_every_step() -> None:
    """As decode rows do, however long the prompt before them: here each step's tokens are known before the next."""
    loop = make_loop()
    for name, length in (("long", 300), ("short", 2)):
        loop.scheduler.add(make_request(name, [ord(name[0])] * length, length=length + 9))
    for _ in range(6):
        plan = loop.launch()
        assert plan is not None
        assert plan.num_rows == 2
        assert plan.num_tokens == BUDGET
        pending, loop.pending = loop.pending, None
        loop.apply(pending)

"""A row is preempted for another tenant's sequence only if that sequence then runs."""

from hypothesis import event, example, given
from hypothesis import strategies as st

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.sched.sequence import Status
from tests.support.builders import make_layout, make_request, share
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

PAGE = 8
LAYOUTS = [make_layout(PAGE, None, num_full=1, num_local=0), make_layout(PAGE, 6, num_full=1, num_local=2)]
TEXTS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@share(8)
@given(
    layout=st.sampled_from(LAYOUTS),
    slabs=st.integers(8, 40),
    rows=st.integers(2, 6),
    hogs=TEXTS,
    others=TEXTS,
    prompt=st.integers(1, 200),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    shared=st.booleans(),
    settle=st.integers(1, 12),
    cached=st.booleans(),
)
@example(LAYOUTS[0], 20, 6, [20] * 6, [1], 100, 1.0, False, 12, True)
def test_a_row_is_taken_only_for_a_sequence_that_then_runs(
    layout: KVLayout,
    slabs: int,
    rows: int,
    hogs: list[int],
    others: list[int],
    prompt: int,
    weight: float,
    shared: bool,
    settle: int,
    cached: bool,
) -> None:
    """In a plan in which no row needs a page: a plan also preempts rows for rows that grow."""
    limits = Limits(400, rows, 32, PAGE, num_slabs=1 + slabs, prefix_cache=cached)
    loop = Loop(layout, limits, TextModel(1000))
    scheduler = loop.scheduler
    waiting = [("hog", length) for length in hogs] + [("other", length) for length in others]
    for number, (tenant, length) in enumerate(waiting):
        if length < scheduler.capacity:
            tokens = [1 if shared else number + 2] * length
            scheduler.add(make_request(str(number), tokens, length=length + 60, tenant=tenant))
    for _ in range(settle):
        loop.step()
    if prompt < scheduler.capacity:
        scheduler.add(make_request("new", [1] * prompt, length=prompt + 60, tenant="new", weight=weight))
    for _ in range(4):
        before, preempted = set(scheduler.running), scheduler.preemptions
        grows = any(s.launched % PAGE == 0 or s.num_known > s.launched + 1 for s in before)
        loop.step()
        scheduler.check()
        begun = [s for s in scheduler.running if s not in before]
        lost = [s for s in before if s.status in (Status.WAITING, Status.PREEMPTED)]
        if lost and not grows:
            assert scheduler.preemptions - preempted == len(lost)
            losers = {one.request.options.tenant for one in lost}
            assert any(s.request.options.tenant not in losers for s in begun), "taken in vain"
            event("taken")

"""Laws of the scheduler under random calls, with a fake device that checks its plans (tests/support/fakes.py)."""

import random
from collections.abc import Callable

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jswa.architecture import Reach
from jswa.cache.prefix.policies import POLICIES
from jswa.config import EvictionPolicy, HostMemory, Limits
from tests.support.builders import LAYOUTS, share
from tests.support.loops.conversation import VOCAB, make_conversation

SHAPES = {  # page sizes, and reaches of local layers
    "sliding": [(page, Reach(window)) for page in (1, 4) for window in (1, 3, 6, 9)],
    "chunked": [(page, Reach(chunk, chunked=True)) for page, chunk in ((1, 1), (1, 3), (1, 9), (4, 4), (4, 12))],
    "looking back": [
        *((1, Reach(1, chunked=True, lookback=1)), (1, Reach(3, chunked=True, lookback=2))),
        *((4, Reach(4, chunked=True, lookback=1)), (4, Reach(12, chunked=True, lookback=1))),
    ],
}
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic on an arena so small that rows are preempted and slabs compacted."""

    layers: tuple[int, int]  # numbers of full and local layers; set by a subclass
    shapes: list[tuple[int, Reach]]  # set by a subclass

    @initialize(
        data=st.data(),
        slabs=st.integers(4, 40),
        max_rows=st.integers(1, 6),
        max_tokens=st.integers(6, 24),
        failures=st.sampled_from([0, 0, 0, 50]),
        sharing=st.booleans(),
        interval=st.sampled_from([None, None, 5, 16]),
        policy=st.sampled_from(list(POLICIES)),
        host=st.sampled_from([None, None, 4, 12, 60]),
        speculative=st.sampled_from([0, 0, 1, 3, 7]),
        advance=st.sampled_from(["one", "all", "some"]),
        seed=st.integers(0, 999),
    )
    def start(
        self,
        data: st.DataObject,
        slabs: int,
        max_rows: int,
        max_tokens: int,
        failures: int,
        sharing: bool,
        interval: int | None,
        policy: EvictionPolicy,
        host: int | None,
        speculative: int,
        advance: str,
        seed: int,
    ) -> None:
        page_size, reach = data.draw(st.sampled_from(self.shapes))
        limits = Limits(
            60,
            max_rows,
            max_tokens,
            page_size,
            num_slabs=1 + slabs,
            prefix_cache=sharing,
            prefix_cache_interval=interval,
            radix_eviction_policy=policy,
            host=None if host is None else HostMemory(1 + host, slots_per_step=8, tokens_per_slot=0.1),
        )
        rng = random.Random(seed)
        choices: dict[str, Callable[[int], int]] = {
            "one": lambda most: 1,
            "all": lambda most: most,
            "some": lambda most: rng.randint(1, most),
        }
        chosen = choices[advance] if speculative else None
        self.talk = make_conversation(self.layers, reach, limits, failures, speculative, chosen)
        self.names: list[str] = []

    @rule(
        prompt=PROMPTS,
        new=st.integers(1, 30),
        stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        tenant=st.sampled_from(["", "", "other", "heavy"]),
    )
    def add(self, prompt: list[int], new: int, stop_ids: set[int], tenant: str) -> None:
        name = self.talk.add(prompt, new, stop_ids, tenant)
        if name is not None:
            self.names.append(name)

    @precondition(lambda self: self.talk.requests)
    @rule(
        data=st.data(),
        cut=st.integers(0, 59),
        more=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        new=st.integers(1, 30),
    )
    def go_on(self, data: st.DataObject, cut: int, more: list[int], new: int) -> None:
        """Add a prompt that shares a part of an earlier prompt and answer, and then continues differently."""
        before = self.talk.requests[data.draw(st.sampled_from(sorted(self.talk.requests)))]
        prompt = ([*before.prompt, *before.tokens][: cut + 1] + more)[:59]
        name = self.talk.add(prompt, new, set())
        if name is not None:
            self.names.append(name)

    @rule()
    def flush(self) -> None:
        self.talk.scheduler.cache.flush()

    @rule(choose=st.integers(0, 999), full=st.booleans())
    def spoil(self, choose: int, full: bool) -> None:
        self.talk.spoil(choose, full=full)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.talk.step()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request that waits, runs, is in flight, has finished or was aborted before."""
        self.talk.abort(data.draw(st.sampled_from(self.names)))

    @rule()
    def abort_unknown(self) -> None:
        self.talk.abort("nobody")

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "talk"):
            self.talk.check()

    def teardown(self) -> None:
        if hasattr(self, "talk"):
            self.talk.drain()
            event(f"wrong drafts: {min(self.talk.loop.runner.wrong, 3)}")
            event(f"preempted: {min(self.talk.scheduler.preemptions, 3)}")
            event(f"moved: {min(self.talk.loop.runner.moves, 3)}")
            event(f"copied: {min(self.talk.loop.runner.copies, 3)}")
            event(f"cached: {self.talk.hits.cached_tokens > 0}, replayed: {self.talk.hits.replayed_tokens > 0}")
            event(f"run again without the cache: {'not finite' in self.talk.hits.missed}")
            host = self.talk.scheduler.cache.host
            if host is not None:
                event(f"to the host: {min(host.tier.copied, 3)}, back: {min(host.recalled, 3)}")
                event(f"tokens from the host: {min(self.talk.hits.host_tokens, 3)}")
            event(f"evicted: {min(self.talk.hits.evictions, 3)}")


def test_a_row_is_not_taken_for_a_tenant_that_finds_no_room() -> None:
    """A drawn example: a tenant's second row takes another's; the first is not taken for a third tenant in vain."""
    limits = Limits(60, 4, 12, 1, num_slabs=17, prefix_cache=False, prefix_cache_interval=None)
    talk = make_conversation((0, 1), Reach(size=3, chunked=True), limits)
    for prompt, new, tenant in (
        (1, 1, ""),
        (1, 3, "other"),
        (1, 1, "heavy"),
        (1, 2, ""),
        (12, 1, ""),
        (12, 1, "heavy"),
    ):
        talk.add([0] * prompt, new, set(), tenant)
    talk.drain()
    assert talk.scheduler.preemptions == 1


def test_a_page_moves_when_no_plan_follows() -> None:
    """Compaction may run before a plan that is empty: its moves then wait, and the page is where it was."""
    limits = Limits(60, 4, 6, 1, num_slabs=26, prefix_cache=True, prefix_cache_interval=16)
    talk = make_conversation(LAYOUTS["hybrid, m = 6"], Reach(6), limits, failures=50)
    talk.add([9], 17, {0, 1})
    talk.add([0], 1, {0})
    talk.add([0], 8, set())
    talk.add([0], 13, set())
    talk.abort("r1")
    talk.drain()


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(k, "sliding") for k in LAYOUTS]
    + [(k, chunks) for chunks in ("chunked", "looking back") for k in LAYOUTS if k != "full only"],
)
def test_every_request_finishes_once_with_the_tokens_that_it_gets_alone(kind: str, shapes: str) -> None:
    """Under batching, chunking, preemption, compaction and aborts; no page stays held."""
    machine = type("Machine", (SchedulerMachine,), {"layers": LAYOUTS[kind], "shapes": SHAPES[shapes]})
    run_state_machine_as_test(machine, settings=share(8))


@share(8)
@given(
    layers=st.sampled_from(list(LAYOUTS.values())),
    shape=st.sampled_from([one for shapes in SHAPES.values() for one in shapes]),
    slabs=st.integers(6, 30),
    older=st.lists(st.tuples(PROMPTS, st.integers(1, 30)), max_size=4),
    prompt=st.integers(1, 59),
    younger=st.lists(st.tuples(PROMPTS, st.integers(1, 30)), min_size=1, max_size=4),
)
def test_a_request_that_fits_alone_finishes_beside_any_others(
    layers: tuple[int, int],
    shape: tuple[int, Reach],
    slabs: int,
    older: list[tuple[list[int], int]],
    prompt: int,
    younger: list[tuple[list[int], int]],
) -> None:
    """The progress law: a prompt of up to capacity - 1 tokens finishes while new requests never stop arriving."""
    page_size, reach = shape
    talk = make_conversation(layers, reach, Limits(60, 4, 10, page_size, num_slabs=1 + slabs))
    capacity = talk.scheduler.capacity
    if capacity < 2:
        return
    for tokens, new in older:
        talk.add(tokens[: capacity - 1], new, set())
    name = talk.add([1] * min(prompt, capacity - 1), 60, set())
    assert name is not None
    bound = 10 + 4 * sum(expected.steps_alone for expected in talk.requests.values()) + 4 * 60
    while talk.requests[name].finished is None:
        bound -= 1
        assert bound > 0, "starvation"
        tokens, new = younger[bound % len(younger)]
        if talk.scheduler.stats().waiting < 4:
            talk.add(tokens[: capacity - 1], new, set())
        talk.step()
    talk.drain()

"""Rows that start on cached KV in the real paged step: their logits are those of a cold run.

A row with full KV for n tokens starts at n if the window before n is cached, otherwise at the position of the start
rule (docs/design/prefix-cache.md); local KV that it computes before n is exact only from a known position on. Every
page without an owner holds NaN (tests/support/paged.py).
"""

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.model.weights.load import load_checkpoint
from jswa.plan import StepPlan
from tests.parity.load import load_fixture, names
from tests.parity.weights import write_checkpoint
from tests.support.builders import changed
from tests.support.nights import sample
from tests.support.oracles import random_params, small_model
from tests.support.paged import FLOAT32, LENGTH, TOLERANCE, Device, Kind, Session, Span, Text, compare
from tests.support.text.model import first_seen

CHUNK = 24
MOST_DIFFERENT = ("gpt_oss_base", "llama4_text_every_second", "gemma4_text_mix")
PAGE_SIZES = {  # of others: 4
    "gemma2_base": 16,
    "gemma3_text_p6": 1,
    "qwen3_layer_types": 8,
    "cohere2_base": 8,
}
VARIANTS = ("mistral_w8", "mistral_layer_types", "mimo_v2_flash_base", "gemma3n_text_base", "rnj1_base", *PAGE_SIZES)
# One fixture of every other family.
NIGHTLY = [name for name in names() if name.endswith("_base") and name not in (*MOST_DIFFERENT, *VARIANTS)]
FIXTURES = (*MOST_DIFFERENT, *VARIANTS, *NIGHTLY)


def branch(tokens: Int[np.ndarray, " T"], at: int, vocab: int, seed: int = 0) -> Int[np.ndarray, " T"]:
    """Return a text that differs at every position from `at` on."""
    other = tokens + np.random.default_rng(seed).integers(1, vocab, len(tokens))
    return np.where(np.arange(len(tokens)) < at, tokens, other % vocab).astype(np.int32)


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint on its device, and a text that transformers has scored."""

    device: Device
    tokens: Int[np.ndarray, " T"]
    sketch: Float[np.ndarray, "T C"]  # of transformers' logits

    @property
    def replay(self) -> int:
        """The longest text whose window takes a replay from its beginning: J·(W - 1) tokens with windows of W."""
        return max(length for length in range(LENGTH) if self.revived_at(length) == 0)

    def revived_at(self, found: int) -> int:
        """Return the start of a row that has full KV for `found` tokens and no local KV."""
        reach, local = self.device.layout.reach, self.device.layout.local
        assert reach is not None
        assert local is not None
        for _ in range(local.num_layers):
            found = first_seen(reach, found)
        return found

    def hit(self, found: int) -> int:
        """Return how much full KV of `found` tokens such a row uses: whole pages, unless copying the last one pays."""
        page = self.device.layout.page_size
        whole = found // page * page
        return found if self.revived_at(found) - self.revived_at(whole) >= max(1, page // 8) else whole

    def live_at(self, found: int) -> int:
        """Return the start of a row that has all KV for `found` tokens: `found`, if that is worth a copied page."""
        page = self.device.layout.page_size
        return found if found % page >= max(1, page // 8) else found // page * page

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of KV that the model has."""
        return ["local"] if self.device.layout.full is None else ["full", "local"]

    def branch(self, at: int, seed: int = 0) -> Int[np.ndarray, " T"]:
        """Return a text that differs from this one at every position from `at` on."""
        return branch(self.tokens, at, self.device.model.vocab_size, seed)

    def probe(self, session: Session, text: Text) -> Span:
        """Run a text whose prompt ends with its first new token; its logits must be those of a cold run."""
        session.run(text, chunk=CHUNK)
        found = session.logits[text.name]
        assert found.keys() >= set(range(text.prompt - 1, text.length - 1))
        compare(found, self.device.cold(text.tokens))
        return session.spans[text.name][0]


@pytest.fixture(
    scope="module",
    params=[
        *sample(MOST_DIFFERENT, 3),
        *sample(VARIANTS, 8),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY),
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    """Return one device for all tests of a family."""
    fixture = load_fixture(request.param)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), fixture.config, fixture.tensors)
        model, params = load_checkpoint(Path(folder), FLOAT32)
    if all(layer.attention.reach is None for layer in model.layers):
        pytest.skip("no local layers, so no windows to lose")
    device = Device(model.at_length(LENGTH), params, PAGE_SIZES.get(request.param, 4), tokens=CHUNK, texts=12)
    compare(dict(enumerate(device.cold(fixture.tokens))), fixture.sketch)
    return Family(device, fixture.tokens, fixture.sketch)


def lose_windows(session: Session) -> None:
    """Evict all local KV from the cache; without full layers all but the last window, or the text would go too."""
    retention = session.scheduler.cache.prefix.retention
    windows = [window for node in retention.tree.nodes() for window in node.windows.values()]
    if session.device.layout.full is None:
        windows.remove(max(windows, key=lambda window: window.end))
    for window in windows:
        retention.drop_window(window)
    lose_spare_pages(session)
    assert session.device.layout.full is None or not session.scheduler.cache.pool.local_cached.any()


def lose_spare_pages(session: Session) -> None:
    """Evict all local pages that neither a window nor a row needs."""
    session.scheduler.cache.prefix.retention.drop_spare()
    session.scheduler.check()


def test_an_evicted_window_is_rebuilt_from_the_start_rules_position(family: Family) -> None:
    """Without local KV the row starts J·(W - 1) tokens before the end of its hit, or at the beginning of a chunk."""
    base = Session(family.device)
    base.run(Text("first", family.tokens, 60))
    compare(base.logits["first"], family.sketch)
    lose_windows(base)
    revived = 0
    for found in (58, 53, 47, family.replay + 1, 9, 5):
        session, hit = base.fork(), family.hit(found)
        span = family.probe(session, Text("second", family.branch(found), found + 1, found + 4))
        assert span == (family.revived_at(hit), span.end, hit, family.revived_at(hit))
        revived += span.start > 0
        # The KV that it has left in the cache serves continuations of the first text, and of its own.
        family.probe(session, Text("first again", family.tokens, found + 1, found + 3))
        family.probe(session, Text("second again", family.branch(found), found + 3, found + 6))
    assert revived >= 3


def test_a_row_can_start_at_the_end_of_any_cached_window(family: Family) -> None:
    """At W - 1, W, W + 1, page boundaries and inside pages, if only the window of the prompt is cached."""
    reach, page = family.device.layout.reach, family.device.layout.page_size
    assert reach is not None
    size = reach.size
    for found in sorted({1, size - 1, size, size + 1, 2 * size, 31, 32, 33, 2 * page, 3 * page + 2}):
        session = Session(family.device)
        # Every second text is so long that the row gives up the window before its end.
        session.run(Text("first", family.tokens, found, found + 1 + (found % 2) * (reach.span + page)))
        lose_spare_pages(session)
        span = family.probe(session, Text("second", family.branch(found), found + 1, found + 3))
        assert span.start == family.live_at(found)
        assert span.local_visible_from == reach.first_visible(span.start)


def test_texts_that_branch_inside_a_page_do_not_change_each_others_kv(family: Family) -> None:
    """At every offset: the first text's KV keeps its bits, so every continuation of it gets the same logits."""
    session = Session(family.device)
    session.run(Text("first", family.tokens, 36, 38))
    before = {kind: session.cached(family.tokens, kind) for kind in family.kinds}
    for found in range(15, 34):
        text = Text(f"second {found}", family.branch(found, seed=found), found + 1, found + 3)
        assert family.probe(session, text).start == family.live_at(found)
    family.probe(session, Text("first again", family.tokens, 36, 40))
    for kind, (there, values) in before.items():
        assert there.all()
        there, now = session.cached(family.tokens, kind)
        assert there.all()
        assert np.array_equal(now[: len(values)], values)


Edit = Callable[[StepPlan], StepPlan]


def as_planned(plan: StepPlan) -> StepPlan:
    """Return the plan unchanged."""
    return plan


def later(plan: StepPlan) -> StepPlan:
    """Let the row start one token later."""
    return dataclasses.replace(changed(plan, start=plan.starts + 1, count=plan.counts - 1), tokens=plan.tokens[1:])


def blind(plan: StepPlan) -> StepPlan:
    """Let the row's local layers see one position less."""
    return changed(plan, local_visible_from=plan.local_visible_from + 1)


def later_and_blind(plan: StepPlan) -> StepPlan:
    """Let the row start one token later, and its local layers see one position less."""
    return blind(later(plan))


def sees_more(plan: StepPlan) -> StepPlan:
    """Let the row's local layers see one position more."""
    return changed(plan, local_visible_from=plan.local_visible_from - 1)


def run_edited(
    base: Session, text: Text, first: Edit, rest: Edit = as_planned, *, chunk: int = CHUNK, until: int = 0
) -> Session:
    """Run a prompt with changed plans: `first` changes its first plan, `others` the later ones."""
    session = base.fork()
    session.scheduler.limits = dataclasses.replace(session.scheduler.limits, max_tokens=chunk)
    session.add(text)
    session.step(first)
    while session.spans[text.name][-1].end < (until or text.prompt):
        session.step(rest)
    return session


def test_a_replay_is_as_short_as_possible(family: Family) -> None:
    """With NaN in all local KV before its start, the logits at the end of the hit are finite.

    They are NaN if the row starts one token later. If local layers see one token more, the last position of the replay
    is NaN, and no later one.
    """
    layout, replay = family.device.layout, family.replay
    assert layout.reach is not None
    # The replay begins inside a page, if possible: then the row holds memory before it that it has not written.
    inside = (n for n in range(58, 0, -1) if (n - replay) % layout.page_size or layout.page_size == 1)
    found = 53 if layout.reach.chunked else next(inside)
    session = Session(family.device)
    session.run(Text("first", family.tokens, 60))
    lose_windows(session)
    text = Text("second", family.branch(found), found + 1, found + 4)
    expected, start = family.device.cold(text.tokens), family.revived_at(found)
    right = run_edited(session, text, as_planned)
    assert right.spans["second"][0].start == start > 0
    compare(right.logits["second"], expected)
    assert np.isnan(run_edited(session, text, later).logits["second"][found]).all()
    if start % layout.page_size:
        begun = run_edited(session, text, as_planned, chunk=1, until=start + 1)
        assert np.isnan(begun.local_kv("second", start - 1)).all()
        wrong = run_edited(session, text, sees_more, sees_more, chunk=layout.reach.size - 1)
        compare(wrong.logits["second"], expected)
        assert np.isnan(wrong.replayed["second"][found - 1]).all()


def test_a_start_at_the_end_of_the_hit_reads_one_window_of_cached_kv(family: Family) -> None:
    """NaN in cached local KV before that window does not show in the logits; NaN in its first position does."""
    reach = family.device.layout.reach
    assert reach is not None
    for found in (30, 37):
        session = Session(family.device)
        session.run(Text("first", family.tokens, found, found + 2))
        first = reach.first_visible(found)
        session.taint(family.tokens, range(first))
        text = Text("second", family.branch(found), found + 1, found + 3)
        bad = session.fork()
        assert family.probe(session, text).start == found
        bad.taint(family.tokens, range(first, first + 1))
        bad.run(text)
        assert bad.failed == {"second"}
        compare(bad.logits["second"], family.device.cold(text.tokens))  # it ran again, without the cache


WINDOWS = {"LF": 8, "LLF": 8, "FLL": 3}


@pytest.mark.parametrize("pattern", sample(list(WINDOWS), 3))
def test_a_replay_that_is_one_token_shorter_gives_other_logits(pattern: str) -> None:
    """Without NaN: the row starts one token later, and its local layers see one position less."""
    model = small_model(pattern, window=WINDOWS[pattern])
    device = Device(model, random_params(model), 4, tokens=CHUNK, texts=4)
    tokens = np.random.default_rng(2).integers(0, model.vocab_size, LENGTH).astype(np.int32)
    family = Family(device, tokens, device.cold(tokens))
    session = Session(device)
    session.run(Text("first", tokens, 60))
    lose_windows(session)
    for found in (58, 55):
        text = Text("second", family.branch(found), found + 1)
        expected = device.cold(text.tokens)[found]
        right = run_edited(session, text, as_planned).logits["second"][found]
        short = run_edited(session, text, later_and_blind, blind).logits["second"][found]
        assert np.abs(right - expected).max() < TOLERANCE
        assert np.abs(short - expected).max() > 5 * TOLERANCE


def cut_short(running: Session, how: str) -> Session:
    """Return a copy in which the one running row is aborted, preempted, or its step in flight has written NaN."""
    session = running.fork()
    (sequence,) = session.scheduler.running
    if how == "aborted":
        assert session.scheduler.abort("cut") is not None
    elif how == "preempted":
        session.scheduler.preempt("cut")
    else:
        session.taint_row("cut", sequence.launched - 1)
    session.run(chunk=CHUNK)
    return session


def check_cache(family: Family, session: Session, tokens: Int[np.ndarray, " T"], reference: Session) -> None:
    """Assert that all cached KV of a text is that of a cold run."""
    for kind in family.kinds:
        there, found = session.cached(tokens, kind)
        all_there, expected = reference.cached(tokens, kind)
        assert all_there[: len(there)].all()
        difference = np.abs(found - expected[: len(found)])[there].max(initial=0.0)
        assert difference < TOLERANCE, f"{kind} KV of the cache is off by {difference}"


def check_cut_rows(family: Family, *, chunk: int, stride: int) -> None:
    """Cut a row short after each step of its replay and of decoding; later requests must get right logits."""
    found, vocab = 50, family.device.model.vocab_size
    running, reference = Session(family.device), Session(family.device)
    running.run(Text("first", family.tokens, 60, 62))
    lose_windows(running)
    cut = Text("cut", family.branch(found), found + 3, found + 8)
    reference.run(Text("cold", cut.tokens, LENGTH - 2, LENGTH - 1))
    running.scheduler.limits = dataclasses.replace(running.scheduler.limits, max_tokens=chunk)
    running.add(cut)
    running.step()
    steps = 0
    while running.scheduler.sequences["cut"].launched < cut.length - 2:
        for how in ("aborted", "preempted", "not finite"):
            session = cut_short(running, how)
            check_cache(family, session, cut.tokens, reference)
            if how == "preempted":
                assert session.scheduler.preemptions == 1
                compare(session.logits["cut"], family.device.cold(cut.tokens))
            assert session.failed == ({"cut"} if how == "not finite" else set())
            for at in range(1 + 7 * steps % stride, cut.length - 1, stride):
                probe = Text("probe", branch(cut.tokens, at, vocab, seed=at), at + 1, at + 3)
                family.probe(session.fork(), probe)
        running.step()
        steps += 1
    assert steps >= 3


def test_a_replay_that_is_cut_short_leaves_only_exact_kv_in_the_cache(family: Family) -> None:
    """By abort, preemption or NaN at every chunk; all cached KV is compared, and some boundaries are probed."""
    check_cut_rows(family, chunk=6, stride=31)


@pytest.mark.nightly
def test_after_a_replay_that_is_cut_short_rows_can_start_at_every_boundary(family: Family) -> None:
    """As above, with all boundaries probed."""
    check_cut_rows(family, chunk=5, stride=1)

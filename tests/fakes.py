"""Doubles for tests: models without weights, and a device without jax."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.config import AttentionConfig, LayerConfig, Limits, MlpConfig, ModelConfig, Norm, Reach
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.pack import PackSpec, pack, unpack
from jswa.sched.scheduler import Scheduler
from jswa.types import FROM_DEVICE, NOT_FINITE, SAMPLING, FinishReason, Request, SamplingParams, StepPlan, TokenEvent

NO_PLACE = 2**30  # of the extras tables
POISON = -1  # KV memory that nobody may read
LAYOUTS = {  # full and local layers, for make_layout
    "full only": (1, 0),
    "local only": (0, 1),
    "hybrid, m = 1": (1, 1),
    "hybrid, m = 2": (1, 2),
    "hybrid, m = 6": (1, 6),
}
_NORM = Norm(1e-6)


def share(part: int) -> settings:
    """One `part`-th of the profile's examples, so that the nightly profile stays as much longer as it is."""
    return settings(max_examples=max(1, settings().max_examples // part))


def reach_of(reach: int | Reach | None) -> Reach | None:
    """A number is a sliding window."""
    return Reach(reach) if isinstance(reach, int) else reach


def sampling_columns(rows: int, **values: Any) -> Int[np.ndarray, "R C"]:
    """Packed sampling parameters: greedy rows without limits or extras, but for what is given."""
    plain: dict[str, Any] = {"top_p": 1.0, "repetition": 1.0, "extras": NO_PLACE}
    columns = []
    for name in SAMPLING:
        value = values.get(name, plain.get(name, 0))
        real = name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        kind = np.float32 if real else np.uint32 if name.startswith("key") else np.int32
        columns.append(np.broadcast_to(np.asarray(value).astype(kind), rows).copy().view(np.int32))
    return np.stack(columns, axis=1)


def make_layer(reach: int | Reach | None, heads: tuple[int, int, int]) -> LayerConfig:
    """A layer by what the arena needs of it; `heads` is (KV heads, head size, value size)."""
    kv_heads, head_dim, v_head_dim = heads
    attention = AttentionConfig(kv_heads, kv_heads, head_dim, v_head_dim, scale=1.0, rope=None, reach=reach_of(reach))
    return LayerConfig(attention, MlpConfig(8, "silu"), _NORM, None, _NORM, None)


def make_model(*layers: LayerConfig, vocab: int = 64, max_position: int = 2**20) -> ModelConfig:
    """A model of these layers."""
    return ModelConfig("fake", vocab, 8, max_position, layers, _NORM, tie_embeddings=True)


def make_layout(page_size: int, reach: int | Reach | None, *, num_full: int, num_local: int) -> KVLayout:
    """A layout of equal layers, the last `num_full` full; with one full layer a block has `num_local` full pages."""
    heads = (1, 2, 2)
    layers = [make_layer(reach, heads)] * num_local + [make_layer(None, heads)] * num_full
    return KVLayout.of(make_model(*layers), page_size)


@dataclass
class TextModel:
    """A language model without weights: the next token is a hash of all tokens before it.

    Attributes:
        vocab: tokens are in [0, vocab).
        failures: one history of this many gives logits that are not finite; 0 for none.
    """

    vocab: int
    failures: int = 0

    @staticmethod
    def fold(state: int, tokens: Sequence[int]) -> int:
        """The state after more tokens; the state of no tokens is 0."""
        for token in tokens:
            state = ((state ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) % 2**64
        return state

    def next_token(self, state: int) -> int:
        """The token that follows a history, NOT_FINITE for one that fails."""
        if self.failures and (state >> 11) % self.failures == 0:
            return NOT_FINITE
        return (state >> 33) % self.vocab

    def generate(self, prompt: Sequence[int], stop_ids: Collection[int], length: int) -> tuple[list[int], FinishReason]:
        """Generate alone, up to `length` tokens with the prompt: the oracle of every schedule."""
        tokens: list[int] = []
        state = self.fold(0, prompt)
        while len(prompt) + len(tokens) < length:
            token = self.next_token(state)
            if token == NOT_FINITE:
                return tokens, "error"
            tokens.append(token)
            if token in stop_ids:
                return tokens, "stop"
            state = self.fold(state, [token])
        return tokens, "length"


@dataclass(frozen=True, eq=False)
class FakePending:
    """A launched step of `FakeRunner`."""

    plan: StepPlan
    _tokens: Int[np.ndarray, " R"]

    def tokens(self) -> Int[np.ndarray, " R"]:
        """The tokens of the plan's rows, garbage for those that sample none."""
        return self._tokens


class FakeRunner:
    """`StepRunner` in numpy: keeps what the device keeps, and asserts that every row reads back what it wrote.

    KV memory holds a mark (row's life, position, token) for each position, in two views over the same blocks: a write
    through one view poisons the other. The order of a launch is the device's: moves, table entries, all writes, all
    reads. So a page reused too early, a window cut too far or a move not followed is a wrong mark.
    """

    def __init__(self, layout: KVLayout, limits: Limits, model: TextModel) -> None:
        self.layout = layout
        self.limits = limits
        self.model = model
        self.launches = 0
        self.moves = 0
        self._buckets = bucket_table(limits, on_gpu=False)
        page, rows, width = limits.page_size, limits.max_rows, limits.pages_per_row
        self._full = np.full((limits.num_blocks, layout.pages_per_block, page), POISON, np.int64)
        self._local = np.full((limits.num_blocks, page), POISON, np.int64)
        self._full_table = np.zeros((rows, width), np.int32)
        self._local_table = np.zeros((rows, width), np.int32)
        self._last_token = np.full(rows, POISON, np.int64)
        # What no device has: the marks that each row wrote, and the state of its text.
        self._written = np.full((rows, width * page), POISON, np.int64)
        self._length = [0] * rows
        self._life = [0] * rows
        self._text = [0] * rows
        self._lives = 0

    def launch(self, plan: StepPlan) -> FakePending:
        """Run the step through the packed upload of its bucket, as the real runner does."""
        bucket = pick_bucket(self._buckets, plan)
        spec = PackSpec.of(bucket, page_size=self.limits.page_size, max_rows=self.limits.max_rows)
        inputs = unpack(pack(plan, spec), spec)
        self._move(plan.moves)
        self._enter(self._full_table, inputs.full_pages, full=True)
        self._enter(self._local_table, inputs.local_pages, full=False)
        rows = inputs.rows[inputs.column("slot") < self.limits.max_rows]
        ends = np.cumsum(rows[:, 2])
        assert ends[-1] == plan.num_tokens, "rows and tokens disagree"
        for (slot, start, count, *_), end in zip(rows.tolist(), ends.tolist(), strict=True):
            self._write(slot, start, inputs.tokens[end - count : end])
        for slot, start, count, *_ in rows.tolist():
            self._read(slot, start, start + count)
        tokens = np.full(len(rows), NOT_FINITE, np.int32)
        for index, (slot, _, _, _, samples, *_) in enumerate(rows.tolist()):
            if samples:
                tokens[index] = self.model.next_token(self._text[slot])
                self._last_token[slot] = max(int(tokens[index]), 0)
        self.launches += 1
        return FakePending(plan, tokens)

    def _move(self, moves: Int[np.ndarray, "M 2"]) -> None:
        m = self.layout.pages_per_block
        pages = self._full.reshape(-1, self.limits.page_size)
        for source, target in moves.tolist():
            assert min(source, target) >= m, "the block of zeros moved"
            pages[target] = pages[source]
            self._local[target // m] = POISON
            self._full_table[self._full_table == source] = target
        self.moves += len(moves)

    def _enter(self, table: Int[np.ndarray, "R N"], entries: Int[np.ndarray, "U 3"], *, full: bool) -> None:
        """Enter new pages into a table. Their memory holds what an earlier owner left: poison it."""
        for slot, position, page in entries[entries[:, 0] < self.limits.max_rows].tolist():
            block, offset = divmod(page, self.layout.pages_per_block) if full else (page, slice(None))
            assert block > 0, "the block of zeros was handed out"
            table[slot, position] = page
            self._full[block, offset] = POISON
            self._local[block] = POISON

    def _write(self, slot: int, start: int, tokens: Int[np.ndarray, " n"]) -> None:
        if start == 0:
            self._lives += 1
            self._life[slot], self._length[slot], self._text[slot] = self._lives, 0, 0
        assert start == self._length[slot], "a row skipped or repeated positions"
        run = tokens.astype(np.int64)
        if run[0] == FROM_DEVICE:
            assert len(run) == 1, "only one token can come from the device"
            run[0] = self._last_token[slot]
        self._last_token[slot] = POISON
        assert np.all(run >= 0), "a token is not known"
        self._text[slot] = self.model.fold(self._text[slot], run.tolist())
        self._length[slot] += len(run)
        positions = np.arange(start, start + len(run))
        marks = (self._life[slot] << 40) | (positions << 16) | run
        self._written[slot, positions] = marks
        pages, offsets = np.divmod(positions, self.limits.page_size)
        if self.layout.full is not None:
            blocks, parts = np.divmod(self._full_table[slot, pages], self.layout.pages_per_block)
            self._full[blocks, parts, offsets] = marks
            self._local[blocks] = POISON
        if self.layout.local is not None:
            blocks = self._local_table[slot, pages]
            self._local[blocks, offsets] = marks
            self._full[blocks] = POISON

    def _read(self, slot: int, start: int, end: int) -> None:
        """All that the queries at [start, end) see: full layers everything, local layers their windows."""
        if self.layout.full is not None:
            self._check(self._full.reshape(-1, self.limits.page_size), self._full_table, slot, 0, end)
        if self.layout.reach is not None:
            first = self.layout.reach.first_visible(start)
            self._check(self._local, self._local_table, slot, first, end)

    def _check(
        self, memory: Int[np.ndarray, "P p"], table: Int[np.ndarray, "R N"], slot: int, first: int, end: int
    ) -> None:
        page = self.limits.page_size
        page_range = slice(first // page, -(-end // page))
        seen = memory[table[slot, page_range]].reshape(-1)
        begin = first - page_range.start * page
        wrong = np.flatnonzero(seen[begin : begin + end - first] != self._written[slot, first:end])
        assert not len(wrong), f"slot {slot} reads what it did not write at positions {first + wrong}"


class Loop:
    """`Engine.step` without an engine: one step in flight."""

    def __init__(self, layout: KVLayout, limits: Limits, model: TextModel) -> None:
        self.scheduler = Scheduler(layout, limits)
        self.runner = FakeRunner(layout, limits, model)
        self.pending: FakePending | None = None

    def step(self) -> list[TokenEvent]:
        """Launch the next step, then take in the tokens of the one before."""
        before = self.pending
        self.launch()
        return self.apply(before)

    def launch(self) -> StepPlan | None:
        """The first half of a step."""
        plan = self.scheduler.plan()
        assert plan is not None or self.pending is not None or not self.scheduler.has_work(), "stuck"
        self.pending = self.runner.launch(plan) if plan is not None else None
        return plan

    def apply(self, before: FakePending | None) -> list[TokenEvent]:
        """The second half, with the step that was pending before the first."""
        return self.scheduler.apply(before.plan, before.tokens()) if before is not None else []


def make_request(name: str, prompt: Sequence[int], *, length: int, stop_ids: Collection[int] = ()) -> Request:
    """A request of at most `length` tokens, prompt included."""
    params = SamplingParams(stop_token_ids=tuple(stop_ids))
    return Request(name, np.array(prompt, np.int32), params, frozenset(stop_ids), key=(0, 0), max_length=length)

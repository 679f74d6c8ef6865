"""The real paged forward under the real scheduler, without an engine: the test chooses the tokens, and sees logits.

`Session` runs on an arena in which every page without an owner holds NaN, so a step that reads a page which its row
does not own, or does not own any more, gives NaN. Between two steps a test may look at all state, and change it.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jswa.architecture import ModelConfig
from jswa.building.machine import use_compilation_cache
from jswa.cache.capacity import row_capacity
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.env import Switches
from jswa.exec.buckets import Bucket, pick_bucket
from jswa.exec.pack import PackSpec, pack, unpack
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.pages import move_batches, rename_pages, row_batches, set_rows
from jswa.exec.programs.state import DeviceState, init_state
from jswa.exec.programs.step import forward
from jswa.exec.side_programs import compile_copy_pages
from jswa.model.binding import bind
from jswa.model.transformer import Params
from jswa.plan import NOT_FINITE, Request, StepPlan
from jswa.sched.scheduler import Scheduler
from jswa.types import SamplingParams
from tests.parity.sketch import COLUMNS, sketch
from tests.support.oracles import dense_attention, quick_compiles

TOLERANCE = 2e-4  # docs/numerics.md
LENGTH, ROWS, TOKENS = 64, 3, 48
FLOAT32 = jnp.dtype("float32")
Logits = dict[int, Float[np.ndarray, " V"]]  # of each position
Kind = Literal["full", "local"]
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of one request: LENGTH tokens, of which the first `prompt` are its prompt.

    It ends after `length` tokens: by its limit or, with `stops`, by an end token, which the host sees one step late.
    """

    name: str
    tokens: Int[np.ndarray, " T"]
    prompt: int
    length: int = LENGTH
    stops: bool = False

    def request(self) -> Request:
        """Return a request that becomes this text if every step samples its tokens."""
        stop_ids = frozenset({int(self.tokens[self.length - 1])}) if self.stops else frozenset[int]()
        limit = LENGTH if self.stops else self.length
        return Request(self.name, self.tokens[: self.prompt], GREEDY, stop_ids, (0, 0), limit)


class Span(NamedTuple):
    """The positions [start, end) that a row ran in one step, with its `full_write_from` and `local_visible_from`."""

    start: int
    end: int
    full_write_from: int
    local_visible_from: int


class Device:
    """The compiled forward of one model and page size, for steps of at most `tokens` tokens.

    The arena has memory for ROWS running texts, and for `texts` texts that are cached as a whole.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        page_size: int,
        *,
        tokens: int = TOKENS,
        decode: bool = False,
        texts: int = 0,
        kv_dtype: jnp.dtype = FLOAT32,
    ) -> None:
        use_compilation_cache(Switches.read().compilation_cache)
        self.model = model
        self.params = params
        self.kv_dtype = kv_dtype
        self.layout = KVLayout.of(model, page_size)
        limits = Limits(2 * LENGTH, ROWS, tokens, page_size, num_slabs=0)
        slots = ROWS * self.layout.resident_slots(LENGTH) + self.layout.step_reserve_slots(tokens, ROWS)
        pages = -(-LENGTH // page_size)
        slots += texts * pages * (self.layout.pages_per_slab + 1)
        self.limits = dataclasses.replace(limits, num_slabs=2 + -(-slots // self.layout.pages_per_slab))
        state = self.empty_state()
        self.buckets = tuple(Bucket(n, ROWS, decode=n == ROWS) for n in ([ROWS] if decode else []) + [tokens])
        self.configs = {
            b: StepConfig(model, self.layout, b, PackSpec.of(b, page_size=page_size, max_rows=ROWS))
            for b in self.buckets
        }
        self.compiled = {b: self._compile(config, state) for b, config in self.configs.items()}
        self.copy_pages = compile_copy_pages(self.layout, state)
        self._dense: jax.stages.Compiled | None = None
        self._cold: dict[bytes, Float[np.ndarray, "T V"]] = {}

    def empty_state(self) -> DeviceState:
        """Return the device state before the first step."""
        return init_state(self.layout, self.limits, self.model.vocab_size, self.kv_dtype)

    def cold(self, tokens: Int[np.ndarray, " T"]) -> Float[np.ndarray, "T V"]:
        """Return logits of every position of a text of LENGTH tokens, by one dense forward without pages."""

        def run(params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T V"]:
            decoder = bind(self.model, params)
            return decoder.logits(decoder(tokens, jnp.arange(LENGTH), dense_attention(self.model)))

        if self._dense is None:
            with quick_compiles():
                self._dense = jax.jit(run).lower(self.params, jnp.asarray(tokens)).compile()
        key = tokens.tobytes()
        if key not in self._cold:
            self._cold[key] = np.asarray(self._dense(self.params, jnp.asarray(tokens)))
        return self._cold[key]

    def least_slabs(self, chunk: int) -> int:
        """Return the fewest slabs in which one row of LENGTH tokens can always run."""
        limits = dataclasses.replace(self.limits, max_tokens=chunk)
        slabs = range(1, self.limits.num_slabs)
        return next(n + 1 for n in slabs if row_capacity(self.layout, limits, n * self.layout.pages_per_slab) >= LENGTH)

    def _compile(self, config: StepConfig, state: DeviceState) -> jax.stages.Compiled:
        def run(
            params: Params, state: DeviceState, packed: Int[Array, " size"]
        ) -> tuple[DeviceState, Float[Array, "R V"]]:
            state, hidden, *_ = forward(params, state, unpack(packed, config.pack), config=config, every=False)
            return state, bind(config.model, params).logits(hidden)

        packed = np.zeros(config.pack.size, np.int32)
        with quick_compiles():
            return jax.jit(run, donate_argnums=1).lower(self.params, state, packed).compile()


class Session:
    """Overlapped steps of at most `chunk` tokens on a device's arena, or on `num_slabs` slabs of it.

    Attributes:
        logits: of the last token of every chunk, by text and position.
        replayed: those of chunks inside a replay, which are not exact.
        spans: positions that the row of each text ran, step by step.
        failed: texts of which a step was not finite; then they may have run again without the cache.
        moves: number of slots that were copied.
    """

    def __init__(self, device: Device, *, chunk: int | None = None, num_slabs: int | None = None) -> None:
        self.device = device
        limits = dataclasses.replace(
            device.limits,
            max_tokens=chunk or device.limits.max_tokens,
            num_slabs=num_slabs or device.limits.num_slabs,
        )
        self.scheduler = Scheduler(device.layout, limits)
        self.logits: dict[str, Logits] = {}
        self.replayed: dict[str, Logits] = {}
        self.spans: dict[str, list[Span]] = {}
        self.failed: set[str] = set()
        self.moves = 0
        self._texts: dict[str, Text] = {}
        self._state = device.empty_state()
        self._before: tuple[StepPlan, Int[np.ndarray, " R"]] | None = None

    def fork(self) -> "Session":
        """Return an independent copy."""
        return copy.deepcopy(self, {id(self.device): self.device})

    def add(self, text: Text) -> None:
        """Queue a text."""
        self.scheduler.add(text.request())
        self._texts[text.name] = text
        self.logits[text.name], self.replayed[text.name], self.spans[text.name] = {}, {}, []

    def run(self, *texts: Text, chunk: int | None = None) -> None:
        """Queue texts and run all requests to their end, in steps of at most `chunk` tokens from now on."""
        if chunk is not None:
            self.scheduler.limits = dataclasses.replace(self.scheduler.limits, max_tokens=chunk)
        for text in texts:
            self.add(text)
        while self.scheduler.has_work():
            self.step()

    def step(self, edit: Callable[[StepPlan], StepPlan] | None = None) -> None:
        """Plan a step, launch it as changed by `edit`, then apply the step before. No row of a changed step fails."""
        if not self.scheduler.cache.moves:  # the sources of moves that are not in a plan yet must stay
            self._poison()
        plan = self.scheduler.plan()
        now = None
        if plan is not None:
            names = {sequence.row_id: name for name, sequence in self.scheduler.sequences.items() if sequence.lease}
            self.moves += len(plan.moves)
            run = plan if edit is None else edit(plan)
            logits = self._launch(run)
            tokens = self._record(run, logits, [self._texts[names[slot]] for slot in plan.row_ids.tolist()])
            tokens = tokens if edit is None else np.maximum(tokens, 0)
            last = np.asarray(self._state["last_token"]).copy()
            last[plan.row_ids[plan.samples != 0]] = np.maximum(tokens, 0)[plan.samples != 0]
            self._state = DeviceState(**{**self._state, "last_token": jnp.asarray(last)})
            now = plan, tokens
        self.scheduler.tidy()
        if self._before is not None:
            self.scheduler.apply(*self._before)
        self._before = now
        self.scheduler.check()

    def cached(
        self, tokens: Int[np.ndarray, " T"], kind: Kind
    ) -> tuple[Bool[np.ndarray, " n"], Float[np.ndarray, "n K E"]]:
        """Return, for the cached part of a text, which positions have KV of this kind, and the KV of all its layers."""
        length, ids = self._cached_ids(tokens, kind)
        page = np.arange(length) // self.device.layout.page_size
        there: Bool[np.ndarray, " n"] = ids[page] != 0
        offsets = np.arange(length) % self.device.layout.page_size
        views = self._views(kind)
        places = [place for place in self.device.layout.layers if place.kind == kind]
        parts = [views[place.lane][ids[page], place.index, :, offsets] for place in places]
        return there, np.concatenate(parts, axis=1)

    def local_kv(self, name: str, position: int) -> Float[np.ndarray, " X"]:
        """Return a row's local KV of a position that its pages hold."""
        slab, offset = self._local_place(name, position)
        places = [place for place in self.device.layout.layers if place.kind == "local"]
        views = self._views("local")
        return np.concatenate([views[place.lane][slab, place.index, :, offset].ravel() for place in places])

    def taint(self, tokens: Int[np.ndarray, " T"], positions: range) -> None:
        """Write NaN to the cached local KV of these positions of a text."""
        length, ids = self._cached_ids(tokens, "local")
        page, offset = np.divmod(np.arange(positions.start, min(positions.stop, length)), self.device.layout.page_size)
        self._taint(ids[page][ids[page] != 0], offset[ids[page] != 0])

    def taint_row(self, name: str, position: int) -> None:
        """Let the step in flight have written NaN to a row's local KV of a position, and report it."""
        slab, offset = self._local_place(name, position)
        assert self._before is not None
        plan, tokens = self._before
        tokens[plan.row_ids == self.scheduler.sequences[name].row_id] = NOT_FINITE
        self.failed.add(name)
        self._taint(np.array([slab]), np.array([offset]))

    def check_zeros(self) -> None:
        """Assert that the slab of zeros is still zero."""
        for lane in self._state["lanes"]:
            assert not np.asarray(lane)[:, 0].any(), "the slab of zeros was written"

    def _local_place(self, name: str, position: int) -> tuple[int, int]:
        lease = self.scheduler.sequences[name].lease
        assert lease is not None
        page, offset = divmod(position, self.device.layout.page_size)
        assert lease.local.start <= page < lease.local.end
        return int(lease.local.ids[page]), offset

    def _taint(self, slabs: Int[np.ndarray, " n"], offsets: Int[np.ndarray, " n"]) -> None:
        lanes = []
        for view, lane in zip(self._views("local"), self._state["lanes"], strict=True):
            view[slabs, :, :, offsets] = np.nan
            lanes.append(jnp.asarray(view.reshape(lane.shape)))
        self._state = DeviceState(**{**self._state, "lanes": lanes})

    def _cached_ids(self, tokens: Int[np.ndarray, " T"], kind: Kind) -> tuple[int, Int[np.ndarray, " pages"]]:
        tree = self.scheduler.cache.prefix.tree
        path, length = tree.walk("", tokens)
        return length, tree.pages(path, length)[kind == "local"]

    def _views(self, kind: Kind) -> list[Float[np.ndarray, "pages S K p E"]]:
        layout = self.device.layout
        shape = layout.full if kind == "full" else layout.local
        if shape is None:
            return []
        cells = (shape.layers_per_page, shape.num_kv_heads, layout.page_size, shape.row)
        return [np.array(lane).reshape(-1, *cells) for lane in self._state["lanes"]]

    def _launch(self, plan: StepPlan) -> Float[np.ndarray, "R V"]:
        device, state = self.device, self._state
        pages = device.limits.num_slabs * device.layout.pages_per_slab
        for moves in map(jnp.asarray, move_batches(plan.moves, pages)):
            table = rename_pages(state["full_table"], moves, num_pages=pages)
            state = {**state, "lanes": device.copy_pages(state["lanes"], moves), "full_table": table}
        for rows in row_batches(plan.table_rows, device.limits.pages_per_row, ROWS):
            tables = state["full_table"], state["local_table"], state["length"]
            full, local, length = set_rows(tables, jnp.asarray(rows))
            state = {**state, "full_table": full, "local_table": local, "length": length}
        bucket = pick_bucket(device.buckets, plan)
        packed = jnp.asarray(pack(plan, device.configs[bucket].pack))
        self._state, logits = device.compiled[bucket](device.params, state, packed)
        return np.asarray(logits)

    def _record(self, plan: StepPlan, logits: Float[np.ndarray, "R V"], texts: list[Text]) -> Int[np.ndarray, " R"]:
        tokens = np.zeros(plan.num_rows, np.int32)
        columns = (plan.starts, plan.starts + plan.counts, plan.full_write_from, plan.local_visible_from)
        spans = [Span(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
        for row, (text, span) in enumerate(zip(texts, spans, strict=True)):
            self.spans[text.name].append(span)
            kept = self.logits if span.end > span.full_write_from else self.replayed
            kept[text.name][span.end - 1] = logits[row]
            tokens[row] = text.tokens[span.end] if span.end < LENGTH else 0
            if not np.isfinite(logits[row]).all():
                tokens[row] = NOT_FINITE
                self.failed.add(text.name)
        return tokens

    def _poison(self) -> None:
        """Write NaN to every page without an owner. The step in flight may still own some, but its reads are done."""
        layout, pool = self.device.layout, self.scheduler.cache.pool
        free: Bool[np.ndarray, "slabs m"] = np.ones((self.device.limits.num_slabs, layout.pages_per_slab), bool)
        free[0] = False
        free.reshape(-1)[np.flatnonzero(pool.full_owners)] = False
        free[np.flatnonzero(pool.local_owners)] = False
        lanes = []
        for lane in self._state["lanes"]:
            pages = np.array(lane).reshape(free.size, -1)
            pages[free.reshape(-1)] = np.nan
            lanes.append(jnp.asarray(pages.reshape(lane.shape)))
        self._state = DeviceState(**{**self._state, "lanes": lanes})


def compare(found: Logits, expected: Float[np.ndarray, "T V"]) -> None:
    """Assert that logits equal `expected` (logits, or the sketch of a parity fixture) at their positions."""
    sketched = expected.shape[1] == COLUMNS
    for position, logits in found.items():
        difference = np.abs((sketch(logits) if sketched else logits) - expected[position]).max()
        assert difference < TOLERANCE, f"logits after position {position} are off by {difference}"

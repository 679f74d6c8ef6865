"""The step programs of an engine: compiled at start, when a step needs them, or beside the steps."""

import ctypes
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from threading import Event, Lock

import jax

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket, pick_bucket
from jswa.exec.compile.ending import end_at_exit
from jswa.exec.compile.limiter import CompileLimiter, side_by_side, together
from jswa.exec.compile.program import compile_step
from jswa.exec.compile.store import ProgramStore
from jswa.exec.mesh import mesh_of
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import Part, StepConfig
from jswa.exec.programs.state import DeviceState
from jswa.kernels import Kernels
from jswa.model.drafters.seam import Drafter
from jswa.model.lora import has_adapters
from jswa.plan import PLAIN, SPLIT, Feature, StepPlan
from jswa.ribs.table import VARIANTS, parts_of
from jswa.stages import LOG

_log = logging.getLogger("jswa")
Family = tuple[Part, str]  # and the variant
_WHOLE: tuple[Family, ...] = tuple(("step", name) for name in VARIANTS)
_DRAFTS: Family = ("propose", PLAIN)
_FORWARD, _FINISH = (dict.fromkeys(getattr(own, half) for own in VARIANTS.values()) for half in ("forward", "finish"))
_HALVES: tuple[Family, ...] = (
    *(("finish", name) for name in _FINISH), _DRAFTS, *(("forward", name) for name in _FORWARD),
)  # fmt: skip
_NAMES: Mapping[Part, str] = {
    "step": "", "propose": ", drafts", "forward": ", forward half", "finish": ", finish half",
}  # fmt: skip
_EARLY = 2  # sizes that a GPU gets before the other families: one of decode steps and one of prompts
REST = 0.25  # of the time that a program took to compile: so long a thread rests before the next, unless plans wait
_OFTEN = 4  # plans that want a program before it is compiled beside the steps: the end of a batch wants many, once


class StepPrograms:
    """The step programs of a runner. It holds no array of a device, so a thread may compile while its engine ends.

    Args:
        params, state: arrays or shapes.
        store: keeps the programs for later starts.

    Attributes:
        configs: the configuration of every step program, by family and bucket.
        compiled: the compiled step programs by their index in `configs` (hashing a config takes 0.2 ms).
        later: the numbers of those that are compiled beside the steps, wanted or not; most useful first.
        compiled_in_steps: step programs that were compiled inside a launch, while requests waited.
        compiled_beside: step programs that other threads have compiled beside the steps (`prepare`, `compile_wanted`).
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: KVLayout,
        limits: Limits,
        buckets: tuple[Bucket, ...],
        kernels: Kernels,
        params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
        state: DeviceState,
        store: ProgramStore | None,
        drafter: Drafter | None = None,
    ) -> None:
        self.buckets = buckets
        self.compiled: dict[int, jax.stages.Compiled] = {}
        self.compiled_in_steps = self.compiled_beside = 0
        self._params = {name: _shape(value) for name, value in params.items()}
        self._state = state
        self._store = store
        self._together = together()
        self._limiter = CompileLimiter(self._together)
        self._counting = Lock()
        self._begun: set[int] = set()  # those that `compile_wanted` has begun
        self.later: list[int] = []
        self._deterministic = limits.one_bucket
        self._features: set[Feature] = {PLAIN}
        self._covered: set[Family] = set()
        self._drafts_too = False  # whether programs with drafts are compiled with the others, not only when wanted
        self.news = Event()  # set when programs are wanted often
        self._wanted: dict[tuple[int, ...], int] = {}  # programs that plans would have run in, and how many plans
        self._by_drafts: dict[tuple[int, bool, str], dict[int, tuple[int, ...]]] = {}  # `_drafting` of decode steps
        self._of_decode: dict[tuple[object, ...], tuple[int, ...]] = {}  # those of decode steps, once compiled
        self._chosen = 0
        self._ended = False
        end_at_exit(self)
        adapters = has_adapters(params)

        def config(bucket: Bucket, part: Part, variant: str) -> StepConfig:
            size, rows, own = limits.page_size, limits.max_rows, VARIANTS[variant]
            width = model.d_model if own.embeds and part != "finish" else 0
            spec = PackSpec.of(bucket, page_size=size, max_rows=rows, section=own.every, adapters=adapters, width=width)
            fixed = model, layout, bucket, spec, kernels
            # A first half does not know whether the second is plain.
            experts = limits.routed_experts and (part == "forward" or (part == "step" and variant != PLAIN))
            return StepConfig(*fixed, variant, part, self._deterministic, limits.speculation, drafter, experts)

        # The second half asks its bucket only whether each row has sampled a token, and in a split step some row has.
        by_rows = tuple(sorted({_finishing(bucket) for bucket in buckets}))
        self._buckets = {family: by_rows if family[0] == "finish" else buckets for family in (*_WHOLE, *_HALVES)}
        self._buckets[_DRAFTS] = tuple(bucket for bucket in buckets if bucket.drafts)
        self.configs = [config(bucket, *family) for family, shapes in self._buckets.items() for bucket in shapes]
        self._numbers = {(c.part, c.variant, c.bucket): number for number, c in enumerate(self.configs)}

    def family(self, family: Family) -> list[int]:
        """Return the numbers of a family's programs, smallest first."""
        return [self._numbers[*family, bucket] for bucket in self._buckets[family]]

    def largest(self, family: Family) -> list[int]:
        """Return the numbers of a family's largest programs, the one for decode steps and the one for all others.

        Every plan can be made so that it runs in one of them: none of them is for drafts alone.
        """
        last = {b.decode: self._numbers[*family, b] for b in self._buckets[family] if self._is_needed(b)}
        return sorted(last.values())

    def _is_needed(self, bucket: Bucket) -> bool:
        """Return whether there are plans that run in no other bucket: rows need not have drafts."""
        return not bucket.drafts or self._deterministic

    def families(self, features: Collection[Feature]) -> list[Family]:
        """Return the families in which plans with these features run; PLAIN is always among them.

        A deterministic engine runs every step in two halves: no other row decides in which program a row runs.
        """
        variants = [name for name in VARIANTS if parts_of(name) <= {*features}]
        found = [] if self._deterministic else [family for family in _WHOLE if family[1] in variants]
        if self._deterministic or SPLIT in features:
            halves = {(half, getattr(VARIANTS[name], half)) for name in variants for half in ("forward", "finish")}
            found += [family for family in _HALVES if family in halves or family == _DRAFTS]
        return found

    def first(self, *, all_at_start: bool, on_gpu: bool) -> list[int]:
        """Return the numbers of the programs that an engine compiles at start, and decide which follow unasked.

        These are all plain ones without late masks, and on a GPU the largest with some; or only the largest
        without. Then a GPU gets its smallest decode step at start too: for one request the largest takes four times as
        long. All other sizes follow there, and the largest programs of the other families early among them.
        """
        first = self.families({PLAIN})
        largest = [number for family in first for number in self.largest(family)]
        every = [number for family in (*_WHOLE, *_HALVES) if not _is_asked(family) for number in self.largest(family)]
        if all_at_start:
            self._drafts_too = True
            whole = [number for family in first for number in self.family(family)]
            return list(dict.fromkeys((*whole, *every))) if on_gpu else whole
        self._covered.update(first)
        if not on_gpu:
            return largest
        begin = sorted({*largest, *(number for family in first for number in self._decoding(family)[:1])})
        sizes, often = self._by_use(first), [f for f in self.families({*_FINISH, SPLIT}) if not _is_asked(f)]
        early = [number for family in often for number in self.largest(family)]
        later = dict.fromkeys((*sizes[:_EARLY], *early, *sizes[_EARLY:], *every))
        self.later = [number for number in later if number not in begin]
        return begin

    def _decoding(self, family: Family) -> list[int]:
        """Return the numbers of a family's programs for decode steps, smallest first, without those for drafts."""
        return [self._numbers[*family, b] for b in self._buckets[family] if b.decode and self._is_needed(b)]

    def _by_use(self, families: Collection[Family]) -> list[int]:
        """Return the numbers of families' programs, without those for drafts: those that halve the widest gaps first.

        Until a program is compiled its plans run in the next larger one that is.
        """
        ranked: list[tuple[int, int]] = []
        for family in families:
            every, decoding = self.family(family), self._decoding(family)
            others = [n for n in every if n not in decoding and self._is_needed(self.configs[n].bucket)]
            for numbers in (decoding, others):
                ranked += [(-(place & -place), n) for place, n in enumerate(reversed(numbers)) if place]
        return [number for _, number in sorted(ranked)]

    def choose(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the number of the program that a plan runs in; or of its drafts, if it has any, and of both halves.

        They may not be compiled, if none of their family has been prepared.
        """
        self._chosen += 1
        key = plan.num_rows, plan.num_places, plan.drafts, plan.variant, bool(plan.late)
        is_decode = not plan.runs_prompts if plan.drafts else plan.num_tokens == plan.num_rows
        if is_decode and key in self._of_decode:
            return self._of_decode[key]
        families: tuple[Family, ...] = (("step", plan.variant),)
        if self._deterministic or plan.late:
            variant = VARIANTS[plan.variant]
            families = (_DRAFTS, ("forward", variant.forward), ("finish", variant.finish))

        def programs(bucket: Bucket) -> tuple[int, ...]:
            return self._programs(families, bucket)

        best = programs(pick_bucket(self.buckets, plan))
        if self._are_compiled(best):
            if is_decode:
                self._of_decode[key] = best
            return best
        if not self._covered.issuperset(families):
            return best
        self._want(best)
        there = tuple(bucket for bucket in self.buckets if self._are_compiled(programs(bucket)))
        return programs(pick_bucket(there, plan))

    def lengths(self, rows: int, *, tokens: int, split: bool, variant: str) -> tuple[int, ...]:
        """Return with how many drafts per row a step of so many rows may run now, in the program of its size.

        A program that is not compiled is wanted, so that it is compiled beside the steps; one of more rows would take
        longer than the drafts save.

        Args:
            tokens: of a step that runs prompts, without drafts; 0: a decode step.
            split: whether the step may run in two halves.
            variant: the widest in which it may run.
        """
        if self._deterministic:
            return tuple(sorted({bucket.drafts for bucket in self.buckets if bucket.drafts}))
        key = rows, split, variant
        best = self._drafting(rows, tokens, split=split, variant=variant) if tokens else self._by_drafts.get(key)
        if best is None:
            best = self._by_drafts[key] = self._drafting(rows, 0, split=split, variant=variant)
        missing = [numbers for numbers in best.values() if not self._are_compiled(numbers)]
        for numbers in missing:
            self._want(numbers)
        return tuple(drafts for drafts, numbers in sorted(best.items()) if numbers not in missing)

    def _drafting(self, rows: int, tokens: int, *, split: bool, variant: str) -> dict[int, tuple[int, ...]]:
        """Return the programs of the size of a step by their number of drafts; arguments as in `lengths`."""
        # The rows that want the variant, or have late masks, need not be among those of the step.
        names = dict.fromkeys((PLAIN, variant))
        families: list[Family] = [("step", name) for name in names]
        if split:
            variants = [VARIANTS[name] for name in names]
            families += [_DRAFTS, *dict.fromkeys(("forward", own.forward) for own in variants)]
            families += dict.fromkeys(("finish", own.finish) for own in variants)
        best: dict[int, tuple[int, ...]] = {}
        most_tokens = self.buckets[-1].tokens
        for bucket in self.buckets:
            drafts = bucket.drafts if tokens else bucket.mean_drafts
            with_drafts = min(tokens + rows * drafts, most_tokens) if tokens else 0
            if bucket.drafts and bucket.decode != bool(tokens) and bucket.holds(rows, with_drafts, drafts):
                best.setdefault(drafts, self._programs(families, bucket))
        return best

    def _programs(self, families: Collection[Family], bucket: Bucket) -> tuple[int, ...]:
        own = [family for family in families if bucket.drafts or family != _DRAFTS]
        return tuple(self._numbers[*f, _finishing(bucket) if f[0] == "finish" else bucket] for f in own)

    def _want(self, numbers: tuple[int, ...]) -> None:
        self._wanted[numbers] = self._wanted.get(numbers, 0) + 1
        if self._wanted[numbers] == _OFTEN:
            self.news.set()

    def _are_compiled(self, numbers: tuple[int, ...]) -> bool:
        return all(number in self.compiled for number in numbers)

    def prepare(
        self,
        feature: Feature,
        *,
        fewest: bool = False,
        pause: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Compile what plans with a feature, and those prepared before, run in.

        Several programs at a time, if there is no pause: then someone waits for them, and no other begins meanwhile.

        Args:
            fewest, pause, stop: see `Runner.prepare`.
            before: called with the number of each program that is not compiled yet.
        """
        families = self.families({*self._features, feature})
        numbers = [n for family in families for n in (self.largest(family) if fewest else self.family(family))]

        def compile_beside_steps(number: int) -> None:
            if stop() or self._ended:
                return
            if number not in self.compiled:
                before(number)
            end = self._compile_beside(number, pause, urgent=not pause) + time.monotonic()
            while time.monotonic() < end and not (stop() or self._ended):
                time.sleep(0.05)

        needed = [n for n in numbers if self._drafts_too or self._is_needed(self.configs[n].bucket)]
        with nullcontext() if pause else self._limiter.urgent():
            side_by_side(needed, compile_beside_steps, 1 if pause else self._together)
        if stop() or self._ended:
            return
        self._features.add(feature)
        self._covered.update(families)

    def compile_wanted(self) -> None:
        """Compile what plans want often, as soon as they do, and meanwhile what follows unasked, until `end` is called.

        Several threads may run this. Each rests after a program, until plans want one.
        """
        while not self._ended:
            number, pause = self._next(), 0.0 if self._wanted_often() else REST
            rest = None if number is None else self._compile_beside(number, pause)
            if self.news.wait(rest):
                self.news.clear()
        self.news.set()  # another thread may be about to wait for it

    def _next(self) -> int | None:
        """Return the number of a program that is to be compiled beside the steps, if there is one."""
        with self._counting:
            number = next((n for n in (*self._wanted_often(), *self.later) if n not in self._begun), None)
            if number is not None:
                self._begun.add(number)
            return number

    def _wanted_often(self) -> list[int]:
        """Return the numbers of the programs that plans want often, and that no thread has begun beside the steps."""
        often = [numbers for numbers, plans in list(self._wanted.items()) if plans >= _OFTEN]
        return [n for numbers in often for n in numbers if n not in self.compiled and n not in self._begun]

    def _compile_beside(self, number: int, pause: float, *, urgent: bool = False) -> float:
        """Compile a program unless another thread has, count it, and return for how many seconds to rest then."""
        begin, chosen = time.monotonic(), self._chosen
        compiled = self.compile_once(number, urgent=urgent)
        with self._counting:
            self.compiled_beside += compiled
        # Tracing holds Python's lock, which steps need too.
        return pause * (time.monotonic() - begin) if compiled and self._chosen > chosen else 0.0

    def end(self) -> None:
        """Let no thread that compiles beside the steps begin a further program."""
        self._ended = True
        self.news.set()

    def seize(self, seconds: float) -> bool:
        """Wait until no program is being compiled, and let none begin; return False after `seconds` (-1: no limit)."""
        return self._limiter.seize(seconds)

    def compile_now(self, number: int) -> bool:
        """Compile a step program that a step waits for, as `compile_once`, before all that no one waits for."""
        LOG.info("a step waits until its program is compiled: %s", described(self.configs[number]))
        with self._limiter.urgent():
            return self.compile_once(number, urgent=True)

    def compile_once(self, number: int, *, urgent: bool = False) -> bool:
        """Compile a step program unless another thread has; return whether it was compiled here.

        `urgent`: see `CompileLimiter.permit`.
        """
        with self._limiter.permit(number, lambda: number in self.compiled, urgent=urgent) as begins:
            if begins:
                _log.info("compiling %s", described(self.configs[number]))
                self.compiled[number] = self.compile(number)
        return begins

    def compile(self, number: int) -> jax.stages.Compiled:
        """Compile a step program, or load it.

        On a CPU, whose memory others share, the system gets back the hundreds of megabytes that this takes.
        """
        program = compile_step(self.configs[number], self._params, self._state, self._store)
        if jax.default_backend() == "cpu":
            _release_freed()
        return program


def _finishing(bucket: Bucket) -> Bucket:
    """Return the bucket of the second half of a step: it depends on rows and drafts alone."""
    return Bucket.verifying(bucket.rows, bucket.drafts)


def _is_asked(family: Family) -> bool:
    """Return whether a family's programs are compiled only when a request asks for them."""
    return VARIANTS[family[1]].asked


def described(config: StepConfig) -> str:
    """Return the name of a program in the log."""
    bucket = config.bucket
    size = f"decode step of {bucket.rows} rows" if bucket.decode else f"step of {bucket.tokens} tokens"
    drafts = f" with {bucket.drafts} drafts each" if bucket.drafts else ""
    return f"{size}{drafts}{_NAMES[config.part]}{'' if config.variant == PLAIN else f', {config.variant}'}"


def _shape(value: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = value.sharding if mesh_of(value) is not None else None
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _release_freed() -> None:
    """Give the memory that the process has freed back to the system, where its C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

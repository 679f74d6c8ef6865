"""The step programs of an engine: compiled at start, when a step needs them, or beside the steps."""

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import ConfigError
from jswa.exec.backends import Backends
from jswa.exec.buckets import Bucket, pick_bucket
from jswa.exec.compile.store import ProgramStore, compiled
from jswa.exec.mesh import REPLICATED, mesh_of, on_mesh, specs_of
from jswa.exec.pack import PackSpec
from jswa.exec.programs.state import DeviceState
from jswa.exec.programs.step import StepConfig, step
from jswa.model.lora import has_adapters
from jswa.model.transformer import Params, run_dtype
from jswa.plan import Logprobs, StepPlan
from pallas_kernels.errors import NoExpertKernel, NoKernel

_log = logging.getLogger("jswa")
_FAMILIES: tuple[Logprobs, ...] = get_args(Logprobs)
# XLA's rematerialization counts the arena once per write, as if no write were in place. It concludes that memory is
# short, and recomputes all indices in every layer. Its CPU scheduler for concurrency widens the 16-bit weights of all
# layers to float32 before the first product; the one for memory widens each matrix when its product comes.
_SCHEDULER = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
_OPTIONS = {"xla_disable_hlo_passes": "rematerialization", "xla_cpu_scheduler_type": _SCHEDULER}
_OFTEN = 4  # plans that want a program before it is compiled beside the steps: the end of a batch wants many, once
_threads: dict[Thread, Callable[[], None]] = {}  # those that compile beside steps, and what ends them


class StepPrograms:
    """The step programs of a runner. It holds no array of a device, so a thread may compile while its engine ends.

    Args:
        params, state: arrays or shapes.
        store: keeps the programs for later starts.

    Attributes:
        configs: the configuration of every step program, by family and bucket.
        compiled: the compiled step programs by their index in `configs` (hashing a config takes 0.2 ms).
        compiled_in_steps: step programs that were compiled inside a launch, while requests waited.
        compiled_beside: step programs that `prepare` has compiled.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: KVLayout,
        limits: Limits,
        buckets: tuple[Bucket, ...],
        backends: Backends,
        params: Params,
        state: DeviceState,
        store: ProgramStore | None,
    ) -> None:
        self.buckets = buckets
        self.compiled: dict[int, jax.stages.Compiled] = {}
        self.compiled_in_steps = self.compiled_beside = 0
        self._params = {name: _shape(value) for name, value in params.items()}
        self._state = state
        self._store = store
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self._lock = Lock()
        self._covered: set[Logprobs] = set()
        self.news = Event()  # set when a program is wanted often
        self._wanted: dict[int, int] = {}  # programs that plans would have run in, and how many plans
        self._chosen = 0
        adapters = has_adapters(params)

        def config(bucket: Bucket, logprobs: Logprobs) -> StepConfig:
            size, rows, targets = limits.page_size, limits.max_rows, logprobs == "prompt"
            spec = PackSpec.of(bucket, page_size=size, max_rows=rows, targets=targets, adapters=adapters)
            return StepConfig(model, layout, bucket, spec, backends, logprobs)

        self.configs = [config(bucket, family) for family in _FAMILIES for bucket in buckets]

    def family(self, logprobs: Logprobs) -> range:
        """Return the numbers of a family's step programs."""
        first = _FAMILIES.index(logprobs) * len(self.buckets)
        return range(first, first + len(self.buckets))

    def largest(self, logprobs: Logprobs) -> list[int]:
        """Return the numbers of a family's largest programs, the one for decode steps and the one for all others."""
        last = {bucket.decode: number for bucket, number in zip(self.buckets, self.family(logprobs), strict=True)}
        return sorted(last.values())

    def first(self, *, all_at_start: bool, on_gpu: bool) -> list[int]:
        """Return the numbers of the programs that an engine compiles at start.

        These are all without log probabilities, and on a GPU the largest with some; or only the largest without.
        """
        if not all_at_start:
            self._covered.add("none")
            return self.largest("none")
        late = [number for family in _FAMILIES[1:] for number in self.largest(family)] if on_gpu else []
        return [*self.family("none"), *late]

    def choose(self, plan: StepPlan) -> int:
        """Return the number of the program that a plan runs in; not compiled, if none of a family has been prepared."""
        self._chosen += 1
        family = self.family(plan.logprobs)
        best = family[self._numbers[pick_bucket(self.buckets, plan)]]
        if best in self.compiled or plan.logprobs not in self._covered:
            return best
        self._wanted[best] = self._wanted.get(best, 0) + 1
        if self._wanted[best] == _OFTEN:
            self.news.set()
        there = tuple(b for b, number in zip(self.buckets, family, strict=True) if number in self.compiled)
        return family[self._numbers[pick_bucket(there, plan)]]

    def prepare(
        self,
        logprobs: Logprobs,
        *,
        fewest: bool = False,
        pause: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Compile a family in the calling thread, one program after the other.

        Args:
            fewest, pause, stop: see `Runner.prepare`.
            before: called with the number of each program that is not compiled yet.
        """
        for number in self.largest(logprobs) if fewest else self.family(logprobs):
            if stop():
                return
            if number not in self.compiled:
                before(number)
            begin, chosen = time.monotonic(), self._chosen
            if self.compile_once(number):
                self.compiled_beside += 1
                wait = pause * (time.monotonic() - begin) if self._chosen > chosen else 0.0
                end = time.monotonic() + wait
                while time.monotonic() < end and not stop():
                    time.sleep(0.05)
        self._covered.add(logprobs)

    def compile_wanted(self, stop: Callable[[], bool]) -> None:
        """Compile what plans want often, as soon as they do, until `stop` is true; `news` must be set then."""
        while not stop():
            self.news.wait()
            self.news.clear()
            for number in [number for number, plans in list(self._wanted.items()) if plans >= _OFTEN]:
                if not stop():
                    self.compiled_beside += self.compile_once(number)

    def compile_once(self, number: int) -> bool:
        """Compile a step program unless another thread has; return whether it was compiled here."""
        with self._lock:
            if number in self.compiled:
                return False
            config = self.configs[number]
            _log.info("compiling %s (log probabilities: %s)", config.bucket, config.logprobs)
            self.compiled[number] = self.compile(number)
            return True

    def compile(self, number: int) -> jax.stages.Compiled:
        """Compile a step program, or load it."""
        return compile_step(self.configs[number], self._params, self._state, self._store)


def jit_step(config: StepConfig, params: Mapping[str, Any], state: DeviceState) -> jax.stages.Wrapped:
    """Return the jitted step of a bucket: (params, state, packed), state donated. Accepts arrays or shapes."""
    mesh, packed = mesh_of(next(iter(params.values()))), np.zeros(config.pack.size, np.int32)
    run = on_mesh(partial(step, config=config), mesh, (params, state, packed), (specs_of(state), REPLICATED))
    return jax.jit(run, donate_argnums=1, compiler_options=dict(_OPTIONS))


def compile_step(
    config: StepConfig, params: Mapping[str, Any], state: DeviceState, store: ProgramStore | None = None
) -> jax.stages.Compiled:
    """Compile one bucket's step ahead of time, from arrays or shapes, or load it. The state is donated."""
    precision = "highest" if run_dtype(params) == jnp.float32 else "default"
    arguments = params, state, np.zeros(config.pack.size, np.int32)
    with jax.default_matmul_precision(precision), _unsupported(config.backends):
        function = jit_step(config, params, state)
        return compiled(store, f"step {precision} {config}", function, arguments, str(_OPTIONS))


def compile_beside(programs: StepPrograms, owner: object) -> Callable[[], None]:
    """Compile the programs that plans want in a thread of its own; return a function that ends it.

    It ends too with `owner`, and with the process, which waits for the program that is being compiled: XLA's threads
    must not run while the interpreter ends.
    """
    ended, news = Event(), programs.news

    def run() -> None:
        try:
            programs.compile_wanted(ended.is_set)
        except Exception:
            _log.exception("steps stay in the programs that there are, since a smaller one cannot be compiled")
        finally:
            _threads.pop(thread, None)

    def end() -> None:
        ended.set()
        news.set()

    # As the last one registered it is called first: jax forgets its caches at exit, which a thread that traces needs.
    atexit.unregister(_end_threads)
    atexit.register(_end_threads)
    thread = Thread(target=run, name="compile beside", daemon=True)
    _threads[thread] = end
    weakref.finalize(owner, end).atexit = False
    thread.start()
    return end


def _end_threads() -> None:
    running = dict(_threads)
    for end in running.values():
        end()
    for thread in running:
        thread.join()


def _shape(value: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = value.sharding if mesh_of(value) is not None else None
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


@contextmanager
def _unsupported(backends: Backends) -> Iterator[None]:
    """Report a kernel that cannot serve the model as an error of its option: no other kernel is chosen silently."""
    try:
        yield
    except NoKernel as error:
        raise ConfigError("attention_backend", backends.attention, str(error)) from error
    except NoExpertKernel as error:
        raise ConfigError("moe_backend", backends.experts, str(error)) from error

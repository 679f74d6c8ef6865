"""Owns parameters and device state; launches plans in the step programs."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Thread
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int, Shaped

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.adapters import AdapterRoom
from jswa.exec.buckets import bucket_table
from jswa.exec.compile.ending import compile_beside
from jswa.exec.compile.limiter import together
from jswa.exec.compile.program import no_drafts, step_input
from jswa.exec.compile.steps import StepPrograms, described
from jswa.exec.compile.store import ProgramStore
from jswa.exec.launches import (
    PREPARE,
    SET_ADAPTER,
    STEP,
    Pending,
    ProgramLaunch,
    decode,
    encode,
    logits_launches,
    move_launches,
    plan_launches,
)
from jswa.exec.mesh import COLUMNS, mesh_of, put
from jswa.exec.programs.drafts.models import DRAFTER_PREFIX
from jswa.exec.programs.sampling.rows import Beside, StepOutputs
from jswa.exec.programs.state import Carry, DeviceState, allocate, state_shapes
from jswa.exec.programs.step import Half, sampling_state
from jswa.exec.programs.transfer import compile_read_slots, compile_write_slots, copy_width, slot_batch
from jswa.exec.side_programs import compile_side_programs, idle_launches
from jswa.forms.base.names import has_other_products
from jswa.kernels import PORTABLE, Kernels
from jswa.model.binding import head_names, run_dtype
from jswa.model.drafters.seam import Drafter
from jswa.model.lora import Pairs, without_adapters
from jswa.model.transformer import Params
from jswa.plan import Feature, RowMask, StepPlan
from jswa.stages import stage

_log = logging.getLogger("jswa")
_BESIDE = 2  # programs at a time beside the steps of a GPU: one is traced, and XLA takes all processors for the other
_SLOW = "each is compiled, which takes a while, unless an earlier start has kept it"
_WARM_UPS = 3  # the first run of a program loads its kernels, the second records its CUDA graph


class Runner:
    """Holds the device state alone: each launch donates it to the step and keeps the state that comes back.

    At start it compiles the fewest programs that hold every plan, on a GPU also the smallest for decode steps; or all
    of the plain steps. Others follow beside the steps; on a GPU behind `warm_up`, unasked.
    `prepare` compiles those of other variants and late masks, `prepare_copies` those that copy pages to the host.

    Args:
        model, layout: of one device's part, if the parameters are spread over a mesh.
        kv_dtype: of the arena; by default that of the parameters.
        broadcast: called with each message of launches before they run. With several hosts, the runner of the first
            host broadcasts, and the runners of the others `follow`.
        adapters: the room for LoRA adapters among the parameters, if there is any.
        store: keeps compiled programs for later starts.
        all_at_start: False: compile only the fewest programs now, and the others in threads, until `close`.
        drafter: one device's part of a drafter whose parameters are among `params`.

    Attributes:
        configs, compiled: see `StepPrograms`.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        layout: KVLayout,
        limits: Limits,
        *,
        on_gpu: bool = False,
        kernels: Kernels = PORTABLE,
        kv_dtype: jnp.dtype | None = None,
        broadcast: Callable[[bytes], None] | None = None,
        adapters: AdapterRoom | None = None,
        store: ProgramStore | None = None,
        all_at_start: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        self.layout = layout
        self.limits = limits
        self.params = params
        # XLA's CPU product of one row in 16 bits is a scalar loop: it takes 8 times as long as that of two rows.
        few = 2 if run_dtype(params).itemsize == 2 and has_other_products(params, kernels.linear) else 1
        self.buckets = bucket_table(limits, on_gpu=on_gpu, fewest_rows=few, tail=model.has_tail)
        self._model = model
        self._kernels = kernels
        self._num_pages = limits.num_slabs * layout.pages_per_slab
        self._preparing = Lock()
        self._broadcast = broadcast
        self._copies: tuple[jax.stages.Compiled, jax.stages.Compiled] | None = None  # to the host, and back
        self._adapters = adapters
        self._store = store
        self._mesh = mesh_of(next(iter(params.values())))
        self._on_cpu = self._mesh is None and jax.default_backend() == "cpu"
        carries = drafter is not None and drafter.carry
        self._carry = Carry(carries, jnp.dtype(run_dtype(params))) if carries else None
        kv_dtype = kv_dtype or run_dtype(params)
        self._shapes = state_shapes(layout, limits, model.vocab_size, kv_dtype, self._mesh, self._carry)
        self._steps = StepPrograms(model, layout, limits, self.buckets, kernels, params, self._shapes, store, drafter)
        self.configs, self.compiled = self._steps.configs, self._steps.compiled
        first = self._steps.first(all_at_start=all_at_start, on_gpu=on_gpu)
        self._compile_first(first)
        self.allocate_arena()
        self._head = head_names(model, params)
        self._half: list[Any] = []  # results of a launched first half that wait for the second: `Half`, `Beside`
        self._drafts: jax.Array | None = None  # of a step whose first half takes them
        self._more_after_warm_up = on_gpu and not all_at_start
        if len(first) < len(self.buckets) and not self._more_after_warm_up:
            compile_beside(self._steps, self)

    def _compile_first(self, first: list[int]) -> None:
        """Compile the step programs of these numbers, and all programs beside the steps."""
        # A CPU compiles one at a time (350 MB, and others share the memory), and traces the next one meanwhile.
        pool = ThreadPoolExecutor(max(2, together()))
        try:
            with stage("step programs", len(first), f"{len(first)}", slow=_SLOW) as done:
                steps = {number: pool.submit(self._steps.compile, number) for number in first}
                self._beside = pool.submit(compile_side_programs, self.layout, self._shapes, self._store).result()
                for number, step in steps.items():
                    self.compiled[number] = step.result()
                    done(1)
        finally:
            pool.shutdown(cancel_futures=True)  # of a start that has failed, or was interrupted

    def close(self) -> None:
        """End the threads that compile beside the steps, each after the program that it compiles."""
        self._steps.end()

    @property
    def compiled_in_steps(self) -> int:
        """Step programs that were compiled inside `launch`, while requests waited."""
        return self._steps.compiled_in_steps

    @property
    def compiled_beside(self) -> int:
        """Step programs that were compiled after the start, in another thread than the steps."""
        return self._steps.compiled_beside

    def warm_up(self) -> None:
        """Check all kernels, then run every compiled program three times without rows: nothing on the device changes.

        Then no request waits until their kernels are loaded and CUDA graphs recorded. With several hosts, each calls
        this before the first launch. Raises KernelError if a kernel gives wrong numbers.
        """
        from jswa.exec.selfcheck.check import check_kernels  # imports Mosaic, which takes 0.5 s

        sizes = self.layout, self.limits, self.buckets
        check_kernels(self._model, self.params, *sizes, self._kernels, self.kv_dtype, self._store)
        with stage("first runs", len(self.compiled), f"{len(self.compiled)} programs, {_WARM_UPS} times each") as done:
            self._run_all(done)
        if self._more_after_warm_up:
            compile_beside(self._steps, self, min(_BESIDE, together()))

    def _run_all(self, done: Callable[[int], object]) -> None:
        for _ in range(_WARM_UPS):
            self._run(list(idle_launches(self.layout, self._shapes)))
            self._run([] if self._adapters is None else list(self._adapters.idle_launches()))
        for number in sorted(self.compiled):
            config, since = self.configs[number], time.perf_counter()
            for _ in range(_WARM_UPS):
                idle = step_input(config, self.params)
                if isinstance(idle, Half):
                    self._half = [self._put(idle), Beside()]
                self._drafts = self._put(no_drafts(config))
                self._run([ProgramLaunch(STEP + number, () if isinstance(idle, Half) else (idle,))])
            jax.block_until_ready(self.state["last_token"])  # type: ignore[no-untyped-call]
            _log.debug("%s: %.0f ms", described(config), 1e3 * (time.perf_counter() - since))
            done(1)

    def launch(self, plan: StepPlan) -> Pending:
        """Launch a plan, or the first half of its step if it has late masks, and return at once.

        Uploads once, and once per batch of moves, of table rows, or logits state.
        """
        numbers = self._steps.choose(plan)
        begin = numbers[:-1] or numbers  # without a second half
        vocab, limits, rows = self._model.vocab_size, self.limits, self.limits.max_rows
        sizes = self._num_pages, limits.pages_per_row, vocab, limits.speculation
        outputs = self._send(plan_launches(plan, {number: self.configs[number].pack for number in begin}, *sizes))
        drafts = self._drafts if plan.late and len(begin) > 1 else None
        if drafts is not None and not self._on_cpu:
            drafts.copy_to_host_async()

        def finish(masks: tuple[RowMask, ...]) -> StepOutputs:
            outputs = self._send([*logits_launches((), masks, rows, vocab), ProgramLaunch(STEP + numbers[-1], ())])
            assert outputs is not None
            return outputs

        return Pending(plan, finish(()) if len(numbers) > 1 and not plan.late else outputs, finish, drafts)

    def _send(self, launches: list[ProgramLaunch]) -> StepOutputs | None:
        """Run launches here and on the other hosts; return the outputs of the step among them, on their way here."""
        if self._broadcast is not None:
            self._broadcast(encode(launches))
        outputs = self._run(launches)
        if not self._on_cpu:  # whose arrays are in host memory
            for array in jax.tree.leaves(outputs):
                array.copy_to_host_async()
        return outputs

    def lengths(self, rows: int, *, tokens: int, split: bool, variant: str) -> tuple[int, ...]:
        """Return with how many drafts per row a step of so many rows may run now; see `StepPrograms.lengths`."""
        return self._steps.lengths(rows, tokens=tokens, split=split, variant=variant)

    def set_adapter(self, slot: int, number: int, pairs: Pairs) -> None:
        """Write an adapter to a slot of the room, which no row of a later plan may use meanwhile."""
        assert self._adapters is not None
        for launch in self._adapters.launches(slot, number, pairs):
            self._send([launch])

    def replace_params(self, params: Params) -> None:
        """Run all later steps with these parameters; keep those that are not among them, such as adapters."""
        self.params = {**self.params, **params}

    def free_params(self) -> None:
        """Free the parameters of the base model, without a drafter's; no step may run until `replace_params`."""
        base = {name for name in without_adapters(self.params) if not name.startswith(DRAFTER_PREFIX)}
        self.params = {name: value for name, value in self.params.items() if name not in base}

    def free_arena(self) -> None:
        """Free the device state; no step may run until `allocate_arena`."""
        self.state: DeviceState = cast(DeviceState, {})

    def allocate_arena(self) -> None:
        """Allocate a device state that has run nothing."""
        self.state = allocate(self.layout, self.limits, self._model.vocab_size, self._shapes, self._carry)

    def follow(self, messages: Iterable[bytes]) -> None:
        """Run the launches that the first host broadcasts, until it ends."""
        for message in messages:
            launches = decode(message)
            if launches[0].program == PREPARE:
                number = int(launches[0].arrays[0])
                Thread(target=self._steps.compile_once, args=(number,), name="prepare", daemon=True).start()
            else:
                self._run(launches)

    def prepare(
        self, feature: Feature, *, fewest: bool = False, pause: float = 0.0, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Compile what plans with a feature run in; another thread may launch meanwhile.

        Args:
            fewest: only the largest buckets, which hold every plan; until the others are compiled, plans run in these.
            pause: waits after each program that many times as long as it took, if steps were launched meanwhile:
                tracing holds the GIL, which the steps need too.
            stop: whether to end now; asked before each program.
        """
        self._steps.prepare(feature, fewest=fewest, pause=pause, stop=stop, before=self._announce)

    def _announce(self, number: int) -> None:
        """Have the other hosts compile a step program too."""
        if self._broadcast is not None:
            self._broadcast(encode([ProgramLaunch(PREPARE, (np.int32(number),))]))

    @property
    def kv_dtype(self) -> np.dtype:
        """The dtype of the KV arena."""
        return np.dtype(self._shapes["lanes"][0].dtype)

    def move(self, moves: Int[np.ndarray, "M 3"]) -> None:
        """Move pages outside of a plan, before `write_slots` writes to slots that these moves made free."""
        self._run(list(move_launches(moves, self._num_pages)))

    @property
    def slots_per_copy(self) -> int:
        """Slots that `read_slots` or `write_slots` takes at most."""
        return copy_width(self.layout, self.kv_dtype.itemsize)

    def prepare_copies(self) -> None:
        """Compile the programs that copy slots, in the calling thread; another thread may launch meanwhile."""
        with self._preparing:
            if self._copies is None:
                arguments = self.layout, self._shapes, self._store
                self._copies = compile_read_slots(*arguments), compile_write_slots(*arguments)

    def read_slots(self, ids: Int[np.ndarray, " n"]) -> list[jax.Array]:
        """Start to read slots, as the last launched step leaves them; return the lanes, `[slots_per_copy, elems]` each.

        The first n rows count. With several devices the elements of a lane are device by device.
        """
        self.prepare_copies()
        assert self._copies is not None
        with jax.transfer_guard("disallow"), jax.no_tracing(True):
            lanes: list[jax.Array] = self._copies[0](self.state, self._put_ids(ids))
        for lane in lanes:
            lane.copy_to_host_async()
        return lanes

    def write_slots(
        self,
        ids: Int[np.ndarray, " n"],
        contents: list[Shaped[np.ndarray, "m elems"]],
        rows: Int[np.ndarray, " n"],
    ) -> None:
        """Overwrite each slot with a row of `contents`, by lane, and in each lane by device; the next step sees it."""
        self.prepare_copies()
        assert self._copies is not None
        # Padding ids are dropped, so any row may stand there.
        chosen = np.resize(rows, self.slots_per_copy)
        parts = self._put_slots([lane[chosen] for lane in contents])
        with jax.transfer_guard("disallow"), jax.no_tracing(True):
            self.state = self._copies[1](self.state, self._put_ids(ids), parts)

    def _put_ids(self, ids: Int[np.ndarray, " n"]) -> jax.Array:
        return self._put(slot_batch(ids, self._num_pages, self.slots_per_copy))  # type: ignore[no-any-return]

    def _put_slots(self, parts: list[Shaped[np.ndarray, "width elems"]]) -> list[jax.Array]:
        """Put the contents of a batch of slots on the devices that they came from."""
        each = self.layout.devices
        lanes = [np.concatenate(parts[n : n + each], axis=1) for n in range(0, len(parts), each)]
        return list(jax.device_put(lanes, None if self._mesh is None else NamedSharding(self._mesh, COLUMNS)))

    def _put(self, tree: Any) -> Any:
        return put(tree, self._mesh)

    def _run(self, launches: Sequence[ProgramLaunch]) -> StepOutputs | None:
        """Run launches in order; return the outputs of the step among them, if there is one."""
        for number in [program - STEP for program, _ in launches if program >= STEP]:
            self._steps.compiled_in_steps += number not in self.compiled and self._steps.compile_now(number)
        outputs = None
        for program, arrays in launches:
            if program >= STEP and self._on_cpu:
                # The call takes a numpy array in 2 µs; `device_put` took 50 to 430, as its code had left the caches.
                with jax.no_tracing(True):
                    outputs = self._run_step(program - STEP, *arrays)
                continue
            # In steady state nothing is traced, and only explicit puts move data to the device.
            with jax.transfer_guard("disallow"), jax.no_tracing(True):
                if program == SET_ADAPTER and self._adapters is not None:
                    self.params = self._adapters.run(self.params, arrays)
                elif program < STEP:
                    self.state = self._beside.run(program, self.state, self._put(arrays))
                else:
                    outputs = self._run_step(program - STEP, *self._put(arrays))
        return outputs

    def _run_step(self, number: int, *packed: Any) -> StepOutputs | None:
        """Run a step, its drafts or one of its halves; only a whole step and a second half have outputs."""
        program, config, part = self.compiled[number], self.configs[number], self.configs[number].part
        if part == "propose":
            self.state, self._drafts = program(self.params, self.state, *packed)
            return None
        if part == "forward":
            drafts = [self._drafts] if config.bucket.drafts else []
            self.state, *self._half = program(self.params, self.state, *packed, *drafts)
            return None
        if part == "finish":
            half, beside = self._half
            head = {name: self.params[name] for name in self._head}
            sampled, outputs = program(head, sampling_state(self.state), half)
            self.state, self._half = {**self.state, **sampled}, []
            return outputs._replace(**beside._asdict())  # type: ignore[no-any-return]
        self.state, outputs = program(self.params, self.state, *packed)
        return outputs  # type: ignore[no-any-return]

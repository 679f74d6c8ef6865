"""The compiled programs of a step: indices once, KV updated in place; no tracing and one upload in steady state."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.launches import Pending
from jswa.exec.pack import PackSpec, pack
from jswa.exec.programs import indices as indices_module
from jswa.exec.programs import step as step_module
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.pages import move_batches
from jswa.exec.programs.state import DeviceState, state_bytes, state_shapes
from jswa.exec.programs.step import step
from jswa.exec.runner import Runner
from jswa.exec.side_programs import compile_copy_pages
from jswa.model.binding import param_shapes
from jswa.plan import PLAIN, Request, StepPlan
from jswa.sched.scheduler import Scheduler
from jswa.types import SamplingParams
from tests.support.oracles import small_engine_parts, small_model
from tools.aot.measures.programs import equations, integer_gathers

pytestmark = pytest.mark.optimized
FLOAT32 = jnp.dtype("float32")
MIXED, DECODE = Bucket(24, 3, decode=False), Bucket(3, 3, decode=True)
Apply = Callable[[np.ndarray], object]
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "pred": 1, "u8": 1, "s8": 1}


def trace(pattern: str, bucket: Bucket, dtype: str = "float32", variant: str = PLAIN) -> Any:
    """Return the jaxpr of one step of a small model, without compiling. Small letters: layers with shared KV."""
    model = small_model(pattern.upper(), d_model=16)
    owners = {kind: index for index, kind in enumerate(pattern)}
    layers = [
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, kv_from=owners[k.upper()] if k.islower() else None)
        )
        for k, layer in zip(pattern, model.layers, strict=True)
    ]
    model = dataclasses.replace(model, layers=tuple(layers))
    layout, limits = KVLayout.of(model, 4), Limits(64, 3, 24, page_size=4, num_slabs=9)
    spec = PackSpec.of(bucket, page_size=4, max_rows=3, section=variant == "prompt_logprobs")
    config = StepConfig(model, layout, bucket, spec, variant=variant)
    kind = jnp.dtype(dtype)
    packed = np.zeros(config.pack.size, np.int32)
    program = jax.jit(partial(step, config=config))
    return program.trace(param_shapes(model, kind), state_shapes(layout, limits, model.vocab_size, kind), packed).jaxpr


def test_the_program_for_one_device_has_no_collectives() -> None:
    """No mesh, no reduction over devices, no axis index."""
    names = {equation.primitive.name for _, equation in equations(trace("LF", MIXED, variant="prompt_logprobs"))}
    assert "dot_general" in names
    found = {n for n in names if n.startswith(("shard_map", "psum", "pmax", "pmin", "all_gather", "axis_index"))}
    assert not found


@pytest.mark.parametrize("bucket", [MIXED, DECODE], ids=["mixed", "decode"])
def test_indices_are_gathered_once_for_any_number_of_layers(bucket: Bucket) -> None:
    """The same integer gathers for 2 and 20 local layers, and for 1 and 4 full ones, all outside of layers."""
    few = integer_gathers(trace("LLF", bucket))
    assert len(few) > 0
    assert integer_gathers(trace("L" * 20 + "FFFF", bucket)) == few
    assert {scope.split("/")[1] for scope in few} <= {"indices", "logits_state", "sampling"}


def products(jaxpr: Any) -> dict[str, set[int]]:
    """Return how many tokens each layer runs: rows of its matrix products outside attention."""
    found: dict[str, set[int]] = {}
    for scope, equation in equations(jaxpr):
        layer = next((part for part in scope.split("/") if part.startswith("layer_")), None)
        if equation.primitive.name == "dot_general" and layer and "attention" not in scope.split("/"):
            found.setdefault(layer, set()).add(equation.invars[0].aval.shape[0])
    return found


def test_layers_after_the_last_stored_kv_run_one_token_a_row() -> None:
    """Also in prefill: no other token is needed. With prompt logprobs they run all tokens."""
    rows, tokens = MIXED.rows, MIXED.tokens
    owners, tail = [f"layer_{i}" for i in range(3)], [f"layer_{i}" for i in range(3, 6)]
    found = products(trace("LLFllf", MIXED))
    assert found == {**{key: {tokens} for key in owners}, **{key: {rows} for key in tail}}
    assert products(trace("LLFllF", MIXED)) == {key: {tokens} for key in [*owners, *tail]}
    assert products(trace("LLFllf", MIXED, variant="prompt_logprobs")) == {key: {tokens} for key in [*owners, *tail]}


def test_the_gather_count_sees_a_gather_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a layer that gathers its own indices adds one gather for each layer."""
    attend = step_module.attend_layer

    def wasteful(config: StepConfig, indices: Any, *rest: Any, last: bool) -> Any:
        write_pages = indices.local.write_pages[indices.local.write_offsets]
        return attend(config, indices._replace(local=indices.local._replace(write_pages=write_pages)), *rest, last=last)

    few = len(integer_gathers(trace("LLF", MIXED)))
    monkeypatch.setattr(step_module, "attend_layer", wasteful)
    assert len(integer_gathers(trace("LLF", MIXED))) == few + 3


def test_indices_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`step_indices` is called once per program; all layers get its result."""
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["bucket"])
        return original(*args, **kwargs)

    original = indices_module.step_indices
    monkeypatch.setattr(step_module, "step_indices", counted)
    trace("LLLFLLLF", MIXED)
    assert calls == [MIXED]


@pytest.mark.parametrize("bucket", [MIXED, DECODE], ids=["mixed", "decode"])
def test_a_step_in_bfloat16_promotes_nothing(bucket: Bucket) -> None:
    """Under strict promotion the whole step can be traced in bfloat16, and no lane changes its type."""
    outputs = [value.aval for value in trace("LLF", bucket, "bfloat16").jaxpr.outvars]
    lanes = [a.dtype for a in outputs if a.ndim == 3 and jnp.issubdtype(a.dtype, jnp.floating)]
    assert lanes == [jnp.bfloat16]


def program_of(runner: Runner, bucket: Bucket) -> jax.stages.Compiled:
    """Return a bucket's program without log probabilities."""
    return runner.compiled[runner.buckets.index(bucket)]


def largest_copy(text: str) -> int:
    """Return the bytes of the largest array that a `copy` instruction of a compiled program makes."""
    sizes = [0]
    for kind, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", text):
        sizes.append(_BYTES[kind] * int(np.prod([int(n) for n in shape.split(",") if n])))
    return max(sizes)


def assert_in_place(program: jax.stages.Compiled, runner: Runner, donated: Any) -> None:
    """Assert that the donated arrays are updated in place: all of them are aliased, no copy is as large as a lane."""
    lane = runner.state["lanes"][0].nbytes
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == state_bytes(donated)
    assert largest_copy(program.as_text() or "") < lane
    assert memory.temp_size_in_bytes < lane


def test_every_bucket_updates_the_kv_in_place() -> None:
    """Alias bytes equal the state's bytes; no copy is as large as a lane, nor are all temporaries together."""
    *_, runner = small_engine_parts()
    assert {(bucket.rows, bucket.tokens) for bucket in runner.buckets} == {(1, 1), (2, 2), (3, 3), (3, 16)}
    seen = "u16[{},{}]".format(*runner.state["for_logits"]["seen"].shape)
    for bucket in runner.buckets:
        program = program_of(runner, bucket)
        assert_in_place(program, runner, runner.state)
        text = program.as_text() or ""
        assert seen in text
        assert not re.search(rf"= {re.escape(seen)}\S* copy\(", text), "the table of counts is copied"


def test_warming_up_changes_nothing_on_the_device() -> None:
    """Every program runs three times: arena, page tables, last tokens and logits state are the same bytes as before."""
    *_, runner = small_engine_parts()
    rng = np.random.default_rng(0)
    before = jax.tree.map(lambda leaf: rng.integers(0, 256, leaf.nbytes, np.uint8).view(leaf.dtype), runner.state)
    pages = runner.limits.num_slabs * runner.layout.pages_per_slab
    for table in ("full_table", "local_table"):
        before[table] = (before[table].view(np.uint32) % pages).astype(np.int32)
    held, runs = {**runner.state}, Counter[object]()
    runner.state = jax.tree.map(lambda array, leaf: jnp.asarray(array.reshape(leaf.shape)), before, held)
    programs = dict(runner.compiled)
    try:
        for number, program in programs.items():
            runner.compiled[number] = counted(program, runs, number)  # type: ignore[assignment]
        runner.warm_up()
        after = jax.tree.map(np.asarray, runner.state)
    finally:
        runner.compiled.update(programs)
        runner.state = DeviceState(**held)  # type: ignore[typeddict-item]
    assert runs == dict.fromkeys(programs, 3)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert one.tobytes() == other.tobytes()


def counted(program: Callable[..., Any], runs: "Counter[object]", number: int) -> Callable[..., Any]:
    """Return the program; its runs are counted."""

    def run(*arguments: Any) -> Any:
        runs[number] += 1
        return program(*arguments)

    return run


def test_pages_are_copied_in_place() -> None:
    """`copy_pages` updates the lanes in place too."""
    _, _, layout, _, runner = small_engine_parts()
    assert_in_place(compile_copy_pages(layout, runner.state), runner, runner.state["lanes"])


def test_the_copy_finder_sees_a_copied_lane() -> None:
    """The tests above can fail: an update without donation makes a copy."""
    lane = np.zeros((1, 64, 128), np.float32)
    program = jax.jit(lambda x: x.at[0, 3].set(1.0)).lower(lane).compile()
    assert largest_copy(program.as_text() or "") == 64 * 128 * 4


def random_plans(count: int, max_tokens: int = 16) -> Iterator[tuple[StepPlan, Apply]]:
    """Yield plans of a busy scheduler, each with a function that applies its tokens; steps overlap as in the engine."""
    model, _, layout, limits, _ = small_engine_parts()
    rng = np.random.default_rng(11)
    scheduler = Scheduler(layout, Limits(320, 3, max_tokens, limits.page_size, num_slabs=32))
    arrivals = itertools.count()
    for number in range(count):
        while len(scheduler.sequences) < 6:
            prompt = rng.integers(0, model.vocab_size, rng.integers(1, 200)).astype(np.int32)
            if rng.random() < 0.5:  # a prefix that other prompts share
                prompt[:150] = np.arange(len(prompt[:150])) % model.vocab_size
            params = SamplingParams(
                temperature=float(rng.choice([0.0, 0.5, 1.0])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([0.9, 1.0])),
            )
            stop_ids = frozenset(rng.integers(0, model.vocab_size, 2).tolist())
            name = f"{number}.{len(scheduler.sequences)}.{next(arrivals)}"
            length = len(prompt) + int(rng.integers(1, 100))
            key = (int(rng.integers(2**32)), int(rng.integers(2**32)))
            scheduler.add(Request(name, prompt, params, stop_ids, key, length))
        if rng.random() < 0.05:
            scheduler.abort(str(rng.choice(sorted(scheduler.sequences))))
        plan = scheduler.plan()
        if plan is not None:
            yield plan, partial(scheduler.apply, plan)
        scheduler.tidy()


def test_a_thousand_plans_trace_nothing_and_upload_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of moves or of rows is one explicit upload; every other transfer is disallowed beside the steps.

    A step's call takes its packed array from the host itself.
    The donated state is gone; every token is finite, though the arena began full of NaN.
    """
    _, _, layout, limits, runner = small_engine_parts()
    num_pages = limits.num_slabs * layout.pages_per_slab
    guards: list[str | None] = []
    device_put = jax.device_put

    def counted(value: Any) -> Any:
        guards.append(jax.config.jax_transfer_guard_host_to_device)
        return device_put(value)

    monkeypatch.setattr(jax, "device_put", counted)
    steps = moves = entered = samples = 0
    kinds = set()

    def take_in(plan: StepPlan, pending: Pending, apply: Apply) -> int:
        tokens = pending.tokens()
        apply(tokens)
        assert (tokens[plan.samples != 0] >= 0).all(), "a row read memory that no row has written"
        return int(plan.samples.sum())

    before: tuple[StepPlan, Pending, Apply] | None = None
    with jax.no_tracing(True):
        for plan, apply in random_plans(1_000):
            old = jax.tree.leaves(runner.state)
            pending = runner.launch(plan)
            assert all(leaf.is_deleted() for leaf in old), "the old state is still alive"
            samples += take_in(*before) if before is not None else 0
            before = plan, pending, apply
            steps += 1
            moves += len(list(move_batches(plan.moves, num_pages)))
            entered += bool(plan.table_rows)
            kinds.add((plan.num_rows, bool((plan.counts > 1).any())))
    assert (steps > 900, moves > 0, entered > 9, samples > 900) == (True, True, True, True)
    assert len(kinds) >= 5, "the plans are too similar"
    assert guards == ["disallow"] * (moves + entered)


def test_an_upload_that_is_not_explicit_is_an_error() -> None:
    """The guard around a launch can fail: passing NumPy arrays to the program is refused."""
    _, params, _, limits, runner = small_engine_parts()
    plan, _ = next(random_plans(1))
    bucket = max(runner.buckets)
    packed = pack(plan, PackSpec.of(bucket, page_size=limits.page_size, max_rows=limits.max_rows))
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        program_of(runner, bucket)(params, runner.state, packed)


def test_tracing_in_steady_state_is_an_error() -> None:
    """`no_tracing` can fail: a function that was not compiled before is refused."""
    with jax.no_tracing(True), pytest.raises(RuntimeError, match="no_tracing"):
        jax.jit(lambda x: x + 1)(np.zeros(3, np.float32))
